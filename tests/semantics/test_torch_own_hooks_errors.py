"""What torch promises of hooks where something is wrong or old: errors, warnings, removal, legacy; bare and in each session."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as registries

from tests.semantics.own_hooks_nets import Failing, Pair, _x


@pytest.fixture(autouse=True)
def _which_global_backward_hooks() -> Iterator[None]:
    """Torch remembers for good which kind of global backward hook there was first."""
    before = registries._global_is_full_backward_hook
    registries._global_is_full_backward_hook = None
    yield
    registries._global_is_full_backward_hook = before


# ---- always_call ----


def _raise(text: str) -> Any:
    def hook(*arguments: Any) -> None:
        raise RuntimeError(text)

    return hook


@pytest.mark.parametrize("everywhere", [False, True], ids=["of the module", "global"])
def test_an_always_called_hook_does_not_run_twice_and_goes_with_its_flag(session: Any, everywhere: bool):
    """Where the call goes well, where a hook after it raises, where another that is always called raises; removed, nothing is left."""
    model = Failing()
    model.fails = False
    fired: list[str] = []
    table = registries._global_forward_hooks_always_called if everywhere else model._forward_hooks_always_called
    register: Any = registries.register_module_forward_hook if everywhere else model.register_forward_hook
    with session(model):
        handles = [register(lambda *_: fired.append("always"), always_call=True)]
        assert handles[0].id in table
        model(_x())
        assert fired == ["always"]
        with model.register_forward_hook(_raise("from a hook behind")), pytest.raises(RuntimeError, match="behind"):
            model(_x())
        assert fired == ["always"] * 2
        handles.append(model.register_forward_hook(_raise("from a hook in front"), prepend=True, always_call=True))
        model.fails = True
        with pytest.warns(UserWarning, match="raised an exception"), pytest.raises(RuntimeError, match="from forward"):
            model(_x())
        assert fired == ["always"] * 3
        for handle in handles:
            handle.remove()
        assert not any(handle.id in one for handle in handles for one in (table, model._forward_hooks_always_called))
        with pytest.raises(RuntimeError, match="from forward"):
            model(_x())
        assert fired == ["always"] * 3


# ---- the number and the place of gradients ----


@pytest.mark.parametrize("pre", [False, True])
def test_a_global_backward_hook_may_replace_gradients_and_not_their_number(session: Any, pre: bool):
    model = nn.Sequential(nn.Sigmoid())
    x = torch.zeros(2, requires_grad=True)
    register = (
        registries.register_module_full_backward_pre_hook if pre else registries.register_module_full_backward_hook
    )
    with session(model):
        handle = register(lambda module, *gradients: (gradients[0][0] * 3,) if module is model[0] else None)
        try:
            model(x).sum().backward()
        finally:
            handle.remove()
        assert x.grad is not None and x.grad.tolist() == [0.75, 0.75]
        handle = register(lambda module, *gradients: (gradients[0][0],) * 2 if module is model[0] else None)
        try:
            with pytest.raises(RuntimeError, match="got 2, but expected 1"):
                model(x).sum().backward()
        finally:
            handle.remove()


class Keeping(nn.Module):
    """Keeps its input, which it may change."""

    def forward(self, x: Tensor, change: bool = False) -> Tensor:
        self.kept = x
        if change:
            x += 1
        return x.clone()


@pytest.mark.parametrize("kind", ["full_backward", "full_backward_pre"])
def test_the_three_in_place_errors_of_a_full_backward_hook(session: Any, kind: str):
    """Its input changed inside, its input changed afterwards and used again, and its output changed."""
    model = Keeping()
    called: list[int] = []
    getattr(model, f"register_{kind}_hook")(lambda *_: called.append(1))
    x = torch.rand(10, requires_grad=True)
    with session(model):
        model(x).sum().backward()
        assert called == [1]
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            model(x.clone(), True)
        given = x.clone()
        model(given)
        given[0] *= 1
        with pytest.raises(RuntimeError, match="is a view and its base or another view of its base has been modified"):
            model.kept + 2
        out = model(x)
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            out += 1


# ---- legacy hooks ----


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_counts_of_a_legacy_hook(session: Any):
    """Once a backward pass, with two hooks each, until it is removed; a returned gradient counts."""
    model = nn.Sequential(nn.Sigmoid())
    counts = [0, 0]
    x = torch.zeros(2, requires_grad=True)

    def counting(place: int) -> Any:
        def hook(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
            counts[place] += 1
            assert len(grad_input) == len(grad_output) == 1

        return hook

    with session(model):
        first = model[0].register_backward_hook(counting(0))
        model(x).sum().backward()
        second = model[0].register_backward_hook(counting(1))
        model(x).sum().backward()
        assert counts == [2, 1]
        second.remove()
        first.remove()
        x.grad = None
        model[0].register_backward_hook(lambda module, grad_input, grad_output: (grad_input[0] * 3,))
        model(x).sum().backward()
        assert counts == [2, 1]
        assert x.grad is not None and x.grad.tolist() == [0.75, 0.75]


class Legacy(nn.Module):
    def __init__(self, run: Any) -> None:
        super().__init__()
        self.run = run

    def forward(self, *args: Any) -> Any:
        return self.run(*args)


LEGACY = {
    "its input": (lambda x: x[0] + x[1], lambda x: ([x, x],), "does not take as input a single Tensor or a tuple of Tensors"),
    "its output": (lambda x: [x * 2], lambda x: (x,), "does not return a single Tensor or a tuple of Tensors"),
    "two nodes of the output": (lambda x: (x * 2, x + 1), lambda x: (x,), "outputs are generated by different autograd Nodes"),
    "several nodes within": (lambda x: (x * 2).exp(), lambda x: (x,), "contains multiple autograd Nodes"),
}  # fmt: skip


@pytest.mark.parametrize("of", LEGACY)
def test_the_four_warnings_of_a_legacy_hook(session: Any, of: str):
    run, arguments, text = LEGACY[of]
    model = Legacy(run)
    with session(model), model.register_backward_hook(lambda *_: None):
        given = arguments(torch.ones(2, requires_grad=True))
        with pytest.warns(FutureWarning, match=text) as said:
            model(*given)
    assert len(said) == 1


# ---- what is registered ----


@pytest.mark.parametrize("kind", ["parameter", "buffer", "module"])
def test_a_registration_hook_may_put_something_else_in_the_place(session: Any, kind: str):
    model = Pair()
    new: Any = {
        "parameter": nn.Parameter(torch.ones(1)), "buffer": torch.ones(1), "module": nn.Identity(),
    }[kind]  # fmt: skip
    old: Any = {"parameter": nn.Parameter(torch.zeros(1)), "buffer": torch.zeros(1), "module": nn.ReLU()}[kind]
    register = getattr(registries, f"register_module_{kind}_registration_hook")
    with session(model):
        handle = register(lambda module, name, value: new if name == "late" else None)
        try:
            model.register_buffer("late", old) if kind == "buffer" else setattr(model, "late", old)
        finally:
            handle.remove()
        assert model.late is new
        model.register_buffer("later", old) if kind == "buffer" else setattr(model, "later", old)
        assert model.later is old


# ---- state dicts ----


def _named(*arguments: Any) -> None:
    """A hook that pickle finds by its name."""
    _seen.append(len(arguments))


_seen: list[int] = []


@pytest.mark.parametrize("with_module", [False, True])
def test_a_load_pre_hook_is_given_the_module_if_it_asks_and_goes_into_copies(session: Any, with_module: bool):
    model = Pair()
    with session(model):
        model.one._register_load_state_dict_pre_hook(_named, with_module)
        for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            _seen.clear()
            other.load_state_dict(model.state_dict())
            assert _seen == [8 if with_module else 7]


NEWER = ("_load_state_dict_post_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")


@pytest.mark.parametrize("make", [lambda: nn.Linear(2, 2), nn.Softmin, nn.LogSoftmax, lambda: nn.Softmax(-1)])
def test_old_pickles_without_hooks_on_loading_load_and_accept_some(session: Any, make: Any):
    module = make()
    state = module.state_dict()
    attributes = {name: value for name, value in vars(module).items() if name not in NEWER}
    old = type(module).__new__(type(module))
    old.__setstate__(attributes)
    model = nn.Sequential(old)
    fired: list[str] = []
    with session(model):
        old.load_state_dict(state)
        assert list(old.state_dict()) == list(state)
        old.register_load_state_dict_post_hook(lambda module, keys: fired.append("post"))
        old.register_load_state_dict_pre_hook(lambda *_: fired.append("pre"))
        old.register_state_dict_pre_hook(lambda *_: fired.append("state"))
        old.load_state_dict(old.state_dict())
    assert fired == ["state", "pre", "post"]


# ---- lazy, converted and compiled modules ----


def test_a_lazy_modules_own_hooks_go_at_its_first_call_and_the_users_stay(session: Any):
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    fired: list[str] = []
    model[0].register_forward_pre_hook(lambda module, args: fired.append(f"pre {type(module).__name__}"))
    with session(model):
        model[0].register_forward_hook(lambda module, args, output: fired.append(f"post {type(module).__name__}"))
        for _ in range(2):
            model(torch.ones(4, 2)).sum().backward()
    assert fired == ["pre Linear", "post Linear"] * 2
    assert [type(one) for one in model] == [nn.Linear, nn.BatchNorm1d]
    assert [len(one._forward_pre_hooks) for one in model] == [1, 0]
    assert not any(hasattr(one, "_initialize_hook") or one._load_state_dict_pre_hooks for one in model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*[Qq]uanti:UserWarning")
def test_a_converted_module_keeps_the_users_hooks(session: Any):
    """Eager quantisation puts another module in the place, with the hooks of the old one that are not the observer's."""
    quantisation = torch.ao.quantization
    model = nn.Sequential(quantisation.QuantStub(), nn.Linear(2, 2), quantisation.DeQuantStub()).eval()
    model.qconfig = quantisation.get_default_qconfig(torch.backends.quantized.supported_engines[-1])
    fired: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantisation.prepare(model, inplace=True)
        model[1].register_forward_pre_hook(lambda module, args: fired.append("pre"))
        model[1].register_forward_hook(lambda module, args, output: fired.append("post"))
        model(torch.ones(1, 2))
        fired.clear()
        quantisation.convert(model, inplace=True)
        assert type(model[1]).__module__.startswith("torch.ao.nn.quantized")
        bare = model(torch.ones(1, 2))
        before, _ = fired[:], fired.clear()
        with session(model):
            assert torch.equal(model(torch.ones(1, 2)), bare)
    assert fired == before == ["pre", "post"]


def _compile(net: nn.Module) -> Any:
    return torch.compile(net, backend="eager")


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.usefixtures("loaded_compiler")
@pytest.mark.parametrize("make", [lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh()), Checkpointed])
def test_the_users_hooks_in_a_compiled_model_have_their_effects(session: Any, make: Any):
    """Side effects, once a call, and what they return; also on what is recomputed, whose repeat a session does not hide."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = make()
    layer = next(one for one in net.modules() if isinstance(one, nn.Linear))
    fired: list[int] = []
    layer.register_forward_hook(lambda module, args, output: (fired.append(1), output * 2)[1])
    x = torch.ones(1, 2, requires_grad=True)
    net(x).sum().backward()
    (eager, expected), x.grad = (len(fired), x.grad), None
    compiled = _compile(net)
    with session(net):
        fired.clear()
        compiled(x).sum().backward()
    assert torch.equal(x.grad, expected)  # type: ignore[arg-type]
    assert len(fired) == eager
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch, in its own tracing
@pytest.mark.usefixtures("loaded_compiler")
def test_a_compiled_backward_pass_runs_hooks_and_gives_the_same_gradients(session: Any):
    torch._dynamo.reset()
    compiled_autograd = pytest.importorskip("torch._dynamo.compiled_autograd")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    seen: list[int] = []
    net[1].register_full_backward_hook(lambda *_: seen.append(1))
    x = torch.ones(1, 2, requires_grad=True)
    net(x).sum().backward()
    expected = [x.grad, *(one.grad for one in net.parameters())]
    x.grad = None
    net.zero_grad()
    seen.clear()
    with session(net), compiled_autograd._enable(_compile_graph):
        net(x).sum().backward()
    found = [x.grad, *(one.grad for one in net.parameters())]
    assert seen == [1]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))  # type: ignore[arg-type]
    torch._dynamo.reset()


def _compile_graph(graph: Any) -> Any:
    return torch.compile(graph, backend="eager")
