"""Bad input: what callbacks of gradients, tensors and functions must not return, and signatures of the kinds with other arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook.errors import EditError, HookError, SelectionError
from tests.semantics.nets import hook_counts, mlp

WRONG: dict[str, Callable[[Tensor], Any]] = {
    "list of two": lambda value: [value, value],
    "dict": lambda value: {"value": value},
    "dtype": lambda value: value.double(),
    "shape": lambda value: value[:1],
    "scalar": lambda value: value.mean(),
    "number": lambda value: 3.0,
    "False": lambda value: False,
    "text": lambda value: "text",
    "array": lambda value: value.detach().numpy(),
    "device": lambda value: value.to("meta"),
    "tuple of another dtype": lambda value: (value.double(),),
    "tuple of another shape": lambda value: (value[:1],),
    "tuple of a number": lambda value: (3.0,),
    "tuple of two": lambda value: (value, value),
    "tuple of a list": lambda value: ([value],),
}


def _put(hooks: Any, kind: str, x: Tensor, fn: Callable[[Tensor], Any]) -> Any:
    if kind == "param_grad":
        return hooks.param_grad("2.weight", lambda name, gradient: fn(gradient))
    if kind == "tensor":
        return hooks.tensor(x, fn)
    return getattr(hooks, kind)("2", lambda module, gradients, of_output=None: fn(gradients[0]))


def _run(net: nn.Module, x: Tensor) -> list[Tensor]:
    net.zero_grad()
    x.grad = None
    out = net(x)
    out.square().sum().backward()
    assert x.grad is not None
    return [out, x.grad, *(parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize("kind", ["backward_pre", "backward", "param_grad", "tensor"])
@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_a_gradient_is_refused_at_that_place(kind: str, wrong: str) -> None:
    """The error names kind, place and callback; afterwards the run is as before, to the last bit."""
    torch.manual_seed(0)
    net, x = mlp(), torch.randn(3, 4, requires_grad=True)
    clean = _run(net, x)
    before = hook_counts(net)
    place = {"param_grad": "2.weight", "tensor": r"\(tensor\)"}.get(kind, "2")
    with th.hooks(net) as hooks:
        _put(hooks, kind, x, WRONG[wrong])
        with pytest.raises(EditError, match=rf"{kind} of {place} .*returned"):
            _run(net, x)
    assert hook_counts(net) == before
    assert all(map(torch.equal, _run(net, x), clean))


@pytest.mark.parametrize("kind", ["backward_pre", "backward", "param_grad", "tensor"])
@pytest.mark.parametrize("form", ["bare", "tuple", "list"])
def test_a_bare_tensor_or_one_in_a_sequence_is_the_gradient_where_there_is_one(kind: str, form: str) -> None:
    """As in torch a bare tensor will do where a module has one gradient; a parameter's and a tensor's is never in a sequence."""
    net = nn.Sequential(nn.Identity(), nn.Identity(), nn.Linear(4, 2, bias=False))
    nn.init.ones_(net[2].weight)
    x = torch.ones(1, 4, requires_grad=True)
    of_input = kind != "param_grad"
    make: Callable[[Tensor], Any] = {
        "bare": lambda value: value * 10, "tuple": lambda value: (value * 10,), "list": lambda value: [value * 10],
    }[form]  # fmt: skip
    with th.hooks(net) as hooks:
        _put(hooks, kind, x, make)
        if form != "bare" and kind in ("param_grad", "tensor"):
            with pytest.raises(EditError, match="structure"):
                net(x).sum().backward()
            return
        net(x).sum().backward()
    assert x.grad is not None and net[2].weight.grad is not None
    assert x.grad.tolist() == [[20 if of_input else 2] * 4]
    assert net[2].weight.grad.tolist() == [[1 if kind in ("backward", "tensor") else 10] * 4] * 2


SIGNATURES: dict[str, tuple[str, list[Any]]] = {
    "param_grad": (r"fn\(name, gradient\)", [lambda: None, lambda name: None, lambda name, gradient, more: None, 3, None]),
    "tensor": (r"fn\(grad\)", [lambda: None, lambda grad, more: None, lambda *, grad: None, 3, None]),
    "load": (r"fn\(model, keys\)|fn\(model, incompatible_keys\)", [lambda: None, lambda model: None, 3, None]),
    "before": (r"fn\(", [lambda: None, 3, None]),
    "after": (r"fn\(", [lambda: None, 3, None]),
    "forward_pre with_kwargs": (r"fn\(module, args, kwargs\)", [lambda module, args: None, 3]),
    "forward with_kwargs": (r"fn\(module, args, kwargs, output\)", [lambda module, args, output: None, 3]),
    "forward with_name": (r"fn\(name, module, args, output\)", [lambda module, args, output: None, 3]),
    "backward with_name": (r"fn\(name, module, grad_input, grad_output\)", [lambda module, gi, go: None, 3]),
}  # fmt: skip


@pytest.mark.parametrize("kind", SIGNATURES)
def test_a_wrong_signature_is_found_at_registration_for_the_other_kinds(kind: str) -> None:
    """Nothing is put on, and the error says what the callback will be given."""
    says, wrong = SIGNATURES[kind]
    net = mlp()
    before = hook_counts(net)
    name, _, option = kind.partition(" ")
    x = torch.ones(1, requires_grad=True)

    class Owner:
        def method(self, value: int) -> int:
            return value

    arguments = {"param_grad": ("2.weight",), "tensor": (x,), "before": (Owner, "method"), "after": (Owner, "method")}
    with th.hooks(net) as hooks:
        for fn in wrong:
            place = () if name == "load" else arguments.get(name, ("2",))
            with pytest.raises(HookError, match=rf"(?s){name}.*{says}"):
                getattr(hooks, name)(*place, fn, **({option: True} if option else {}))
        assert len(hooks) == 0
    assert hook_counts(net) == before
    assert not x._backward_hooks


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2)])
        self.scale = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize(
    ("name", "near"), [("blocks.0", "'blocks.0.*' (2 parameters)"), ("blocks.0.wieght", "'blocks.0.weight'"), ("blocks", "blocks.")]
)  # fmt: skip
def test_what_is_no_parameter_is_refused_where_one_is_asked_for(name: str, near: str) -> None:
    """The other way round: the name of a module, or of nothing, given to ``param_grad``."""
    with th.hooks(Lists()) as hooks, pytest.raises(SelectionError) as caught:
        hooks.param_grad(name, lambda name, gradient: None)
    assert near in str(caught.value)


@pytest.mark.parametrize("edited", ["output", "grad_output", "input"])
def test_edits_refuse_a_container_and_a_parameter_by_name_too(edited: str) -> None:
    """In an edit session as in one of hooks."""
    model = Lists()
    for name, words in (("blocks", "never called"), ("scale", "name of a parameter")):
        with pytest.raises(SelectionError, match=words), th.edit(model) as edit:
            getattr(edit, edited)(name, lambda value: value)
