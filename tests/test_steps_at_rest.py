"""Steps between samples, which the native path counts by itself: as the Python code would have counted them."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tenterhook as th
from tests.native_rows import NATIVE_ONLY, _rows

pytestmark = NATIVE_ONLY


@pytest.fixture(scope="module", autouse=True)
def _few_objects() -> Iterator[None]:
    """Leave what is there already out of the searches for optimizers and compiled models, which a session begins with."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class _Net(nn.Module):
    """Two layers; does once whatever it is told, in the middle of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.amid: list[Callable[[], Any]] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        while self.amid:
            self.amid.pop()()
        return self.second(x)


class _Run:
    """A network in a session, and what can be done to it."""

    def __init__(self, net: _Net, rec: th.Recorder) -> None:
        self.net, self.rec = net, rec
        self.optimizer: torch.optim.Optimizer | None = None
        self.losses: list[Tensor] = []
        self.hooks: list[Any] = []

    def infer(self) -> None:
        with torch.no_grad():
            self.net(torch.ones(2, 4))

    def train(self) -> None:
        self.net(torch.ones(2, 4)).sum().backward()

    def keep(self) -> None:
        self.losses.append(self.net(torch.ones(2, 4)).sum())

    def keep_checkpointed(self) -> None:
        out: Any = checkpoint(self.net, torch.ones(2, 4, requires_grad=True), use_reentrant=False)
        self.losses.append(out.sum())

    def late(self) -> None:
        if not self.losses:
            return
        try:
            self.losses[0].backward(retain_graph=True)
        except RuntimeError as error:  # torch refuses it half-way, where an optimizer has stepped since
            assert "modified by an inplace operation" in str(error)

    def forget(self) -> None:
        self.losses.clear()

    def optimize(self) -> None:
        self.optimizer = self.optimizer or torch.optim.SGD(self.net.parameters(), lr=0.0)
        self.train()
        self.optimizer.step()

    def have_optimizer(self) -> None:
        self.optimizer = self.optimizer or torch.optim.SGD(self.net.parameters(), lr=0.0)

    def say(self) -> None:
        self.rec.step()

    def pause(self) -> None:
        self.rec.pause()

    def resume(self) -> None:
        self.rec.resume()

    def pause_amid(self) -> None:
        self.net.amid.append(self.rec.pause)
        self.infer()

    def resume_amid(self) -> None:
        self.net.amid.append(self.rec.resume)
        self.train()

    def say_amid(self) -> None:
        self.net.amid.append(self.rec.step)
        self.infer()

    def fail(self, error: BaseException | None = None) -> None:
        def amid() -> None:
            raise error or ValueError("amid")

        self.net.amid.append(amid)
        with pytest.raises(BaseException, match="amid"):
            self.train()

    def interrupt(self) -> None:
        self.fail(KeyboardInterrupt("amid"))

    def again(self) -> None:
        self.net.amid.append(self.infer)
        self.train()

    def in_backward(self) -> None:
        loss = self.net(torch.ones(2, 4)).sum()
        loss.register_hook(lambda gradient: self.infer())
        loss.backward()

    def part(self) -> None:
        with torch.no_grad():
            self.net.second(torch.ones(2, 4))

    def thread(self, what: str = "infer") -> None:
        one = threading.Thread(target=getattr(self, what))
        one.start()
        one.join()

    def thread_amid(self) -> None:
        self.net.amid.append(self.thread)
        self.infer()

    def long_thread(self) -> None:
        self.thread("threes")

    def threes(self) -> None:
        for _ in range(3):
            self.infer()

    def hook(self) -> None:
        self.hooks.append(self.net.register_forward_hook(lambda module, args, output: None))

    def unhook(self) -> None:
        while self.hooks:
            self.hooks.pop().remove()

    def saved(self) -> None:
        with torch.autograd.graph.save_on_cpu():
            self.train()

    def checkpointed(self) -> None:
        out: Any = checkpoint(self.net, torch.ones(2, 4, requires_grad=True), use_reentrant=False)
        out.sum().backward()

    def inference_mode(self) -> None:
        with torch.inference_mode():
            self.net(torch.ones(2, 4))

    def traced(self) -> None:
        torch.jit.trace(self.net, torch.ones(2, 4), check_trace=False)


ACTS = [name for name in vars(_Run) if not name.startswith("_")]
SAMPLINGS: list[dict[str, Any]] = [
    {"every": 3},
    {"every": 10**9},
    {"steps": "0:1"},
    {"steps": "2,7:60:4"},
    {"steps": [1, 9, 4]},
    {"steps": range(20, 0, -6)},
    {"every": 2, "steps": "3:"},
    {"every": {"first": 4, "second": 6}},
    {"every": 4, "kinds": ["output", "grad_input"]},
    {"every": 4, "kinds": ["param", "update", "param_grad"]},
    {"every": 4, "ops": True},
    {"every": 4, "recompute": True},
]


def _seen(acts: Sequence[str], sampling: dict[str, Any], *, native: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    net = _Net()
    ours: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        if not native:
            patch.setattr("tenterhook.capture.new_engine", lambda parts: None)
        with th.record(net, **sampling) as rec:
            run = _Run(net, rec)
            for act in acts:
                getattr(run, act)()
                tracker = rec._capture.tracker
                ours.setdefault("steps", []).append((tracker.step, tracker.has_begun, tracker._steps_by))
                hooks = th.installed_hooks(net)
                ours.setdefault("hooks", []).append(sorted({one.path for one in hooks if one.owner == "tenterhook"}))
            ours["stacks"] = {thread: len(stack) for thread, stack in tracker._stacks.items()}
            ours["seq"] = tracker.next_seq()
    recording = rec.recording
    ours["rows"] = _rows(rec)
    ours["manifest"] = (recording.manifest.steps, recording.manifest.steps_recorded, recording.manifest.error)
    ours["modules"] = [
        {name: value for name, value in row.items() if name != "hook_ns"} for row in rec.table("modules").to_pylist()
    ]
    return ours


@pytest.mark.filterwarnings("ignore")  # of torch: a trace of what gives other values, gradients that are None
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(ACTS), st.integers(1, 4)), min_size=1, max_size=8), st.sampled_from(SAMPLINGS)
)
def test_whatever_comes_steps_are_counted_alike(turns: list[tuple[str, int]], sampling: dict[str, Any]) -> None:
    acts = [act for act, times in turns for _ in range(times)]
    assert _seen(acts, sampling, native=True) == _seen(acts, sampling, native=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("before", ["infer", "train"])
def test_what_comes_amid_a_rest(act: str, before: str) -> None:
    acts = [before] * 4 + [act] + ["infer"] * 3 + [act] + ["train"] * 9
    for sampling in ({"every": 10}, {"steps": "0,12:14"}):
        assert _seen(acts, sampling, native=True) == _seen(acts, sampling, native=False)


@pytest.mark.parametrize(
    "acts",
    [
        ["keep", *["train"] * 2, "late", "train", "late", *["train"] * 6],  # each step with late rows counts
        [*["train"] * 3, "keep_checkpointed", "train", "late", *["train"] * 2],  # recomputed on a step that is recorded
        [*["infer"] * 3, "keep_checkpointed", "late", *["train"] * 3],
    ],
)
def test_gradients_of_one_step_that_come_in_another(acts: list[str]) -> None:
    sampling = {"every": 4, "recompute": True}
    assert _seen(acts, sampling, native=True) == _seen(acts, sampling, native=False)


@pytest.mark.parametrize("before", [["infer"], ["infer"] * 3, ["train"], []])
def test_evaluation_after_an_optimizer_was_found_ends_no_steps(before: list[str]) -> None:
    acts = [*before, "have_optimizer", "train", *["infer"] * 5, "train", *["infer"] * 3, "optimize", *["infer"] * 3]
    for sampling in ({"every": 10}, {"steps": "0:1"}):
        assert _seen(acts, sampling, native=True) == _seen(acts, sampling, native=False)


@pytest.fixture(scope="module")
def compiler() -> None:
    torch.compile(nn.Identity(), backend="eager")(torch.ones(1))  # the first use of it changes torch itself for good


@pytest.mark.parametrize("at", range(1, 7))
@pytest.mark.usefixtures("compiler")
def test_a_root_compiled_in_place_between_samples_is_followed_on(at: int) -> None:
    net = _Net()
    with th.record(net, every=4) as rec:
        run = _Run(net, rec)
        for step in range(14):
            if step == at:
                net.compile(backend="eager")
            run.infer()
    assert (rec.recording.manifest.steps, rec.recording.steps) == (14, [0, 4, 8, 12])
    assert type(vars(net)["_compiled_call_impl"]).__name__ == "function"  # the user's is still there


def test_two_sessions_rest_each_at_its_own_steps() -> None:
    acts = ["infer"] * 9 + ["train"] * 9 + ["hook"] + ["infer"] * 5 + ["unhook", "fail"] + ["train"] * 9

    def seen(*, native: bool) -> list[Any]:
        torch.manual_seed(0)
        net = _Net()
        with pytest.MonkeyPatch.context() as patch:
            if not native:
                patch.setattr("tenterhook.capture.new_engine", lambda parts: None)
            with th.record(net, every=4) as first, th.record(net, every=7) as second:
                run = _Run(net, first)
                for act in acts:
                    getattr(run, act)()
        return [(_rows(rec), rec.recording.manifest.steps, rec.recording.steps) for rec in (first, second)]

    native = seen(native=True)
    assert native == seen(native=False)
    assert [steps for _, _, steps in native] == [list(range(0, 33, 4)), list(range(0, 33, 7))]


def _functions_of_ours(work: Callable[[], Any]) -> set[str]:
    """Which functions of tenterhook's run meanwhile."""
    ours, folder = set(), str(Path(th.__file__).parent)

    def look(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            ours.add(frame.f_code.co_qualname if hasattr(frame.f_code, "co_qualname") else frame.f_code.co_name)

    sys.setprofile(look)
    try:
        work()
    finally:
        sys.setprofile(None)
    return ours


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("gradients", [False, True])
def test_no_python_of_ours_runs_between_samples(gradients: bool, hooked: bool) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    if hooked:
        net.register_forward_hook(lambda module, args, output: None)

    def step() -> None:
        with torch.set_grad_enabled(gradients):
            net(torch.ones(2, 4))

    with th.record(net, every=10) as rec:
        for _ in range(3):
            step()
        ran = [_functions_of_ours(step) for _ in range(9)]
        assert rec._capture.tracker.step == 11
    assert [bool(one) for one in ran] == [False] * 7 + [True] * 2  # the step recorded, and the one whose call ends it
    assert rec.recording.steps == [0, 10]


def test_a_thread_that_gets_the_identifier_of_one_that_is_gone_is_another() -> None:
    net = _Net()
    with th.record(net, every=8) as rec:
        run = _Run(net, rec)
        for _ in range(5):
            run.thread("threes")
    numbers = [{row["step"]: row["thread"]} for row in rec.table("calls").to_pylist() if row["path"] == ""]
    assert numbers == [{0: 1}, {8: 3}]


@pytest.mark.parametrize("native", [True, False])
def test_the_manifest_knows_of_all_steps_where_its_end_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    def interrupted(*arguments: object, **named: object) -> None:
        raise KeyboardInterrupt

    net = _Net()
    monkeypatch.setattr("tenterhook.recording_session.finish_manifest", interrupted)
    if not native:
        monkeypatch.setattr("tenterhook.capture.new_engine", lambda parts: None)
    with pytest.raises(KeyboardInterrupt), th.record(net, steps="0:1", to=tmp_path / "run.thk") as rec:
        for _ in range(9):
            _Run(net, rec).infer()
    assert th.open(tmp_path / "run.thk").manifest.steps == 8  # which have ended
