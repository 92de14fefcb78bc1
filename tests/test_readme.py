"""What the README shows does what it says."""

from __future__ import annotations

import doctest
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parent.parent / "README.md"
TEXT = README.read_text(encoding="utf-8")
BLOCKS = [block.split("```")[0] for block in TEXT.split("```python\n")[1:]]
OURS = [line.partition("#")[0].strip() for line in TEXT.splitlines() if line.startswith("tenterhook ")]


def test_the_session_in_the_readme_is_real() -> None:
    pytest.importorskip("torch")
    session = TEXT.split("```pycon\n")[1].split("```")[0]
    test = doctest.DocTestParser().get_doctest(session, {}, "README.md", str(README), 0)
    assert len(test.examples) == 7
    results = doctest.DocTestRunner().run(test)
    assert results.failed == 0


def test_pictures_and_pages_that_the_readme_links_to_exist() -> None:
    links = [part.split(")")[0] for part in TEXT.split("](")[1:]]
    assert links
    assert not [link for link in links if not (README.parent / link).exists()]


def names() -> dict[str, Any]:
    """What the blocks speak of: a model, an input, a loss, a training loop."""
    import torch
    from torch import nn

    import tenterhook

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True))
            self.encoder = Encoder()
            self.layer3 = nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer3(self.encoder(self.features(x)))

    def train(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(25):
            model(x).sum().backward()
            optimizer.step()

    x = torch.ones(3, 1, 8, 8)
    return {
        "torch": torch,
        "th": tenterhook,
        "model": Net(),
        "x": x,
        "loss": torch.sum,
        "train": train,
        "loader": [x] * 3,
    }


def test_the_blocks_in_the_readme_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    blocks = [block for block in BLOCKS if "nn.SequentialCell" not in block]  # that one: tests/mindspore/test_readme.py
    assert len(blocks) == 4
    known = names()
    for block in blocks:
        exec(compile(block, "README.md", "exec"), known)
    assert [len(known["features"]), tuple(known["features"][2].shape)] == [3, (3, 2, 6, 6)]
    assert [call.step for call in known["rec"]["encoder"].calls] == [0, 1, 2]
    assert tuple(known["th"].open("runs/a.thk")["encoder.layers.3:output#0@20"].shape) == (3, 2, 6, 6)
    printed = capsys.readouterr().out
    assert printed.startswith("torch.Size([3, 2, 6, 6])\n")


@pytest.mark.parametrize("line", OURS)
def test_the_commands_in_the_readme_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    from tenterhook.cli import launch, tenterhook
    from tenterhook.cli.group import Settings, Work

    monkeypatch.setattr(launch.shutil, "which", lambda name: name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    work = tenterhook.main(shlex.split(line)[1:], standalone_mode=False, obj=Settings())
    assert isinstance(work, Work)
    assert re.fullmatch(r"tenterhook\.cli\.(run_record|run_show|launch):run", work.body)
