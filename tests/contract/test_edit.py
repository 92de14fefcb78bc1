"""``th.edit``: the same edits give the same values and gradients in every framework, those of the edit in the model's own code."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenterhook as th
from tenterhook.errors import EditError, HookError, SelectionError, StopForward
from tests.contract.adapters.base import Adapter
from tests.contract.nets import B0, B2, W0, W2, X, close, loss_of, mlp, mlp_expected


def same(run: Any, other: Any) -> None:
    """Require two runs to be equal, bit for bit."""
    assert run.loss == other.loss
    assert run.parameters.keys() == other.parameters.keys()
    for name, gradient in run.parameters.items():
        np.testing.assert_array_equal(gradient, other.parameters[name])
    for gradient, expected in zip(run.inputs, other.inputs, strict=True):
        np.testing.assert_array_equal(gradient, expected)


def net_with(fw: Adapter, between: Callable[[Any], Any] = lambda v: v) -> Any:
    """Linear, an edit in the model's own code, relu, linear."""
    return fw.module(
        "Net",
        lambda self, x: self.b(self.act(between(self.a(x)))),
        a=fw.linear(W0, B0), act=fw.relu(), b=fw.linear(W2, B2),
    )  # fmt: skip


VALUE_EDITS = [
    pytest.param(lambda v: v * 0.5, id="function"),
    pytest.param(lambda v: v * v + 1, id="nonlinear"),
    pytest.param(lambda v: v.clamp(-0.5, 0.5), id="clamp"),
]


@pytest.mark.parametrize("fn", VALUE_EDITS)
def test_an_edited_output_is_the_edit_in_the_models_own_code(fw: Adapter, fn: Callable[[Any], Any]) -> None:
    written = net_with(fw, fn)
    expected = fw.run(written, loss_of(written), [X], wrt_inputs=True)
    net = net_with(fw)
    with th.edit(net) as edit:
        handle = edit.output("a", fn)
        same(fw.run(net, loss_of(net), [X], wrt_inputs=True), expected)
    assert handle.fired == 1
    plain = net_with(fw)
    same(fw.run(net, loss_of(net), [X], wrt_inputs=True), fw.run(plain, loss_of(plain), [X], wrt_inputs=True))


@pytest.mark.parametrize("fn", VALUE_EDITS)
def test_an_edited_input_is_the_edit_in_the_models_own_code(fw: Adapter, fn: Callable[[Any], Any]) -> None:
    written = net_with(fw, fn)
    expected = fw.run(written, loss_of(written), [X], wrt_inputs=True)
    net = net_with(fw)
    with th.edit(net) as edit:
        edit.input("act", fn)
        same(fw.run(net, loss_of(net), [X], wrt_inputs=True), expected)


def test_edit_values_are_what_they_say(fw: Adapter) -> None:
    net, expected = net_with(fw), X @ W0.T + B0
    one = np.float32([[1, -2, 0.5, 0]])

    def after(value: Any) -> np.ndarray:
        seen = []
        with th.edit(net) as edit, th.hooks(net) as hooks:
            edit.output("a", value)
            hooks.forward("a", lambda module, args, output: seen.append(fw.array(output)))
            net(fw.tensor(X))
        return seen[0]

    norm = np.linalg.norm(expected)
    close(after(th.edits.zero()), np.zeros_like(expected))
    close(after(th.edits.scale(0.5)), expected * 0.5)
    close(after(th.edits.scale(one)), expected * one)
    close(after(th.edits.add(2)), expected + 2)
    close(after(th.edits.add(fw.tensor(one))), expected + one)
    close(after(th.edits.replace(3.0)), np.full_like(expected, 3))
    close(after(th.edits.replace(one)), np.broadcast_to(one, expected.shape))
    close(after(th.edits.clamp(max=0.1)), np.minimum(expected, 0.1))
    close(after(th.edits.clip_value(0.3)), np.clip(expected, -0.3, 0.3))
    close(after(th.edits.clip_norm(0.5)), expected * 0.5 / norm)
    close(after(th.edits.clip_norm(100.0)), expected)
    close(after(th.edits.normalise(2.0)), expected * 2 / norm)
    close(after(th.edits.normalise(over=1)), expected / np.linalg.norm(expected, axis=1, keepdims=True))
    close(after(th.edits.interpolate(one, 0.25)), expected + (one - expected) * 0.25)
    noisy = after(th.edits.noise(0.1, seed=5))
    assert 0 < np.abs(noisy - expected).max() < 1
    np.testing.assert_array_equal(noisy, after(th.edits.noise(0.1, seed=5)))
    assert (noisy != after(th.edits.noise(0.1, seed=6))).any()


def test_the_part_that_dim_and_index_name_is_edited_and_nothing_else(fw: Adapter) -> None:
    net, expected = net_with(fw), X @ W0.T + B0

    def after(value: Any) -> np.ndarray:
        seen = []
        with th.edit(net) as edit, th.hooks(net) as hooks:
            edit.output("a", value)
            hooks.forward("a", lambda module, args, output: seen.append(fw.array(output)))
            net(fw.tensor(X))
        return seen[0]

    for index in (slice(1, 3), [1, 2], np.array([False, True, True, False])):
        wanted = expected.copy()
        wanted[:, 1:3] = 0
        close(after(th.edits.zero(dim=-1, index=index)), wanted)
    wanted = expected.copy()
    wanted[0, 3] *= 2
    close(after(th.edits.scale(2, dim=(0, 1), index=(0, 3))), wanted)
    wanted = expected.copy()
    wanted[:, :2] *= 0.1 / np.linalg.norm(expected[:, :2])
    close(after(th.edits.clip_norm(0.1, dim=1, index=slice(0, 2))), wanted)
    with pytest.raises(EditError, match=r"no dim 2 in a tensor of shape \(2, 4\)"):
        after(th.edits.zero(dim=2, index=0))
    with pytest.raises(EditError, match=r"dim 1 goes to 3"):
        after(th.edits.zero(dim=1, index=[1, 4]))


def test_zero_gives_a_gradient_of_zero_upstream_and_no_nan(fw: Adapter) -> None:
    net = net_with(fw, lambda v: v / 0)
    with th.edit(net) as edit:
        edit.input("act", th.edits.zero())
        run = fw.run(net, loss_of(net), [X])
    assert np.isfinite(run.loss)
    close(run.parameters["b.bias"], 2 * 2 * B2)


@pytest.mark.parametrize("factor", [3.0, -1.0])
def test_gradients_of_outputs_and_inputs(fw: Adapter, factor: float) -> None:
    """The gradient of what follows stays, that of what is before is multiplied."""
    for kind, path in (("grad_output", "a"), ("grad_input", "act")):
        net = net_with(fw)
        plain = fw.run(net, loss_of(net), [X], wrt_inputs=True)
        with th.edit(net) as edit:
            getattr(edit, kind)(path, lambda gradient: gradient * factor)
            run = fw.run(net, loss_of(net), [X], wrt_inputs=True)
        assert run.loss == plain.loss
        np.testing.assert_array_equal(run.parameters["b.weight"], plain.parameters["b.weight"])
        close(run.parameters["a.weight"], plain.parameters["a.weight"] * factor)
        close(run.inputs[0], plain.inputs[0] * factor)


def test_gradients_of_parameters(fw: Adapter) -> None:
    net = net_with(fw)
    plain = fw.run(net, loss_of(net), [X])
    with th.edit(net) as edit:
        edit.param_grad("*.weight", th.edits.clip_norm(0.01))
        edit.param_grad(
            "a.bias", lambda gradient, address: gradient * (2 if str(address) == "a:param_grad.bias@0" else 0)
        )
        run = fw.run(net, loss_of(net), [X])
    for name in ("a.weight", "b.weight"):
        assert np.linalg.norm(run.parameters[name]) == pytest.approx(0.01, rel=1e-4)
    close(run.parameters["a.bias"], plain.parameters["a.bias"] * 2)
    np.testing.assert_array_equal(run.parameters["b.bias"], plain.parameters["b.bias"])


def test_edits_run_in_the_order_of_their_registration(fw: Adapter) -> None:
    net, seen = net_with(fw), []

    def note(name: str, of: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def fn(value: Any) -> Any:
            seen.append(name)
            return of(value)

        return fn

    with th.edit(net) as edit:
        for kind, path in (("input", "a"), ("output", "a"), ("grad_output", "a"), ("grad_input", "b")):
            getattr(edit, kind)(path, note(f"{kind} first", lambda v: v + 1))
            getattr(edit, kind)(path, note(f"{kind} then", lambda v: v * 2))
        edit.param_grad("b.bias", note("param_grad first", lambda v: v + 1))
        edit.param_grad("b.bias", note("param_grad then", lambda v: v * 2))
        fw.run(net, loss_of(net), [X])
    for kind in ("input", "output", "grad_output", "grad_input", "param_grad"):
        assert [name for name in seen if name.startswith(f"{kind} ")] == [f"{kind} first", f"{kind} then"]


@pytest.mark.parametrize("edit_first", [True, False], ids=["edit opened first", "observer opened first"])
def test_observers_see_the_edited_values(fw: Adapter, edit_first: bool) -> None:
    net = net_with(fw)
    kinds = ["input", "output", "grad_output", "grad_input", "param_grad"]
    with th.record(net, kinds=kinds, tensors=True) as plain:
        fw.run(net, loss_of(net), [X], wrt_inputs=True)
    seen: dict[str, np.ndarray] = {}

    def edits(session: th.Editor) -> None:
        session.input("act", lambda v: v * 0 + 5)
        session.output("act", lambda v: v * 0 + 6)
        session.grad_output("b", lambda g: g * 0 + 7)
        session.grad_input("a", lambda g: g * 0 + 8)
        session.param_grad("a.bias", lambda g: g * 0 + 9)

    sessions: list[Any] = []
    try:
        if edit_first:
            sessions.append(th.edit(net).start())
            edits(sessions[-1])
        hooks = th.hooks(net)
        recorder = th.record(net, kinds=kinds, tensors=True).start()
        sessions += [hooks, recorder]
        hooks.forward_pre("act", lambda module, args: seen.update(input=fw.array(args[0])))
        hooks.forward("act", lambda module, args, output: seen.update(output=fw.array(output)))
        hooks.forward("act", lambda module, args, output: seen.update(before=fw.array(output)), prepend=True)
        hooks.backward_pre("b", lambda module, out: seen.update(grad_output=fw.array(out[0])))
        hooks.backward("a", lambda module, into, out: seen.update(grad_input=fw.array(into[0])))
        hooks.param_grad("a.bias", lambda name, gradient: seen.update(param_grad=fw.array(gradient)))
        if not edit_first:
            sessions.append(th.edit(net).start())
            edits(sessions[-1])
        fw.run(net, loss_of(net), [X], wrt_inputs=True)
        recorded = {
            "input": recorder["act"].calls[0].input, "output": recorder["act"].output,
            "grad_output": recorder["b"].grad_output, "grad_input": recorder["a"].calls[0].grad_input,
        }  # fmt: skip
    finally:
        for session in sessions:
            session.close()
    for kind, value in (("input", 5), ("output", 6), ("grad_output", 7), ("grad_input", 8), ("param_grad", 9)):
        assert (seen[kind] == value).all(), kind
    assert (fw.array(recorded["output"]) == 6).all()
    assert (fw.array(recorded["grad_output"]) == 7).all()
    assert (fw.array(next(iter(recorded["input"].values()))) == 5).all()
    assert (fw.array(next(iter(recorded["grad_input"].values()))) == 8).all()
    assert (seen["before"] == 5).all()  # relu of 5: placed before the edit of the output
    assert (fw.array(plain["act"].output) != 6).any()


def test_calls_and_steps(fw: Adapter) -> None:
    net = fw.module("Twice", lambda self, x: self.c(self.c(x)), c=fw.linear(np.float32([[2.0]])))
    x = fw.tensor(np.float32([[1.0]]))
    seen = []
    with th.edit(net) as edit:
        edit.output("c", lambda v: v * 10, call=1)
        edit.output("c", lambda v: v * 100, call=0, step=[1, 2])
        edit.output("c", lambda v, address: seen.append(str(address)))
        assert [fw.array(net(x)).item() for _ in range(4)] == [40.0, 4000.0, 4000.0, 40.0]
    assert seen[:3] == ["c:output#0@0", "c:output#1@0", "c:output#0@1"]


def test_a_shared_module_gets_the_gradient_edit_of_one_call(fw: Adapter) -> None:
    net = fw.module("Siamese", lambda self, a, b: self.c(a) + self.c(b) * 10, c=fw.linear(np.float32([[2.0]])))
    a, b = np.float32([[1.0]]), np.float32([[5.0]])
    with th.edit(net) as edit:
        edit.grad_output("c", th.edits.zero(), call=1)
        run = fw.run(net, lambda x, y: net(x, y).sum(), [a, b], wrt_inputs=True)
    close(run.parameters["c.weight"], [[1.0]])
    close(run.inputs[0], [[2.0]])
    close(run.inputs[1], [[0.0]])


def test_slots_of_nested_values(fw: Adapter) -> None:
    inner = fw.module("Pair", lambda self, x, scale=None: (x * 2, None, {"y": x * 3}))
    net = fw.module("Net", lambda self, x: self.p(x, scale=x), p=inner)
    x = fw.tensor(np.float32([1.0]))

    def after(*arguments: Any, kind: str = "output", **options: Any) -> list[float]:
        with th.edit(net) as edit:
            getattr(edit, kind)("p", *arguments, **options)
            first, nothing, rest = net(x)
        assert nothing is None
        return [fw.array(first).item(), fw.array(rest["y"]).item()]

    assert after(lambda v: (v[0] * 5, v[1], v[2])) == [10.0, 3.0]
    assert after(lambda v: v * 5, slot="[0]") == [10.0, 3.0]
    assert after(th.edits.scale(5), slot='[2]["y"]') == [2.0, 15.0]
    assert after(th.edits.scale(5), slot="**") == [10.0, 15.0]
    assert after(th.edits.scale(5), slot="x", kind="input") == [10.0, 15.0]
    with pytest.raises(EditError, match=r"there are 2 tensors here: '\[0\]', '\[2\]\[\"y\"\]'"):
        after(th.edits.scale(5))
    with pytest.raises(
        EditError,
        match=r"edit of output of p \(scale\(5\)\): no slot '\[3\]' in tuple\(.*: the value has \[0\], \[1\], \[2\]",
    ):
        after(th.edits.scale(5), slot="[3]")
    with pytest.raises(
        EditError, match=r"edit of input of p \(scale\(5\)\): no argument 'y' in this call\n  it has x, scale"
    ):
        after(th.edits.scale(5), slot="y", kind="input")
    with pytest.raises(EditError, match="choose one: slot='x'"):
        after(th.edits.scale(5), kind="input")
    with pytest.raises(EditError, match=r"another structure: tuple\(Tensor, None, dict\(.*\)\) against Tensor"):
        after(lambda v: v[0])
    with pytest.raises(EditError, match=r"p \(.*lambda.*\) \[0\]: the value returned has shape \(2,\), it was \(1,\)"):
        after(lambda v: fw.tensor(np.float32([1, 2])), slot="[0]")


def test_skip_leaves_a_module_out(fw: Adapter) -> None:
    ran, hooked = [], []

    def forward(self: Any, x: Any) -> Any:
        ran.append(1)
        return x * 7

    net = fw.module(
        "Net", lambda self, x: self.b(self.a(x)) * 1, a=fw.module("A", forward), b=fw.linear(np.float32([[2.0]]))
    )
    x = np.float32([[1.0]])
    before = dict(vars(net.a))
    with th.edit(net) as edit, th.hooks(net) as hooks:
        hooks.forward("a", lambda module, args, output: hooked.append(1))
        handle = edit.skip("a", step=0)
        run = fw.run(net, loss_of(net), [x], wrt_inputs=True)
        assert (run.loss, run.inputs[0].item(), ran, hooked) == (4.0, 8.0, [], [])
        edit.skip("a", lambda v: v * 3, step=1)
        edit.output("a", lambda v: v * 10, step=2)
        assert fw.array(net(fw.tensor(x))).item() == 6.0
        assert fw.array(net(fw.tensor(x))).item() == 140.0
        assert (ran, hooked, handle.fired) == ([1], [1], 1)
    assert vars(net.a).keys() == before.keys()
    assert fw.array(net(fw.tensor(x))).item() == 14.0


def test_stop_ends_the_forward(fw: Adapter) -> None:
    ran = []

    def rest(self: Any, x: Any) -> Any:
        ran.append(1)
        return x

    def forward(self: Any, x: Any) -> Any:
        try:
            return self.rest(self.a(x))
        except Exception:
            return None

    net = fw.module("Net", forward, a=fw.linear(np.float32([[2.0]])), rest=fw.module("Rest", rest))
    x = fw.tensor(np.float32([[1.0]]))
    with th.record(net, tensors=True) as rec, th.edit(net) as edit:
        edit.output("a", lambda v: v + 1)
        edit.stop("a")
        net(x)
        ran.append(2)
    assert ran == []
    assert str(edit.stopped.address) == "a:output#0@0" and fw.array(edit.stopped.value).item() == 3.0
    assert fw.array(rec["a"].output).item() == 3.0
    with th.record(net) as rec, th.edit(net) as edit:
        edit.stop("a", step=[0, 2])
        given = [fw.array(edit.run(net, x)).item() for _ in range(3)]
    assert (given, ran) == ([2.0, 2.0, 2.0], [1])
    ended = [call.error for call in rec.order() if call.path == ""]
    assert [text and text.partition(":")[0] for text in ended] == ["did not end", None, "did not end"]
    assert not issubclass(StopForward, Exception)


def test_a_stop_of_another_session_goes_on(fw: Adapter) -> None:
    net = mlp(fw)
    with th.edit(net) as outer:
        outer.stop("0")
        with th.edit(net) as inner:
            inner.run(net, fw.tensor(X))
        raise AssertionError("not reached")
    assert inner.stopped is None and outer.stopped is not None


def test_patch_from_a_recording(fw: Adapter, tmp_path: Path) -> None:
    net = net_with(fw)
    other = -X
    with th.record(net, tensors=True) as clean:
        expected = fw.array(net(fw.tensor(other)))
    clean.save(tmp_path / "clean.thk")
    for source in (clean, clean.recording, th.open(tmp_path / "clean.thk")):
        with th.edit(net) as edit:
            edit.output("act", th.edits.patch(source))
            np.testing.assert_array_equal(fw.array(net(fw.tensor(X))), expected)
        with th.edit(net) as edit:
            edit.input("b", th.edits.patch(source))
            np.testing.assert_array_equal(fw.array(net(fw.tensor(X))), expected)
    with th.edit(net) as edit:
        edit.output("act", th.edits.patch(clean))
        with pytest.raises(
            EditError, match=r"the recording has shape \(2, 4\), the model \(1, 4\) here\n  record the same batch"
        ):
            net(fw.tensor(X[:1]))
    with th.record(net, tensors=True) as one:
        single = fw.array(net(fw.tensor(other[:1])))
    with th.edit(net) as edit:
        edit.output("act", th.edits.patch(one, broadcast=True))
        close(fw.array(net(fw.tensor(X))), np.repeat(single, 2, 0))
    with th.record(net, "a", tensors=True) as less:
        net(fw.tensor(X))
    with th.edit(net) as edit, pytest.raises(th.TenterhookError, match="act"):
        edit.output("act", th.edits.patch(less))
        net(fw.tensor(X))


def test_mean_ablation_and_interpolation(fw: Adapter) -> None:
    net = net_with(fw)
    with th.record(net, tensors=True) as clean:
        first, second = (fw.array(net.a(fw.tensor(x))) for x in (X, X * 3))
    mean = np.concatenate([first, second]).mean(0, keepdims=True)
    seen = []
    with th.edit(net) as edit, th.hooks(net) as hooks:
        edit.output("a", th.edits.mean_of(clean))
        hooks.forward("a", lambda module, args, output: seen.append(fw.array(output)))
        net(fw.tensor(X))
    close(seen[0], np.repeat(mean, 2, 0))
    with th.edit(net) as edit, th.hooks(net) as hooks:
        edit.output("a", th.edits.interpolate(clean, 0.5, step=0))
        hooks.forward("a", lambda module, args, output: seen.append(fw.array(output)))
        net(fw.tensor(X * 0))
    assert len(seen) == 2


def test_values_to_disk_and_back(fw: Adapter, tmp_path: Path) -> None:
    net = net_with(fw)
    with th.record(net, tensors=True) as clean:
        net(fw.tensor(-X))
    edits = {
        "steer": th.edits.add(fw.tensor(np.float32([1, 2, 3, 4]))),
        "head": th.edits.zero(dim=-1, index=slice(0, 2)),
        "some": th.edits.scale(0.5, dim=(0, 1), index=([0], 3)),
        "patch": th.edits.patch(clean),
    }
    with pytest.raises(EditError, match=r"rec\.save"):
        th.edits.save(edits, tmp_path / "edits.json")
    edits["patch"] = th.edits.patch(clean.save(tmp_path / "clean.thk") and th.open(tmp_path / "clean.thk"))
    th.edits.save(edits, tmp_path / "edits.json")
    loaded = th.edits.load(tmp_path / "edits.json")
    assert loaded.keys() == edits.keys()
    for name, value in edits.items():
        results = []
        for one in (value, loaded[name]):
            with th.edit(net) as edit:
                edit.output("a", one)
                results.append(fw.array(net(fw.tensor(X))))
        np.testing.assert_array_equal(*results)
    assert repr(loaded["head"]) == "zero(dim=-1, index=slice(0, 2, None))"
    assert repr(th.edits.scale(0.5)) == "scale(0.5)" and repr(th.edits.clip_norm(1.0)) == "clip_norm(1.0)"


ARRAY = np.float32([1, 2, 3, 4])
EVERY_VALUE = {  # what it prints
    "zero(dim=-1, index=slice(1, 4, None))": lambda fw, clean: th.edits.zero(dim=-1, index=slice(1, 4)),
    "scale(ndarray(4,))": lambda fw, clean: th.edits.scale(ARRAY),
    "add({tensor}(4,))": lambda fw, clean: th.edits.add(fw.tensor(ARRAY)),
    "replace(3.0, dim=1, index=(0, 2))": lambda fw, clean: th.edits.replace(3.0, dim=1, index=[0, 2]),
    "clamp(min=-0.5, max=0.05)": lambda fw, clean: th.edits.clamp(-0.5, 0.05),
    "noise(0.25, seed=3)": lambda fw, clean: th.edits.noise(0.25, seed=3),
    "clip_value(0.1)": lambda fw, clean: th.edits.clip_value(0.1),
    "clip_norm(0.5)": lambda fw, clean: th.edits.clip_norm(0.5),
    "normalise(2.0, over=(1,))": lambda fw, clean: th.edits.normalise(2.0, over=1),
    "patch({recording})": lambda fw, clean: th.edits.patch(clean),
    "mean_of({recording})": lambda fw, clean: th.edits.mean_of(clean),
    "interpolate({recording}, 0.5)": lambda fw, clean: th.edits.interpolate(clean, 0.5),
}


@pytest.mark.parametrize("printed", EVERY_VALUE)
def test_each_value_prints_itself_goes_to_disk_and_back_and_is_in_the_recording(
    fw: Adapter, tmp_path: Path, printed: str
) -> None:
    net = net_with(fw)
    with th.record(net, tensors=True) as rec:
        net(fw.tensor(-X))
    rec.save(tmp_path / "clean.thk")
    clean = th.open(tmp_path / "clean.thk")
    value = EVERY_VALUE[printed](fw, clean)
    text = printed.format(tensor=type(fw.tensor(ARRAY)).__name__, recording=repr(clean))
    assert repr(value) == text
    th.edits.save(value, tmp_path / "edit.json")
    outputs = []
    for one in (value, th.edits.load(tmp_path / "edit.json")):
        with th.record(net) as rec, th.edit(net).output("a", one):
            outputs.append(fw.array(net(fw.tensor(X))))
        said = rec.recording.manifest.edits
        assert [(edit["select"], edit["kind"], edit["value"], edit["ran"]) for edit in said] == [
            ("a", "output", repr(one), 1)
        ]
    np.testing.assert_array_equal(*outputs)
    assert (outputs[0] != fw.array(net(fw.tensor(X)))).any()


def test_there_are_no_other_values() -> None:
    assert {text.partition("(")[0] for text in EVERY_VALUE} == set(th.edits.__all__) - {"EditValue", "load", "save"}


def test_a_recording_holds_the_edits_that_were_made_meanwhile(fw: Adapter, tmp_path: Path) -> None:
    net, other = net_with(fw), net_with(fw)
    with th.edit(other) as elsewhere, th.record(net, to=tmp_path / "r.thk"):
        elsewhere.output("a", th.edits.zero())
        other(fw.tensor(X))
        with th.edit(net) as edit:
            edit.output("a", th.edits.scale(0.5), call=0)
            net(fw.tensor(X))
    assert th.open(tmp_path / "r.thk").manifest.edits == [
        {"kind": "output", "select": "a", "value": "scale(0.5)", "ran": 1, "call": [0]}
    ]


def test_a_recording_holds_the_edits_of_a_model_that_is_gone(fw: Adapter) -> None:
    """What many sessions did in the same way is one entry."""
    net = net_with(fw)
    with th.record(net) as rec:
        for factor in (0.5, 0.5, 2):
            with th.edit(net) as edit:
                edit.output("a", th.edits.scale(factor))
                net(fw.tensor(X))
        del net, edit
        gc.collect()
    said = {"kind": "output", "select": "a"}
    assert rec.recording.manifest.edits == [
        said | {"value": "scale(0.5)", "ran": 2},
        said | {"value": "scale(2)", "ran": 1},
    ]


def test_a_table_of_edits_and_why_they_did_not_run(fw: Adapter) -> None:
    net = fw.module("Net", lambda self, x: self.a(x), a=fw.linear(W0, B0), unused=fw.relu())
    edit = th.edit(net).start()
    edit.output("a", th.edits.scale(0.5))
    edit.output("unused", th.edits.zero())
    edit.output("a", th.edits.zero(), call=3)
    edit.grad_output("a", th.edits.clip_norm(1.0))
    net(fw.tensor(X))
    with pytest.warns(th.TenterhookWarning, match="edits that never ran:\n  unused output zero\\(\\): never called"):
        edit.close()
    lines = [line.split("  ") for line in str(edit).splitlines()]
    rows = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert rows[0] == ["edits on Net"]
    assert rows[2] == ["a", "output", "scale(0.5)", "1"]
    assert rows[3] == ["unused", "output", "zero()", "0", "never called"]
    assert rows[4] == [
        "a",
        "output",
        "zero()",
        "call 3",
        "0",
        "called once, never in call 3",
    ]
    assert rows[5][:4] == ["a", "grad_output", "clip_norm(1.0)", "0"] and "no gradient" in rows[5][4]


def test_an_edit_that_cuts_off_the_graph_is_warned_of(fw: Adapter) -> None:
    net = net_with(fw)
    with th.edit(net) as edit:
        edit.output("a", lambda v: fw.tensor(fw.array(v)))
        with pytest.warns(th.TenterhookWarning, match=r"edit of output of a \(.*\): the new value is detached"):
            run = fw.run(net, loss_of(net), [X])
    assert not np.any(run.parameters.get("a.weight", 0)) and np.any(run.parameters["b.weight"])


def test_what_cannot_be(fw: Adapter) -> None:
    net = mlp(fw)
    with th.edit(net) as edit:
        with pytest.raises(SelectionError):
            edit.output("nowhere", th.edits.zero())
        with pytest.raises(HookError, match="needs a function or an edit value"):
            edit.output("0", 3)
        with pytest.raises(HookError, match=r"fn\(value\) or fn\(value, address\)"):
            edit.output("0", lambda module, args, output: None)
        with pytest.raises(HookError, match="for param_grad only"):
            edit.grad_output("**", th.edits.clip_norm(1.0, together=True))
        with pytest.raises(TypeError, match=r"output\(\) has no keyword 'slots'; there are slot, call, step, allow"):
            edit.output("0", th.edits.zero(), slots="[0]")
        with pytest.raises(SelectionError, match=r"cannot read slot '\[x\]'"):
            edit.output("0", th.edits.zero(), slot="[x]")
        with pytest.raises(HookError, match="count from 0"):
            edit.output("0", th.edits.zero(), call=-1)
        with pytest.raises(HookError, match="count from 0"):
            edit.output("0", th.edits.zero(), call=True)
    with pytest.raises(HookError, match="closed"):
        edit.output("0", th.edits.zero())
    with pytest.raises(EditError, match="go together"):
        th.edits.zero(dim=1)


def test_gradients_of_a_selection_are_clipped_together_before_the_step(fw: Adapter) -> None:
    names, rate, limit = ["0.weight", "2.0.bias"], 0.5, 0.25
    gradients = mlp_expected().parameters
    norm = np.sqrt(sum(np.square(gradients[name]).sum() for name in names))
    net = mlp(fw)
    before, optimizer = fw.parameters(net), fw.optimizer(net, rate)
    with th.edit(net) as edit:
        handle = edit.param_grad(names, th.edits.clip_norm(limit, together=True), step=0)
        fw.train(net, optimizer, loss_of(net), [X])
        once = fw.parameters(net)
        fw.train(net, optimizer, loss_of(net), [X])
    assert handle.fired == 1
    for name, gradient in gradients.items():
        clipped = gradient * limit / norm if name in names else gradient
        close(fw.parameter_array(name, fw.tensor(before[name] - once[name])), rate * clipped)


def test_what_is_checkpointed_is_edited_again(fw: Adapter) -> None:
    """Also where the session is closed before the backward pass."""

    def build(fn: Callable[[Any], Any]) -> Any:
        inner = fw.module(
            "In", lambda self, x: self.act(fn(self.a(x))), a=fw.linear(W0, B0), act=fw.module("Sq", lambda s, x: x * x)
        )
        return fw.module(
            "Net", lambda self, x: self.b(self.inner(x)), inner=fw.checkpointed(inner), b=fw.linear(W2, B2)
        )

    written = build(lambda v: v * 3)
    expected = fw.run(written, loss_of(written), [X], wrt_inputs=True)
    net = build(lambda v: v)

    def closing(x: Any) -> Any:
        with th.edit(net) as edit:
            edit.output("**.a", lambda v: v * 3, call=0)
            return loss_of(net)(x)

    same(fw.run(net, closing, [X], wrt_inputs=True), expected)
    with th.edit(net) as edit:
        handle = edit.output("**.a", lambda v: v * 3)
        same(fw.run(net, loss_of(net), [X], wrt_inputs=True), expected)
        assert handle.fired == 1


def test_a_session_of_one_edit_ends_with_its_handle(fw: Adapter) -> None:
    net = mlp(fw)
    plain = fw.array(net(fw.tensor(X)))
    with th.edit(net).output("2", th.edits.scale(2)) as handle:
        close(fw.array(net(fw.tensor(X))), plain * 2)
    np.testing.assert_array_equal(fw.array(net(fw.tensor(X))), plain)
    assert not handle.live and repr(handle.editor).endswith("closed>")
    with th.edit(net).stop("0") as handle:
        net(fw.tensor(X))
        raise AssertionError("not reached")
    assert str(handle.editor.stopped.address) == "0:output#0@0"


def test_a_patch_sweep(fw: Adapter) -> None:
    net = net_with(fw)
    with th.record(net, tensors=True) as clean:
        expected = fw.array(net(fw.tensor(-X)))
    sweep = th.patch_sweep(net, fw.tensor(X), clean, None, ["b"], lambda output: output[0, 1])
    plain = fw.array(net(fw.tensor(X)))
    close(sweep.values, [[plain[0, 1], expected[0, 1]]])
    estimate = th.patch_sweep(net, fw.tensor(X), clean, None, ["b"], lambda output: output[0, 1], approximate=True)
    close(estimate.values, sweep.values)


def test_nothing_is_put_on_before_the_session_starts(fw: Adapter) -> None:
    net = net_with(fw)
    plain, before = fw.array(net(fw.tensor(X))), what_is_on(net)
    edit = th.edit(net)
    handle = edit.output("a", th.edits.zero())
    bias = edit.param_grad("a.bias", th.edits.zero())
    assert what_is_on(net) == before and not handle.live
    np.testing.assert_array_equal(fw.array(net(fw.tensor(X))), plain)
    assert "not put on: use with th.edit(model) as edit, or edit.start()" in str(edit)
    with pytest.raises(SelectionError):  # at once, not at the start
        edit.output("nowhere", th.edits.zero())
    with edit:
        assert handle.live
        run = fw.run(net, loss_of(net), [X])
        assert (fw.array(net.a(fw.tensor(X))) == 0).all() and not np.any(run.parameters["a.bias"])
    assert (handle.fired, bias.fired) == (2, 1)
    assert what_is_on(net) == before
    with pytest.raises(HookError, match="closed already"):
        edit.start()


def test_an_editor_that_never_started_says_so(fw: Adapter) -> None:
    net = net_with(fw)
    edit = th.edit(net)
    edit.output("a", th.edits.zero())
    with pytest.warns(th.TenterhookWarning, match=r"edits that never ran:\n  a output zero\(\): not put on"):
        edit.close()
    dropped = th.edit(net)
    dropped.output("a", th.edits.zero())
    with pytest.warns(th.TenterhookWarning, match="edits of Net were not put on"):
        del dropped
        gc.collect()
    th.edit(net)
    gc.collect()  # without edits there is nothing to say


@pytest.mark.parametrize("state", ["new", "open", "closed", "stopped"])
def test_an_editor_keeps_no_model_alive(fw: Adapter, state: str) -> None:
    net = net_with(fw)
    edit = th.edit(net)
    edit.output("a", th.edits.scale(2))
    edit.grad_input("b", th.edits.scale(2))
    edit.skip("act", step=1)
    handle = edit.param_grad("a.bias", th.edits.scale(2))
    if state != "new":
        edit.start()
        fw.run(net, loss_of(net), [X])
        fw.array(net(fw.tensor(X)))
    if state == "closed":
        edit.close()
    if state == "stopped":
        edit.stop("b")
        edit.run(net, fw.tensor(X))
        assert edit.stopped is not None
        edit.stopped.value = None  # its graph holds the parameters, which is not ours
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None and len(edit) and handle.rule.kind == "param_grad"
    if state == "new":
        with pytest.raises(HookError, match="the Net that these edits are for is gone\n  keep a reference"):
            edit.start()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", th.TenterhookWarning)  # that they never ran
        edit.close()
    assert "Net" in str(edit)


def test_a_session_of_one_call(fw: Adapter) -> None:
    net = net_with(fw)
    plain, before = fw.array(net(fw.tensor(X))), what_is_on(net)
    edit = th.edit(net)
    edit.output("b", th.edits.scale(2))
    close(fw.array(edit.run(net, fw.tensor(X))), plain * 2)
    close(fw.array(th.edit(net).output("b", th.edits.scale(3)).run(net, fw.tensor(X))), plain * 3)
    first = fw.array(net.a(fw.tensor(X)))
    close(fw.array(th.edit(net).stop("a").run(net, fw.tensor(X))), first)
    with pytest.raises(RuntimeError, match="mine"):
        th.edit(net).output("a", raising).run(net, fw.tensor(X))
    assert what_is_on(net) == before


def test_recording_one_call(fw: Adapter) -> None:
    net = net_with(fw)
    expected, before = fw.array(net(fw.tensor(X))), what_is_on(net)
    output, rec = th.record(net, tensors=True).run(net, fw.tensor(X))
    np.testing.assert_array_equal(fw.array(output), expected)
    np.testing.assert_array_equal(fw.array(rec["b"].output), expected)
    assert rec.recording.manifest.complete and what_is_on(net) == before
    with pytest.raises(RuntimeError, match="mine"):
        th.record(net).run(raising, None)
    assert what_is_on(net) == before


def what_is_on(net: Any) -> list[Any]:
    """The attributes of the modules, and how much is in those that hold something."""
    return [
        [(name, len(value) if isinstance(value, (dict, list)) else 0) for name, value in sorted(vars(module).items())]
        for module in (net, net.a, net.act, net.b)
    ]


def raising(value: Any) -> Any:
    raise RuntimeError("mine")
