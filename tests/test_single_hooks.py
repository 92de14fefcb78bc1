"""`th.register_forward_hook` and its kin: hooks on one module or tensor."""

from __future__ import annotations

import copy
import gc
import io
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.errors import EditError, HookError, UnsupportedError

MODULE_FORMS: dict[str, tuple[Callable[..., Any], Callable[..., None]]] = {
    "forward_pre": (th.register_forward_pre_hook, lambda module, args: None),
    "forward": (th.register_forward_hook, lambda module, args, output: None),
    "backward_pre": (th.register_backward_pre_hook, lambda module, grad_output: None),
    "backward": (th.register_backward_hook, lambda module, grad_input, grad_output: None),
    "load": (th.register_load_hook, lambda module, keys: None),
}


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 2))


def use(model: nn.Module) -> None:
    model(torch.ones(2, 3)).sum().backward()
    model.load_state_dict(model.state_dict())


def tables(model: nn.Module) -> list[int]:
    return [len(hooks) for module in model.modules() for name, hooks in vars(module).items() if name.endswith("_hooks")]


@pytest.mark.parametrize("kind", MODULE_FORMS)
def test_each_form_fires_counts_and_comes_off(model: nn.Module, kind: str) -> None:
    register, fn = MODULE_FORMS[kind]
    before = tables(model)
    with register(model, fn) as handle:
        assert handle.live
        use(model)
        use(model)
        assert handle.fired == 2
    assert not handle.live
    handle.remove()
    use(model)
    assert handle.fired == 2
    assert tables(model) == before


@pytest.mark.parametrize("kind", MODULE_FORMS)
def test_a_hook_comes_off_when_the_model_raises(model: nn.Module, kind: str) -> None:
    register, fn = MODULE_FORMS[kind]
    before = tables(model)
    with pytest.raises(RuntimeError), register(model, fn):
        model(torch.ones(2, 7))
    assert tables(model) == before


@pytest.mark.parametrize("kind", MODULE_FORMS)
@pytest.mark.parametrize("fn", [lambda: None, lambda a: None, lambda a, b, c, d, e: None, 3, None])
def test_a_wrong_signature_is_found_at_registration(model: nn.Module, kind: str, fn: Any) -> None:
    before = tables(model)
    with pytest.raises(HookError, match=kind):
        MODULE_FORMS[kind][0](model, fn)
    assert tables(model) == before


@pytest.mark.parametrize("kind", MODULE_FORMS)
@pytest.mark.parametrize("wrong", [None, 3, nn.Linear, torch.ones(1), {}])
def test_what_is_no_module_is_refused(kind: str, wrong: Any) -> None:
    register, fn = MODULE_FORMS[kind]
    with pytest.raises(HookError, match="expected a torch Module"):
        register(wrong, fn)


@pytest.mark.parametrize("kind", [kind for kind in MODULE_FORMS if kind != "load"])
def test_what_is_never_called_or_runs_no_hooks_is_refused(kind: str) -> None:
    register, fn = MODULE_FORMS[kind]
    with pytest.raises(HookError, match="never called"):
        register(nn.ModuleList([nn.Linear(1, 1)]), fn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch itself, from 2.9 on
        scripted = torch.jit.script(nn.Linear(1, 1))
    with pytest.raises(UnsupportedError, match="script"):
        register(scripted, fn)


@pytest.mark.parametrize("kind", [*MODULE_FORMS, "tensor"])
def test_a_hooked_model_dies_with_its_last_reference(kind: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 2))
    if kind == "tensor":
        handle = th.register_tensor_hook(model.get_parameter("0.weight"), lambda gradient: None)
    else:
        handle = MODULE_FORMS[kind][0](model, MODULE_FORMS[kind][1])
    dead = weakref.ref(model)
    gc.disable()
    try:
        use(model)
        del model
        assert dead() is None
    finally:
        gc.enable()
    assert handle.fired == 1
    handle.remove()


def test_a_dropped_handle_leaves_its_hook_on() -> None:
    seen: list[int] = []
    model = nn.Sequential(nn.Linear(3, 3))
    th.register_forward_hook(model, lambda module, args, output: seen.append(1))
    gc.collect()
    use(model)
    assert seen == [1]
    model._forward_hooks.clear()


def test_values_can_be_replaced(model: nn.Module) -> None:
    with th.register_forward_pre_hook(model, lambda module, args: torch.zeros(2, 3)):
        assert torch.equal(model(torch.ones(2, 3)), model(torch.full((2, 3), 9.0)))
    with th.register_forward_hook(model, lambda module, args, output: output * 0):
        assert model(torch.ones(2, 3)).abs().sum() == 0
    x = torch.ones(2, 3, requires_grad=True)
    with th.register_backward_hook(model, lambda module, grad_input, grad_output: (grad_input[0] * 0 + 5,)):
        model(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((2, 3), 5.0))


def test_keyword_arguments_are_given_on_request() -> None:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
            return x * scale

    seen: list[Any] = []
    module = Scaled()
    with (
        th.register_forward_pre_hook(module, lambda m, args, kwargs: (args, {"scale": 3.0}), with_kwargs=True),
        th.register_forward_hook(module, lambda m, args, kwargs, output: seen.append(kwargs), with_kwargs=True),
    ):
        assert float(module(torch.ones(()), scale=2.0)) == 3.0
    assert seen == [{"scale": 3.0}]


def test_always_call_sees_a_call_that_raised(model: nn.Module) -> None:
    seen: list[Any] = []
    with (
        th.register_forward_hook(model, lambda module, args, output: seen.append(output), always_call=True),
        pytest.raises(RuntimeError, match="shapes cannot be multiplied"),
    ):
        model(torch.ones(2, 7))
    assert seen == [None]


@pytest.mark.parametrize("wanted", [False, True])
def test_backward_order_nests_over_single_hooks_whether_or_not_the_input_needs_a_gradient(
    model: nn.Module, wanted: bool
) -> None:
    order: list[str] = []
    handles = [
        th.register_backward_hook(module, lambda m, grad_input, grad_output, name=name: order.append(name or "root"))
        for name, module in model.named_modules()
    ]
    model(torch.ones(2, 3, requires_grad=wanted)).sum().backward()
    for handle in handles:
        handle.remove()
    assert order == ["2", "1", "0", "root"]


def test_a_tensor_hook_sees_and_replaces_the_gradient() -> None:
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    with th.register_tensor_hook(y, lambda gradient: gradient * 10) as handle:
        y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((3,), 20.0))
    assert handle.fired == 1


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.ones(1), "requires_grad=False"),
        (3, "needs a tensor of torch"),
        (nn.Linear(1, 1), "register_backward_hook"),
    ],
)
def test_a_tensor_that_gets_no_gradient_is_refused(tensor: Any, says: str) -> None:
    with pytest.raises(HookError, match=says):
        th.register_tensor_hook(tensor, lambda gradient: None)


@pytest.mark.parametrize("fn", [lambda: None, lambda a, b: None, 3])
def test_a_tensor_hook_wants_one_argument(fn: Any) -> None:
    with pytest.raises(HookError, match="grad"):
        th.register_tensor_hook(torch.ones(1, requires_grad=True), fn)


@pytest.mark.parametrize(
    "returned",
    [torch.ones(2), torch.ones(2, 2, dtype=torch.float64), [torch.ones(2, 2)], (torch.ones(2, 2),), 1.0, False],
)
def test_an_output_of_another_make_is_refused(model: nn.Module, returned: Any) -> None:
    with th.register_forward_hook(model, lambda module, args, output: returned):
        with pytest.raises(EditError, match=r"forward of \(Sequential\)"):
            model(torch.ones(2, 3))
    use(model)


@pytest.mark.parametrize("returned", [[torch.ones(2, 3)], 3, "x", torch.ones(2, 3, dtype=torch.float64), ()])
def test_arguments_of_another_make_are_refused(model: nn.Module, returned: Any) -> None:
    with th.register_forward_pre_hook(model, lambda module, args: returned):
        with pytest.raises(EditError, match=r"forward_pre of \(Sequential\)"):
            model(torch.ones(2, 3))


@pytest.mark.parametrize("returned", [(), (None, None), 3, torch.ones(1), (torch.ones(2, 3, dtype=torch.float64),)])
def test_gradients_of_another_make_are_refused(model: nn.Module, returned: Any) -> None:
    x = torch.ones(2, 3, requires_grad=True)
    with th.register_backward_hook(model, lambda module, grad_input, grad_output: returned):
        with pytest.raises(EditError, match=r"backward of \(Sequential\)"):
            model(x).sum().backward()


@pytest.mark.parametrize("kind", MODULE_FORMS)
def test_a_callback_that_raises_keeps_its_error_and_names_the_place(model: nn.Module, kind: str) -> None:
    def broken(module: Any, *rest: Any) -> None:
        raise LookupError("mine")

    before = tables(model)
    with pytest.raises(LookupError, match="mine") as caught, MODULE_FORMS[kind][0](model, broken):
        use(model)
    if sys.version_info >= (3, 11):
        assert any(f"{kind} hook on (Sequential)" in note for note in caught.value.__notes__)
    assert tables(model) == before
    use(model)


@pytest.mark.parametrize("kind", ["forward_pre", "forward"])
def test_a_callback_that_calls_its_own_module_is_not_called_for_that(model: nn.Module, kind: str) -> None:
    inner: list[torch.Tensor] = []

    def again(module: nn.Module, *rest: Any) -> None:
        inner.append(module(torch.ones(1, 3)))

    with MODULE_FORMS[kind][0](model, again) as handle:
        model(torch.ones(2, 3))
    assert handle.fired == 1
    assert [one.shape for one in inner] == [(1, 2)]


def test_a_callback_may_remove_itself_and_others_at_once(model: nn.Module) -> None:
    ran: list[str] = []
    handles: dict[str, Any] = {}

    def first(module: nn.Module, args: Any, output: Any) -> None:
        ran.append("first")
        handles["first"].remove()
        handles["second"].remove()

    handles["first"] = th.register_forward_hook(model, first)
    handles["second"] = th.register_forward_hook(model, lambda module, args, output: ran.append("second"))
    use(model)
    use(model)
    assert ran == ["first"]


def test_a_callback_that_draws_random_numbers_has_its_own_and_not_our_effect() -> None:
    model = nn.Dropout()

    def outputs(hook: Any) -> torch.Tensor:
        torch.manual_seed(0)
        if hook is None:
            return model(torch.ones(100))
        with th.register_forward_pre_hook(model, hook):
            return model(torch.ones(100))

    def forked(module: nn.Module, args: Any) -> None:
        with torch.random.fork_rng():
            torch.rand(3)

    plain = outputs(None)
    assert torch.equal(outputs(lambda module, args: None), plain)
    assert torch.equal(outputs(forked), plain)


def test_copies_and_pickles_do_not_fire(model: nn.Module) -> None:
    handles = [register(model, fn) for register, fn in MODULE_FORMS.values()]
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        use(other)
    assert [handle.fired for handle in handles] == [0] * 5
    for handle in handles:
        handle.remove()
