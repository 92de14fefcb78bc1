"""``th.record``: the same calls, steps and values, the same reasons for what is missing, in every framework."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenterhook as th
from tests.contract.adapters.base import Adapter
from tests.contract.nets import W0, W2, X, close, loss_of, mlp, mlp_expected

KINDS = ["input", "output", "grad_input", "grad_output", "param", "param_grad", "update"]


def calls(rec: Any) -> list[tuple[str, str, int, int]]:
    return [(call.phase, call.path, call.call, call.step) for call in rec.order()]


def gradients(rec: Any, path: str) -> list[tuple[int, float]]:
    """The gradients of a module's outputs that hold one number each: (call, gradient)."""
    table = rec.query(f"select call, mean from values where path = '{path}' and kind = 'grad_output' order by call")
    return [(row["call"], row["mean"]) for row in table.to_pylist()]


# ---- order, calls, steps ----


@pytest.mark.parametrize("wrt_inputs", [True, False])
def test_order_of_calls_and_gradients(fw: Adapter, wrt_inputs: bool) -> None:
    net = mlp(fw)
    with th.record(net) as rec:
        fw.run(net, loss_of(net), [X], wrt_inputs=wrt_inputs)
    forward = [("forward", path, 0, 0) for path in ["", "0", "1", "2", "2.0"]]
    backward = [("backward", path, 0, 0) for path in ["", "2", "2.0", "1", "0"]]
    assert calls(rec) == forward + backward
    assert [call.depth for call in rec.order()] == [0, 1, 1, 1, 2, 0, 1, 2, 1, 1]


def test_calls_of_a_shared_module_are_numbered_and_gradients_find_their_call(fw: Adapter) -> None:
    net = fw.module("Siamese", lambda self, a, b: self.c(a) + self.c(b) * 10, c=fw.linear(np.float32([[2.0]])))
    with th.record(net, tensors=True) as rec:
        fw.run(net, lambda a, b: net(a, b).sum(), [np.float32([[1.0]]), np.float32([[5.0]])])
    assert [call.call for call in rec.order() if call.path == "c" and call.phase == "forward"] == [0, 1]
    assert [fw.array(call.output).item() for call in rec["c"].calls] == [2.0, 10.0]
    assert gradients(rec, "c") == [(0, 1.0), (1, 10.0)]


def test_a_module_of_two_names_has_one_path_and_an_alias(fw: Adapter) -> None:
    inner = fw.linear(np.float32([[2.0]]))
    net = fw.module("Net", lambda self, x: self.dec(self.enc(x)), enc=inner, dec=inner)
    with th.record(net) as rec:
        net(fw.tensor(np.float32([[1.0]])))
    rows = {row["path"]: row for row in rec.table("modules").to_pylist()}
    assert rows["enc"]["aliases"] == ["dec"] and "dec" not in rows
    assert rows["enc"]["calls"] == 2


def test_an_optimizer_ends_a_step(fw: Adapter) -> None:
    net = mlp(fw)
    optimizer = fw.optimizer(net, 0.01)
    with th.record(net, "0") as rec:
        for _ in range(3):
            fw.train(net, optimizer, loss_of(net), [X])
    assert [step for phase, _, _, step in calls(rec) if phase == "forward"] == [0, 1, 2]
    assert all(call == 0 for _, _, call, _ in calls(rec))


def test_without_an_optimizer_each_forward_of_the_root_is_a_step(fw: Adapter) -> None:
    net = mlp(fw)
    with th.record(net, "0") as rec:
        for _ in range(3):
            net(fw.tensor(X))
    assert calls(rec) == [("forward", "0", 0, step) for step in range(3)]


def test_the_user_says_when_a_step_ends(fw: Adapter) -> None:
    net = mlp(fw)
    with th.record(net, "0") as rec:
        rec.step()
        for _ in range(2):
            net(fw.tensor(X))
            net(fw.tensor(X))
            rec.step()
    assert calls(rec)[:2] == [("forward", "0", 0, 1), ("forward", "0", 1, 1)]


def test_every_other_step(fw: Adapter) -> None:
    net = mlp(fw)
    optimizer = fw.optimizer(net, 0.01)
    with th.record(net, "0", every=2) as rec:
        for _ in range(5):
            fw.train(net, optimizer, loss_of(net), [X])
    assert [step for phase, _, _, step in calls(rec) if phase == "forward"] == [0, 2, 4]


# ---- values ----


def test_values_of_every_kind(fw: Adapter) -> None:
    net, expected = mlp(fw), mlp_expected()
    before = fw.parameters(net)
    optimizer = fw.optimizer(net, 0.5)
    with th.record(net, kinds=KINDS, tensors=True) as rec:
        fw.train(net, optimizer, loss_of(net), [X])
    for path, value in expected.outputs.items():
        close(fw.array(rec[path].output), value)
        close(fw.array(rec[path].grad_output), expected.grad_outputs[path])
    for path in ("1", "2", "2.0"):
        (into,) = rec[path].grad_input.values() if hasattr(rec[path].grad_input, "values") else [rec[path].grad_input]
        close(fw.array(into), expected.grad_inputs[path])
    after = fw.parameters(net)
    rows = rec.query("select path || '.' || slot as name, kind, mean, rms from values where call is null").to_pylist()
    means = {(row["kind"], row["name"].replace("..", ".")): row["mean"] for row in rows}
    for name, gradient in expected.parameters.items():
        close(means["param", name], before[name].mean())
        close(means["param_grad", name], gradient.mean())
        close(means["update", name], (after[name] - before[name]).mean())


def test_statistics_are_those_of_the_values(fw: Adapter) -> None:
    net, expected = mlp(fw), mlp_expected()
    with th.record(net) as rec:
        fw.run(net, loss_of(net), [X])
    rows = rec.query("select * from values where path = '1' and kind = 'output'").to_pylist()
    value = expected.outputs["1"]
    assert (rows[0]["shape"], rows[0]["dtype"], rows[0]["device"]) == ([2, 4], fw.dtype, "cpu")
    close(rows[0]["mean"], value.mean())
    close(rows[0]["std"], value.std())
    assert rows[0]["zero_count"] == (value == 0).sum()


def test_sketches_and_digests_do_not_depend_on_the_framework(fw: Adapter) -> None:
    from tenterhook.stats import describe

    net, value = fw.identity(), np.arange(12, dtype=np.float32).reshape(3, 4)
    with th.record(net) as rec:
        net(fw.tensor(value))
    row = rec.query("select * from values where kind = 'output'").to_pylist()[0]
    assert row["digest"] == describe(value)["digest"]
    np.testing.assert_array_equal(np.float32(row["sketch"]), describe(value)["sketch"])


def test_what_is_kept_is_a_copy(fw: Adapter) -> None:
    net = fw.identity()
    x = fw.tensor(np.float32([1.0, 2.0]))
    with th.record(net, tensors=True) as rec:
        net(x)
    x[0] = 7.0
    close(fw.array(rec[""].output), [1.0, 2.0])


def test_nested_values_have_slots(fw: Adapter) -> None:
    net = fw.module("Net", lambda self, pair, *, flags: {"a": pair[0] * 2, "b": [pair[1] * 3, (pair[0] * 4, None, 5)]})
    x, y = fw.tensor(np.float32([1.0])), fw.tensor(np.float32([2.0]))
    with th.record(net, tensors=True) as rec:
        net((x, y), flags={"on": x})
    rows = rec.query("select kind, slot, mean from values order by seq").to_pylist()
    assert [(row["kind"], row["slot"], row["mean"]) for row in rows] == [
        ("input", "pair[0]", 1.0), ("input", "pair[1]", 2.0), ('input', 'flags["on"]', 1.0),
        ("output", '["a"]', 2.0), ("output", '["b"][0]', 6.0), ("output", '["b"][1][0]', 4.0),
    ]  # fmt: skip


def test_a_recording_on_disk_is_read_without_the_framework(fw: Adapter, tmp_path: Path) -> None:
    net, expected = mlp(fw), mlp_expected()
    with th.record(net, tensors=True, to=tmp_path / "run.thk"):
        fw.run(net, loss_of(net), [X])
    back = th.open(tmp_path / "run.thk")
    close(back["2.0"].output, expected.outputs["2.0"])
    close(back["1"].grad_output, expected.grad_outputs["1"])
    assert back.manifest.framework == fw.name


@pytest.mark.parametrize("dtype", ["float16", "float64", "int32", "uint8", "bool"])
def test_dtypes(fw: Adapter, dtype: str) -> None:
    net, value = fw.identity(), np.array([[0, 1, 3]]).astype(dtype)
    with th.record(net, tensors=True) as rec:
        net(fw.tensor(value))
    row = rec.query("select * from values where kind = 'output'").to_pylist()[0]
    assert (row["dtype"], row["zero_count"], row["max"]) == (dtype, 1, value.max())
    assert np.array_equal(fw.array(rec[""].output), value)


# ---- what is not seen ----


def test_coverage_says_why(fw: Adapter) -> None:
    net = fw.module(
        "Net", lambda self, x: (self.used(x), self.unused(x))[0], used=fw.relu(), unused=fw.relu(), idle=fw.relu()
    )
    with th.record(net) as rec:
        fw.run(net, lambda x: net(x).sum(), [X], wrt_inputs=True)
    reasons = {row["path"]: row["reason"] for row in rec.table("modules").to_pylist()}
    assert reasons["used"] is None
    assert reasons["idle"] == "never called"
    assert reasons["unused"] == "no gradient: not used by what was differentiated"


def test_a_forward_without_gradients_says_so(fw: Adapter) -> None:
    net = mlp(fw)
    with th.record(net) as rec:
        fw.without_gradients(lambda: net(fw.tensor(X)))
    assert all(row["reason"].startswith("no gradient: ") for row in rec.table("modules").to_pylist())


def test_a_gradient_that_does_not_come_is_none_and_not_zero(fw: Adapter) -> None:
    def forward(self: Any, x: Any) -> Any:
        return x * 2, x * 3

    net = fw.module("Net", lambda self, x: self.pair(x)[0], pair=fw.module("Pair", forward))
    with th.record(net) as rec:
        fw.run(net, lambda x: net(x).sum(), [np.float32([1.0])], wrt_inputs=True)
    rows = rec.query("select slot, mean, note from values where path = 'pair' and kind = 'grad_output'").to_pylist()
    assert {row["slot"]: row["mean"] for row in rows} == {"[0]": 1.0, "[1]": None}
    assert "no gradient" in next(row["note"] for row in rows if row["slot"] == "[1]")


# ---- the run itself ----


def test_a_recorded_training_equals_a_bare_one_bit_for_bit(fw: Adapter) -> None:
    def trained(record: bool) -> tuple[list[float], dict[str, np.ndarray]]:
        net = mlp(fw)
        optimizer = fw.optimizer(net, 0.05)
        if not record:
            return [fw.train(net, optimizer, loss_of(net), [X]) for _ in range(4)], fw.parameters(net)
        with th.record(net, kinds=KINDS, tensors=True):
            return [fw.train(net, optimizer, loss_of(net), [X]) for _ in range(4)], fw.parameters(net)

    (bare_losses, bare), (losses, recorded) = trained(False), trained(True)
    assert losses == bare_losses
    for name, value in bare.items():
        assert np.array_equal(recorded[name], value)


def test_an_exception_in_the_model_is_recorded_and_passes(fw: Adapter) -> None:
    class Boom(Exception):
        pass

    def forward(self: Any, x: Any) -> Any:
        raise Boom("in the model")

    net = fw.module("Net", lambda self, x: self.inner(x), inner=fw.module("Inner", forward))
    with th.record(net) as rec, pytest.raises(Boom):
        fw.run(net, lambda x: net(x).sum(), [X], wrt_inputs=True)
    errors = {row["path"]: row["error"] for row in rec.table("calls").to_pylist()}
    assert errors == {"": "Boom: in the model", "inner": "Boom: in the model"}


def test_recomputation_is_not_counted_twice(fw: Adapter) -> None:
    net = fw.sequential(fw.checkpointed(fw.sequential(fw.linear(W0), fw.relu())), fw.linear(W2))
    with th.record(net) as rec, th.record(net, recompute=True) as both:
        run = fw.run(net, lambda x: net(x).sum(), [X], wrt_inputs=True)
    relu = next(row["path"] for row in rec.table("modules").to_pylist() if row["type"] == "ReLU")
    assert [phase for phase, path, *_ in calls(rec) if path == relu] == ["forward", "backward"]
    assert [phase for phase, path, *_ in calls(both) if path == relu].count("recompute") == 1
    ((_, gradient),) = gradients(rec, relu)
    close(gradient, W2.sum(0).mean())
    assert run.inputs[0].shape == X.shape


def test_recording_and_hooks_together(fw: Adapter) -> None:
    net, expected = mlp(fw), mlp_expected()
    seen = []
    with th.hooks(net) as hooks, th.record(net, tensors=True) as rec:
        hooks.backward("1", lambda module, into, out: seen.append(fw.array(into[0])))
        fw.run(net, loss_of(net), [X])
    close(seen[0], expected.grad_inputs["1"])
    close(fw.array(rec["1"].grad_output), expected.grad_outputs["1"])


# ---- functional calls ----


def test_functional_calls_have_values_gradients_and_places(fw: Adapter) -> None:
    def forward(self: Any, x: Any) -> Any:
        return ((self.inner(x * 2) + 1).clamp(0.0, 4.0) * 3).sum()

    net = fw.module("Net", forward, inner=fw.relu())
    with th.record(net, ops=True, tensors=True) as rec:
        fw.run(net, net, [np.float32([[1.0, -2.0, 3.0]])], wrt_inputs=True)
    found = {f"{call.path}#{call.call}": call for call in rec.order() if call.type == "op" and call.phase == "forward"}
    assert list(found) == ["(root)/mul#0", "(root)/add#0", "(root)/clamp#0", "(root)/mul#1", "(root)/sum#0"]
    values = {place: fw.array(call.output).ravel().tolist() for place, call in found.items()}
    assert values == {
        "(root)/mul#0": [2, -4, 6], "(root)/add#0": [3, 1, 7], "(root)/clamp#0": [3, 1, 4], "(root)/mul#1": [9, 3, 12],
        "(root)/sum#0": [24],
    }  # fmt: skip
    gradients = {place: fw.array(call.grad_output).ravel().tolist() for place, call in found.items()}
    assert gradients == {
        "(root)/mul#0": [3, 0, 0], "(root)/add#0": [3, 3, 0], "(root)/clamp#0": [3, 3, 3], "(root)/mul#1": [1, 1, 1],
        "(root)/sum#0": [1],
    }  # fmt: skip
    backward = [call.path for call in rec.order() if call.phase == "backward"]
    assert backward == ["", *(f"(root)/{name}" for name in ("sum", "mul", "clamp", "add")), "inner", "(root)/mul"]
