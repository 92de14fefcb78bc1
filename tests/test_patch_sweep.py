"""``th.patch_sweep``: every position of every module, against patches made by hand."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.errors import EditError, TenterhookError


class Mixer(nn.Module):
    """Positions are mixed by a fixed matrix, then each goes through a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.mix, self.b = nn.Linear(3, 3), nn.Linear(4, 4), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.a(x))
        return self.b(self.mix(h.transpose(1, 2)).transpose(1, 2))


@pytest.fixture
def runs() -> tuple[Mixer, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return Mixer(), torch.randn(1, 4, 3), torch.randn(1, 4, 3)


def metric(output: torch.Tensor) -> torch.Tensor:
    return output[0, 2, 0]


@pytest.mark.parametrize("batch", [1, 3, 4])
def test_values_are_those_of_patches_made_by_hand(
    runs: tuple[Mixer, torch.Tensor, torch.Tensor], batch: int, capfd: pytest.CaptureFixture[str]
) -> None:
    model, clean_x, x = runs
    with th.record(model, tensors=True) as clean:
        model(clean_x)
    sweep = th.patch_sweep(model, x, clean, None, ["a", "b"], metric, batch=batch)
    assert sweep.paths == ["a", "b"] and sweep.values.shape == (2, 4)
    with torch.no_grad():
        for position in range(4):
            h = model.a(x)
            h[:, position] = model.a(clean_x)[:, position]
            by_hand = model.b(model.mix(torch.tanh(h).transpose(1, 2)).transpose(1, 2))
            assert sweep.values[0, position] == pytest.approx(metric(by_hand).item(), rel=1e-5)
        assert sweep.clean == metric(model(clean_x)).item() and sweep.corrupt == metric(model(x)).item()
    assert np.allclose(sweep.restored[1], [0, 0, 1, 0], atol=1e-6)
    assert sweep.table().num_rows == 8
    assert capfd.readouterr() == ("", "")  # a progress bar is for terminals
    assert str(sweep).splitlines()[2] == "b    █   100% at 2"
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_estimate_is_exact_where_the_model_is_linear_and_leaves_no_gradients(
    runs: tuple[Mixer, torch.Tensor, torch.Tensor], tmp_path: Path
) -> None:
    model, clean_x, x = runs
    with th.record(model, tensors=True) as clean:
        model(clean_x)
    clean.save(tmp_path / "clean.thk")
    opened = th.open(tmp_path / "clean.thk")
    estimate = th.patch_sweep(model, x, opened, None, ["mix", "b"], metric, approximate=True, dim=1)
    exact = th.patch_sweep(model, x, opened, None, ["mix", "b"], metric, dim=1)
    np.testing.assert_allclose(estimate.values, exact.values, rtol=1e-4)
    assert estimate.clean == exact.clean and "estimated by gradient" in str(estimate)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_does_not_fit_is_told(runs: tuple[Mixer, torch.Tensor, torch.Tensor]) -> None:
    model, clean_x, x = runs
    with th.record(model, "a", tensors=True) as clean:
        model(clean_x)
    sweep = th.patch_sweep(model, x, clean, None, "a", metric)
    with pytest.raises(TenterhookError, match="record the root, too"):
        _ = sweep.restored
    assert sweep.best()[0] == "a"
    with pytest.raises(
        EditError, match=r"the clean activations have shape \(1, 4, 3\), those of the corrupt run \(2, 4, 3\)"
    ):
        th.patch_sweep(model, torch.cat([x, x]), clean, None, "a", metric)
    with pytest.raises(TenterhookError, match="return a single number"):
        th.patch_sweep(model, x, clean, None, "a", lambda output: output)


def test_what_is_no_recording_with_tensors_is_told(runs: tuple[Mixer, torch.Tensor, torch.Tensor]) -> None:
    model, clean_x, x = runs
    with th.record(model) as bare:
        model(clean_x)
    with th.record(model, tensors=True) as clean:
        model(clean_x)
    with pytest.raises(EditError, match=r"clean is a Tensor, not a recording made with tensors=True\n  with th.record"):
        th.patch_sweep(model, x, clean_x, None, ["a", "b"], metric)
    with pytest.raises(EditError, match=r"clean holds no tensor for the output of a; .* made with tensors=True\n"):
        th.patch_sweep(model, x, bare, None, ["a", "b"], metric)
    with pytest.raises(EditError, match=r"corrupt is a Tensor, not a recording"):
        th.patch_sweep(model, x, clean, x, ["a", "b"], metric)  # type: ignore[arg-type]


def test_pictures(runs: tuple[Mixer, torch.Tensor, torch.Tensor]) -> None:
    model, clean_x, x = runs
    with th.record(model, tensors=True) as clean:
        model(clean_x)
    sweep = th.patch_sweep(model, x, clean, None, ["a", "b"], metric)
    picture = ElementTree.fromstring(sweep.svg())
    squares = picture.findall(".//{http://www.w3.org/2000/svg}rect/{http://www.w3.org/2000/svg}title")
    assert [square.text for square in squares] == [f"{value:.4g}" for value in sweep.values.ravel()]
    wide = th.PatchSweep(["<b>"], np.array([[0.0] * 11 + [np.nan, 2.0]]), 0.0, 1.0)
    assert str(wide).splitlines()[:3] == ["     0         1  ", "     0123456789012", "<b>              █  200% at 12"]
    assert len(ElementTree.fromstring(wide.svg())) == 1 + 13 + 1 + 12 + 1  # ground, numbers, name, squares, title


def test_a_batch_is_refused_where_the_model_mixes_its_elements(runs: tuple[Mixer, torch.Tensor, torch.Tensor]) -> None:
    model, clean_x, x = runs
    mixing = nn.Sequential(model, nn.BatchNorm1d(4, track_running_stats=False))
    mixing[1].weight.data = torch.arange(4.0)
    with th.record(mixing, tensors=True) as clean:
        mixing(clean_x.repeat(2, 1, 1) + torch.arange(2)[:, None, None])
    inputs = x.repeat(2, 1, 1) * torch.arange(1, 3)[:, None, None]
    one_by_one = th.patch_sweep(mixing, inputs, clean, None, "0.a", metric)
    assert np.isfinite(one_by_one.values).all()
    dropping = nn.Sequential(model, nn.Dropout(0.5))
    with pytest.raises(TenterhookError, match=r"of two copies in one batch the metric is .*\n  the model mixes"):
        torch.manual_seed(3)
        th.patch_sweep(dropping, x, clean, None, "0.a", lambda output: output.sum(), batch=4)


def test_tracing_from_a_run_corrupted_by_noise(runs: tuple[Mixer, torch.Tensor, torch.Tensor]) -> None:
    """The usual causal tracing: the inputs are the same, and noise on some positions makes the corrupt run."""
    model, x, _ = runs
    with th.record(model, tensors=True) as clean:
        model(x)
    noise = {"a": th.edits.noise(3.0, dim=1, index=[0, 2])}
    sweep = th.patch_sweep(model, x, clean, noise, ["a", "mix", "b"], metric)
    assert abs(sweep.corrupt - sweep.clean) > 0.05  # type: ignore[operator]
    assert np.allclose(sweep.values[0, [1, 3]], sweep.corrupt) and not np.isclose(sweep.values[0, 0], sweep.corrupt)
    assert np.allclose(sweep.restored[2], [0, 0, 1, 0], atol=1e-5)
    estimate = th.patch_sweep(model, x, clean, noise, ["mix"], metric, approximate=True)
    assert estimate.corrupt == sweep.corrupt and np.allclose(estimate.values[0], sweep.values[1, :3], atol=1e-5)
    with pytest.raises(TenterhookError, match="draws at random"):  # noise on two copies is not twice the same
        th.patch_sweep(model, x, clean, noise, "mix", lambda output: output.sum(), batch=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [({}, r"'0' has shape \(2,\), and so no dim 1"), ({"dim": 0, "batch": 0}, "batch=0 runs nothing")],
)
def test_a_dimension_that_is_not_there_and_a_batch_of_none_are_refused(options: dict[str, int], message: str) -> None:
    net, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.ones(2)
    with th.record(net, tensors=True) as clean:
        net(x)
    with pytest.raises(TenterhookError, match=message):
        th.patch_sweep(net, 2 * x, clean, None, "0", torch.sum, **options)
