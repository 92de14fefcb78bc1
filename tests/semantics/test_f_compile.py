"""Section F, compiled code (rows 13, 14, 16, 17): inside a session it runs eager, afterwards compiled as before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import tenterhook as th
from tests.semantics.compiling import TOLD, WAYS, make_net, wrapped
from tests.semantics.nets import hook_counts

BACKENDS = ["eager", "aot_eager"]


@pytest.fixture(autouse=True, scope="module")
def loaded_compiler() -> None:
    """The first compilation of a process patches nn.Module for good; that is not ours to answer for."""
    torch.compile(nn.Identity(), backend="eager")(torch.ones(1))


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def forward_paths(rec: th.Recorder) -> list[str]:
    return [call.path for call in rec.order() if call.phase == "forward"]


def stance() -> str:
    return torch._dynamo.eval_frame._stance.stance


def plus_hundred(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output + 100


class Counting:
    """A compiler backend that counts what is compiled and how often it runs."""

    def __init__(self) -> None:
        self.graphs = 0
        self.runs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.runs += 1
            return graph(*args)

        return run


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("called_before", [False, True])
def test_an_edit_applies_whenever_the_model_was_compiled(
    way: Callable[..., Any], backend: str, called_before: bool
) -> None:
    """Row 13: a hook put on after the first compiled call is ignored by torch; here the edit applies."""
    net: Any = make_net()
    x = torch.ones(1, 2)
    truth = net[2](net[1](net[0](x) + 100))
    plain = net(x)
    compiled = way(net, backend)
    if called_before:
        compiled(x)
    with th.hooks(compiled) as hooks:
        hooks.forward("0", plus_hundred)
        assert torch.equal(compiled(x), truth)
        assert TOLD in str(hooks)
    assert torch.equal(compiled(x), plain)
    assert stance() == "default"


@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_gradient_hooks_apply(way: Callable[..., Any], called_before: bool) -> None:
    """Row 14: a backward hook put on after the first compiled call gives [1, 1] in place of [2, 2] in torch."""
    net = nn.Sequential(nn.Identity())
    compiled = way(net, "aot_eager")
    if called_before:
        compiled(torch.ones(2, requires_grad=True)).sum().backward()
    x = torch.ones(2, requires_grad=True)
    with th.hooks(compiled) as hooks:
        handle = hooks.backward("0", lambda module, grad_input, grad_output: (grad_input[0] * 2,))
        compiled(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2]
    assert handle.fired == 1


@pytest.mark.parametrize("kind", ["backward_pre", "tensor", "param_grad"])
def test_other_gradient_hooks_apply_after_the_first_compiled_call(kind: str) -> None:
    """Row 14, same kind: the other hooks that see a gradient."""
    net: Any = nn.Sequential(nn.Linear(2, 2, bias=False))
    compiled = wrapped(net, "aot_eager")
    compiled(torch.ones(2, requires_grad=True)).sum().backward()
    net.zero_grad()
    x = torch.ones(2, requires_grad=True)
    with th.hooks(compiled) as hooks:
        if kind == "backward_pre":
            handle = hooks.backward_pre("0", lambda module, grad_output: (grad_output[0] * 2,))
        elif kind == "tensor":
            handle = hooks.tensor(x, lambda grad: grad * 2)
        else:
            handle = hooks.param_grad("0.weight", lambda name, grad: grad * 2)
        compiled(x).sum().backward()
    weight = net[0].weight
    assert x.grad is not None and weight.grad is not None
    assert handle.fired == 1
    assert torch.equal(x.grad, weight.detach().sum(0) * (1 if kind == "param_grad" else 2))
    assert weight.grad.tolist() == [[1 if kind == "tensor" else 2] * 2] * 2


@pytest.mark.parametrize("way", WAYS)
def test_the_wrapper_is_no_module_of_its_own(way: Callable[..., Any]) -> None:
    """Row 16: a global hook sees 'Linear' and 'OptimizedModule'; here the layer has one record."""
    layer = way(nn.Linear(2, 2), "eager")
    with th.record(layer) as rec:
        layer(torch.ones(1, 2))
    assert [(call.path, call.type) for call in rec.order()] == [("", "Linear")]


def test_a_compiled_layer_in_a_plain_model_has_one_record() -> None:
    """Row 16, same kind: the wrapper sits inside."""
    net: Any = make_net()
    net[0] = torch.compile(net[0], backend="eager")
    net(torch.ones(1, 2))
    with th.record(net) as rec:
        net(torch.ones(1, 2))
    assert forward_paths(rec) == ["", "0", "1", "2"]
    assert rec["0"].calls[0].type == "Linear"
    assert rec.told == [TOLD]


@pytest.mark.parametrize(
    "options", [{"backend": "eager"}, {"backend": "eager", "fullgraph": True}, {"backend": "aot_eager"}]
)
def test_every_call_is_recorded_once(options: dict[str, Any]) -> None:
    """Row 17: calls 1 and 2 give one record each, also with fullgraph."""
    net = torch.compile(make_net(), **options)
    with th.record(net) as rec:
        for call in (1, 2):
            net(torch.ones(1, 2))
            assert forward_paths(rec) == ["", "0", "1", "2"] * call


def test_a_recompilation_is_nothing_to_a_session() -> None:
    """Row 17, same kind: new shapes and a new mode would compile again."""
    backend = Counting()
    net = torch.compile(make_net(), backend=backend, dynamic=False)
    net(torch.ones(1, 2))
    with th.record(net) as rec:
        for size in (1, 3, 4):
            net(torch.ones(size, 2))
        net.eval()
        net(torch.ones(1, 2))
    assert forward_paths(rec) == ["", "0", "1", "2"] * 4
    assert (backend.graphs, backend.runs) == (1, 1)
    net.train()
    net(torch.ones(3, 2))
    assert backend.graphs == 2


def test_compiled_code_is_used_again_after_the_session() -> None:
    """Row 13: neither is the old graph lost nor a new one left that calls our hooks."""
    backend = Counting()
    net = make_net()
    compiled: Any = torch.compile(net, backend=backend)
    x = torch.ones(1, 2)
    plain = compiled(x)
    assert (backend.graphs, backend.runs) == (1, 1)
    with th.hooks(compiled) as hooks:
        handle = hooks.forward("**", plus_hundred)
        compiled(x)
    assert (backend.graphs, backend.runs) == (1, 1)
    assert torch.equal(compiled(x), plain)
    assert (backend.graphs, backend.runs) == (1, 2)
    assert handle.fired == 4


def test_what_is_compiled_during_a_session_keeps_nothing_of_it() -> None:
    """Row 13, same kind: torch would trace the hooks into the new graph, with no guard that sees them go."""
    net, x = make_net(), torch.ones(1, 2)
    plain = net(x)
    with th.record(net) as rec, th.hooks(net) as hooks:
        handle = hooks.forward("0", plus_hundred)
        compiled: Any = torch.compile(net, backend="eager")
        for _ in range(2):
            assert not torch.equal(compiled(x), plain)
    assert handle.fired == 2
    assert forward_paths(rec) == ["", "0", "1", "2"] * 2
    assert rec.told == [TOLD]
    assert rec.recording.manifest.told == [TOLD]
    for _ in range(2):
        assert torch.equal(compiled(x), plain)
    assert handle.fired == 2


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # torch's, on tracing an optimizer
@pytest.mark.parametrize("called_before", [False, True])
def test_a_compiled_train_step_is_seen(called_before: bool) -> None:
    """Row 13, same kind: a function is compiled that calls the model; nothing on the model tells so."""
    net: Any = make_net()
    x = torch.ones(1, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    @torch.compile(backend="eager")
    def train_step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss = net(x).square().sum()
        loss.backward()
        optimizer.step()

    if called_before:
        train_step(x)
    with th.record(net) as rec:
        train_step(x)
        train_step(x)
    assert forward_paths(rec) == ["", "0", "1", "2"] * 2
    assert [call.path for call in rec.order() if call.phase == "backward"] == ["", "2", "1", "0"] * 2
    assert rec.recording.steps == [0, 1]
    assert rec.told == [TOLD]
    before = net[0].weight.detach().clone()
    train_step(x)
    assert not torch.equal(net[0].weight, before)


def test_a_compiled_region_inside_forward_is_seen() -> None:
    """Row 13, same kind: the model calls a compiled function of its own."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.part = torch.compile(self._part, backend="eager")

        def _part(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * 2

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.part(x) + 1

    net = Net()
    net(torch.ones(1, 2))
    with th.record(net) as rec:
        net(torch.ones(1, 2))
    assert forward_paths(rec) == ["", "layer"]
    assert rec.told == [TOLD]


def test_a_session_inside_compiled_code_is_refused() -> None:
    """Row 13, same kind, P: there the hooks would be traced; the error says where to open the session."""
    net = make_net()

    @torch.compile(backend="eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        with th.hooks(net) as hooks:
            hooks.forward("0", plus_hundred)
            return net(x)

    with pytest.raises(th.TenterhookError, match="cannot begin inside compiled code"):
        step(torch.ones(1, 2))


def test_the_users_stance_is_set_back() -> None:
    """Row 17, same kind: a switch of the compiler that somebody set, after a normal end and after an exception."""
    net = make_net()
    with torch.compiler.set_stance("eager_on_recompile"):
        with th.record(net):
            assert stance() == "force_eager"
        assert stance() == "eager_on_recompile"
        with pytest.raises(KeyError), th.hooks(net):
            raise KeyError
        assert stance() == "eager_on_recompile"
    assert stance() == "default"


def _scaling(net: nn.Module) -> Any:
    edit = th.edit(net).start()
    edit.output("0", th.edits.scale(2.0))
    return edit


@pytest.mark.parametrize(
    "begin",
    [
        lambda net: th.hooks(net).forward("0", plus_hundred),
        _scaling,
        lambda net: th.record(net).start(),
        lambda net: th.register_forward_hook(net[0], plus_hundred),
    ],
    ids=["hooks", "edit", "record", "single"],
)
def test_a_session_that_cannot_begin_leaves_the_compiler_as_it_was(
    begin: Callable[[nn.Module], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 17, same kind: interrupted just when compiled code has been made to run eager."""

    def interrupted() -> None:
        assert stance() == "force_eager"
        raise KeyboardInterrupt

    net = make_net()
    torch.compile(net, backend="eager")(torch.ones(1, 2))
    with monkeypatch.context() as patch:
        patch.setattr("tenterhook.backends._torch_compiled._seeing_runs", interrupted)
        with pytest.raises(KeyboardInterrupt):
            begin(net)
    assert stance() == "default"
    assert hook_counts(net) == [0] * len(hook_counts(net))
    session = begin(net)
    assert stance() == "force_eager"
    net(torch.ones(1, 2))
    end: Any = getattr(session, "close", None) or session.remove
    end()


def test_sessions_may_end_in_any_order() -> None:
    """Row 17, same kind: the one that was opened first ends first."""
    net: Any = torch.compile(make_net(), backend="eager")
    first, second = th.hooks(net), th.hooks(net)
    first.close()
    assert stance() == "force_eager"
    handle = second.forward("0", plus_hundred)
    net(torch.ones(1, 2))
    second.close()
    assert handle.fired == 1
    assert stance() == "default"


def test_sessions_in_several_threads_share_the_switch() -> None:
    """Row 17, same kind: one thread's session outlasts that of another."""
    opened, go_on = threading.Event(), threading.Event()

    def other() -> None:
        with th.hooks(make_net()):
            opened.set()
            go_on.wait(30)

    thread = threading.Thread(target=other)
    thread.start()
    assert opened.wait(30)
    with th.record(make_net()):
        go_on.set()
        thread.join()
        assert stance() == "force_eager"
    assert stance() == "default"
