"""Section F, compiled code (rows 13, 14, 16, 17): inside a session it runs eager, afterwards compiled as before."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import tenterhook as th

TOLD = "compiled code runs eager in the session: compiled code does not call hooks"
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


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))


def wrapped(net: nn.Module, backend: str) -> Any:
    return torch.compile(net, backend=backend)


def in_place(net: nn.Module, backend: str) -> Any:
    net.compile(backend=backend)
    return net


def dynamic(net: nn.Module, backend: str) -> Any:
    return torch.compile(net, backend=backend, dynamic=True)


WAYS = [wrapped, in_place, dynamic]


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


def test_nothing_is_told_where_nothing_is_compiled() -> None:
    """Row 13: the sentence stands only where there is compiled code; an optimizer alone has torch load its compiler."""
    net = make_net()
    torch.optim.SGD(net.parameters(), lr=0.1).zero_grad()
    for _ in range(2):
        with th.record(net) as rec:
            pass
        assert rec.told == []


def _sine(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x)


class Whole(nn.Module):
    """Contains what a session is on."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x)


# What is compiled, and whether that runs the session's model.
COMPILED: dict[str, tuple[Callable[[nn.Module], Callable[[torch.Tensor], Any]], bool]] = {
    "another function": (lambda net: torch.compile(_sine, backend="eager"), False),
    "another model": (lambda net: torch.compile(make_net(), backend="eager"), False),
    "another model in place": (lambda net: in_place(make_net(), "eager"), False),
    "a function that is given the model": (lambda net: partial(torch.compile(_run, backend="eager"), net), True),
    "a function that runs a part of it": (lambda net: partial(torch.compile(_run, backend="eager"), net[2]), True),  # type: ignore[index]
    "a whole that contains it": (lambda net: torch.compile(Whole(net), backend="eager"), True),
    "a part of it in place": (lambda net: (net[0].compile(backend="eager"), net)[1], True),  # type: ignore[index]
    "a function in its forward": (lambda net: Whole(net.append(Calls(torch.compile(_sine, backend="eager")))), True),  # type: ignore[operator]
}


class Calls(nn.Module):
    def __init__(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fn(x)


def _run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


@torch.no_grad()  # torch warns of what it does itself when it compiles code that is given the result of a computation
@pytest.mark.parametrize("when", ["before", "during"])
@pytest.mark.parametrize(("compiled", "concerns"), COMPILED.values(), ids=COMPILED)
def test_it_is_told_of_what_concerns_the_model(
    compiled: Callable[[nn.Module], Callable[[torch.Tensor], Any]], concerns: bool, when: str
) -> None:
    """Row 13: by recordings, hooks and edits; compiled code of others is no news for a session that it never meets."""
    net, x = make_net(), torch.ones(2, 2)
    if when == "before":
        run = compiled(net)
        run(x)
    with th.record(net) as rec, th.hooks(net) as hooks, th.edit(net) as edit:
        hooks.forward("0", lambda module, args, output: None)
        edit.output("0", th.edits.scale(1.0))
        run = compiled(net) if when == "during" else run
        net(x)
        run(x)
    expected = [TOLD] if concerns else []
    assert rec.told == expected
    assert rec.recording.manifest.told == expected
    assert (TOLD in str(hooks)) == concerns
    assert (TOLD in str(edit)) == concerns


def test_the_thread_of_somebody_elses_compiled_code_tells_nothing() -> None:
    """Row 13, same kind: a compiled function in another thread, and the model in this one, at the same time."""
    net, x = make_net(), torch.ones(2, 2)
    other = torch.compile(_sine, backend="eager")
    with th.record(net) as rec:
        thread = threading.Thread(target=other, args=(x,))
        thread.start()
        net(x)
        thread.join()
        net(x)
    assert rec.told == []


def test_the_compiler_is_waited_for_and_not_imported() -> None:
    """Row 13, same kind: the model is compiled in a session that began before torch loaded its compiler."""
    program = """
import sys, torch, tenterhook as th
net = torch.nn.Sequential(torch.nn.Linear(2, 2))
finders = sys.meta_path[:]

def waiting():
    return [finder for finder in sys.meta_path if type(finder).__module__.startswith("tenterhook")]

with th.hooks(net):
    pass
assert "torch._dynamo" not in sys.modules and sys.meta_path == finders
with th.hooks(net) as hooks:
    assert waiting()
    handle = hooks.forward("0", lambda module, args, output: output + 100)
    compiled = torch.compile(net, backend="eager")
    assert "torch._dynamo" in sys.modules and not waiting()
    for _ in range(2):
        assert (compiled(torch.ones(1, 2)) > 50).all()
assert handle.fired == 2
assert (compiled(torch.ones(1, 2)) < 50).all()
assert handle.fired == 2
assert "runs eager" in str(hooks)
assert torch._dynamo.eval_frame._stance.stance == "default"
assert type(torch._dynamo.__loader__).__module__.startswith("_frozen_importlib"), torch._dynamo.__loader__
"""
    subprocess.run([sys.executable, "-c", program], check=True)
