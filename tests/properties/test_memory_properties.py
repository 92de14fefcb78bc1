"""Whatever the model, checkpointed regions included: it dies at ``del``, and steps leave nothing but their rows."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tenterhook as th
from tests.properties.test_nothing_changed import ALL, EXAMPLES, KINDS, _bare
from tests.properties.trees import STYLES, WIDTH, Boom, Raising, Spec, build, specs, unwrap

pytestmark = pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad=True:UserWarning",  # torch, of reentrant checkpoints
    "ignore:torch.utils.checkpoint:UserWarning",
)
CHECKPOINTED = [style for style in STYLES if style.startswith("checkpoint")]
RUN = {"needs_grad": True, "training": True, "grad": True}
SESSIONS = ["hooks", "record", "record without tensors"]


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _step(net: nn.Module) -> None:
    x = torch.randn(3, WIDTH, requires_grad=True)
    out = unwrap(net(x, scale=torch.full((), 0.5)))
    if out.requires_grad:
        out.square().sum().backward()
    net.zero_grad()


@contextlib.contextmanager
def _session(net: nn.Module, kind: str) -> Iterator[Any]:
    if kind != "hooks":
        with th.record(net, kinds=ALL, tensors=kind == "record", on_error="raise") as rec:
            yield rec
        return
    with th.hooks(net) as hooks:
        for one in KINDS:
            if one != "param_grad" or next(net.parameters(), None) is not None:
                getattr(hooks, one)("**", lambda *arguments: None)
        yield hooks


def _ours() -> Counter[str]:
    return Counter(
        type(one).__name__ for one in gc.get_objects() if str(type(one).__module__).startswith("tenterhook.")
    )


@EXAMPLES
@given(spec=specs([*CHECKPOINTED, "plain"]), kind=st.sampled_from(SESSIONS), raises=st.booleans())
def test_a_hooked_model_dies_at_del(spec: Spec, kind: str, raises: bool) -> None:
    """With the collector off, after a normal end and after one by an exception in its forward; during the session, too."""
    _bare(spec, RUN)
    with _no_collection():
        net = build(spec, raise_at=1 if raises else 0)
        dead = weakref.ref(net)
        with contextlib.suppress(Boom), _session(net, kind):
            _step(net)
        del net
        assert dead() is None


@EXAMPLES
@given(spec=specs([*CHECKPOINTED, "plain"]), kind=st.sampled_from(["hooks", "record without tensors"]))
def test_steps_leave_nothing_but_their_rows(spec: Spec, kind: str) -> None:
    """Also where each third of them fails, in the forward or in a region that is run again."""
    _bare(spec, RUN)
    net: Any = build(spec)
    net.parts.append(Raising(0))
    with _no_collection(), _session(net, kind):
        counts = []
        for step in range(24):
            net.parts[-1].at = net.parts[-1].calls + 1 + step % 2 if step % 3 == 0 else 0
            with contextlib.suppress(Boom):
                _step(net)
            if step in (8, 23):
                net.parts[-1].at = 0
                _step(net)
                counts.append(_ours())
    assert {name: count for name, count in (counts[1] - counts[0]).items() if count > 5} == {}
