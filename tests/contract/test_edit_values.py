"""Edit values in every framework: what they compute, draw from recordings, and are on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenterhook as th
from tenterhook.errors import EditError
from tests.contract.adapters.base import Adapter
from tests.contract.nets import B0, B2, W0, W2, X, close


def net_with(fw: Adapter, between: Callable[[Any], Any] = lambda v: v) -> Any:
    """Linear, an edit in the model's own code, relu, linear."""
    return fw.module(
        "Net",
        lambda self, x: self.b(self.act(between(self.a(x)))),
        a=fw.linear(W0, B0), act=fw.relu(), b=fw.linear(W2, B2),
    )  # fmt: skip


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
