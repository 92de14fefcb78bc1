"""``th.edit``: the same edits give the same values and gradients in every framework, those of the edit in the model's own code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tenterhook as th
from tenterhook.errors import EditError, StopForward
from tests.contract.adapters.base import Adapter
from tests.contract.nets import B0, B2, W0, W2, X, close, loss_of, mlp, mlp_expected, net_with


def same(run: Any, other: Any) -> None:
    """Require two runs to be equal, bit for bit."""
    assert run.loss == other.loss
    assert run.parameters.keys() == other.parameters.keys()
    for name, gradient in run.parameters.items():
        np.testing.assert_array_equal(gradient, other.parameters[name])
    for gradient, expected in zip(run.inputs, other.inputs, strict=True):
        np.testing.assert_array_equal(gradient, expected)


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


def test_a_patch_sweep(fw: Adapter) -> None:
    net = net_with(fw)
    with th.record(net, tensors=True) as clean:
        expected = fw.array(net(fw.tensor(-X)))
    sweep = th.patch_sweep(net, fw.tensor(X), clean, None, ["b"], lambda output: output[0, 1])
    plain = fw.array(net(fw.tensor(X)))
    close(sweep.values, [[plain[0, 1], expected[0, 1]]])
    estimate = th.patch_sweep(net, fw.tensor(X), clean, None, ["b"], lambda output: output[0, 1], approximate=True)
    close(estimate.values, sweep.values)
