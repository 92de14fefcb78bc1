"""Whatever the model, a recorded or hooked run is the bare run, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tenterhook as th
from tests.hook_leaks import _global_state
from tests.properties.trees import STYLES, WIDTH, Boom, Spec, build, specs, unwrap

EXAMPLES = settings(
    max_examples=int(os.environ.get("TENTERHOOK_EXAMPLES", "25")),
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate, *([Phase.shrink] if "TENTERHOOK_SHRINK" in os.environ else [])],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
ALL = ["input", "output", "grad_input", "grad_output", "param", "param_grad", "update"]
NO_ALIAS = [kind for kind in ALL if kind != "grad_input"]
KINDS = ("forward_pre", "forward", "backward_pre", "backward", "param_grad")

RUNS = st.fixed_dictionaries(
    {"needs_grad": st.booleans(), "training": st.booleans(), "grad": st.sampled_from([True, True, False])}
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad=True:UserWarning",  # torch, of reentrant checkpoints
    "ignore:torch.utils.checkpoint:UserWarning",
)


def _run(net: nn.Module, *, needs_grad: bool, training: bool, grad: bool) -> dict[str, Tensor]:
    torch.manual_seed(5)
    net.train(training)
    found: dict[str, Tensor] = {}
    for step in range(2):
        x = torch.randn(3, WIDTH, requires_grad=needs_grad)
        with contextlib.nullcontext() if grad else torch.no_grad():
            out = unwrap(net(x, scale=torch.full((), 0.5)))
        found[f"{step} output"] = out.detach().clone()
        if out.requires_grad:
            out.square().sum().backward()
        if x.grad is not None:
            found[f"{step} x.grad"] = x.grad.clone()
    found |= {f"{name}.grad": p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    found |= {name: tensor.clone() for name, tensor in net.state_dict().items()}
    found["rng"] = torch.get_rng_state()
    return found


def _bare(spec: Spec, run: dict[str, bool]) -> dict[str, Tensor]:
    """Run without us; trees that the framework refuses (a reentrant checkpoint of what needs no gradient) are none of ours."""
    try:
        return _run(build(spec), **run)
    except RuntimeError:
        reject()


def _different(one: dict[str, Tensor], other: dict[str, Tensor], *, exact: bool = True) -> list[str]:
    def same(a: Tensor, b: Tensor) -> bool:
        return torch.equal(a, b) if exact else torch.allclose(a, b, rtol=1e-4, atol=1e-5)

    return sorted(
        name
        for name in one.keys() | other.keys()
        if name not in one or name not in other or not same(one[name], other[name])
    )


@contextlib.contextmanager
def _hooked(net: nn.Module, kinds: tuple[str, ...] = KINDS) -> Iterator[dict[str, Any]]:
    with th.hooks(net) as hooks:
        has_parameters = next(net.parameters(), None) is not None
        yield {
            kind: getattr(hooks, kind)("**", lambda *arguments: None)
            for kind in kinds
            if kind != "param_grad" or has_parameters
        }


# ---- (a) nothing changed ----


@EXAMPLES
@given(spec=specs(), run=RUNS)
def test_a_recorded_run_is_bit_for_bit_the_bare_one(spec: Spec, run: dict[str, bool]) -> None:
    bare = _bare(spec, run)
    net = build(spec)
    with th.record(net, kinds=NO_ALIAS, tensors=True, recompute=True, on_error="raise"):
        recorded = _run(net, **run)
    assert _different(bare, recorded) == []


@EXAMPLES
@given(spec=specs(), run=RUNS)
def test_a_run_under_hooks_that_look_is_bit_for_bit_the_bare_one(spec: Spec, run: dict[str, bool]) -> None:
    bare = _bare(spec, run)
    net = build(spec)
    with _hooked(net, ("forward_pre", "forward", "backward_pre", "param_grad")):
        hooked = _run(net, **run)
    assert _different(bare, hooked) == []


@EXAMPLES
@given(spec=specs(), run=RUNS)
def test_gradients_of_inputs_change_no_output_and_at_most_the_order_of_sums(spec: Spec, run: dict[str, bool]) -> None:
    bare = _bare(spec, run)
    net, other = build(spec), build(spec)
    with th.record(net, kinds=ALL, on_error="raise"):
        recorded = _run(net, **run)
    with _hooked(other):
        hooked = _run(other, **run)
    for seen in (recorded, hooked):
        assert _different(bare, seen, exact=False) == []
        assert [name for name in _different(bare, seen) if not name.endswith(".grad")] == []


# ---- (b) nothing left behind ----


def _state(net: nn.Module) -> list[Any]:
    modules = [
        (
            name,
            sorted(vars(module)),
            module.training,
            {key: len(value) for key, value in vars(module).items() if "hook" in key and hasattr(value, "__len__")},
        )
        for name, module in net.named_modules()
    ]
    parameters = [(name, p.requires_grad, len(p._backward_hooks or {})) for name, p in net.named_parameters()]
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # torch 2.6 has no way to ask
    hooks = top(True) if top is not None else None
    return [modules, parameters, list(net.state_dict()), hooks]


def _fail(*arguments: Any) -> None:
    raise Boom("callback")


def _interrupt(*arguments: Any) -> None:
    raise KeyboardInterrupt


@EXAMPLES
@given(spec=specs(), run=RUNS, end=st.sampled_from(["normal", "forward", "callback", "selector", "interrupt"]), at=st.integers(1, 3),
       kind=st.sampled_from(KINDS[:4]))  # fmt: skip
def test_nothing_is_left_behind_however_it_ends(spec: Spec, run: dict[str, bool], end: str, at: int, kind: str) -> None:
    _bare(spec, run)
    net = build(spec, raise_at=at if end == "forward" else 0)
    net.train(run["training"])
    before, switches = _state(net), _global_state()
    with contextlib.suppress(Boom, KeyboardInterrupt), th.record(net, kinds=ALL, tensors=True), th.hooks(net) as hooks:
        getattr(hooks, kind)("**", {"callback": _fail, "interrupt": _interrupt}.get(end, lambda *arguments: None))
        if end == "selector":
            hooks.forward(lambda path, module: _fail(), lambda *arguments: None)
        _run(net, **run)
    assert _state(net) == before
    assert [
        name
        for name, value in _global_state().items()
        if name in switches and switches[name] is not value and switches[name] != value
    ] == []


# ---- (c) counts, (d) order ----


class _Reference:
    """Counts calls with the framework's own hooks, leaving out those that checkpointing makes again."""

    def __init__(self, net: nn.Module) -> None:
        self.calls: dict[str, int] = {}
        self.handles = [
            module.register_forward_hook(lambda *arguments, name=name: self._count(name))
            for name, module in net.named_modules()
        ]

    def _count(self, name: str) -> None:
        if torch._C._current_graph_task_id() == -1:
            self.calls[name] = self.calls.get(name, 0) + 1


@EXAMPLES
@given(spec=specs(), run=RUNS)
def test_fired_is_what_a_plain_hook_counts(spec: Spec, run: dict[str, bool]) -> None:
    _bare(spec, run)
    net = build(spec)
    reference = _Reference(net)
    with _hooked(net) as handles:
        _run(net, **run)
    for kind in ("forward_pre", "forward"):
        assert {site.path: site.fired for site in handles[kind].sites if site.fired} == reference.calls
    for handle in reference.handles:
        handle.remove()


PLAIN = [style for style in STYLES if not style.startswith("checkpoint")]


@EXAMPLES
@given(spec=specs(PLAIN), training=st.booleans())
def test_recorded_order_nests_and_does_not_depend_on_the_inputs_gradient(spec: Spec, training: bool) -> None:
    orders = []
    for needs_grad in (True, False):
        net = build(spec)
        with th.record(net, kinds=["output", "grad_output"], on_error="raise") as rec:
            _run(net, needs_grad=needs_grad, training=training, grad=True)
        calls = rec.order()
        by_seq = {call.seq: call for call in calls}
        for call in calls:
            parent = by_seq.get(call.parent) if call.parent is not None else None
            if call.phase == "forward" and parent is not None:
                assert parent.seq < call.seq
                assert parent.start_ns <= call.start_ns
                assert call.start_ns + call.duration_ns <= parent.start_ns + parent.duration_ns
            if call.phase == "backward" and parent is not None:
                assert parent.seq < call.seq
                assert by_seq[call.forward].seq > by_seq[parent.forward].seq
        forward = [(call.path, call.call, call.depth) for call in calls if call.phase == "forward"]
        backward = [(call.path, call.call) for call in calls if call.phase == "backward"]
        orders.append((forward, backward))
    assert orders[0][0] == orders[1][0]
    # what comes before the first parameter gets no gradient where the input needs none; the rest comes in the same order
    without = [call for call in orders[0][1] if call in set(orders[1][1])]
    assert without == orders[1][1]
