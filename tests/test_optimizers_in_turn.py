"""Several optimizers of one loop: those that step in turn are told, since each of their steps ends a step."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import tenterhook as th
from tenterhook.cli.run_show import page_of
from tenterhook.reporters.text import print_page
from tests.cli.recorded import record

TOLD = (
    "2 optimizers step in turn (they made 5, 5 steps), and each of these ends a step: "
    "rec.step() of th.record, once an iteration, says otherwise"
)
GAN = """
import torch
from torch import nn
G, D = nn.Linear(2, 2), nn.Linear(2, 1)
a, b = torch.optim.SGD(G.parameters(), 0.1), torch.optim.SGD(D.parameters(), 0.1)
for _ in range(5):
    fake = G(torch.randn(3, 2))
    D(fake.detach()).sum().backward(); b.step()
    D(fake).sum().backward(); a.step()
"""


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x))


def train(net: Pair, order: str, rec: th.Recorder | None = None) -> None:
    """Let the optimizers of both halves step in an order; blanks are calls of the model."""
    optimizers = {name: torch.optim.SGD(getattr(net, name).parameters(), 0.1) for name in ("one", "two")}
    for word in order.split(","):
        net(torch.randn(3, 2)).sum().backward()
        for name in word.split("+"):
            optimizers[name].step()
        if rec is not None:
            rec.step()


@pytest.mark.parametrize(
    ("order", "counts"),
    [
        ("one,two,one,two", [2, 2]),
        ("one,two,two,one,two,two,one", [3, 4]),
        ("one,one,one", []),
        ("one,one,two,two", []),  # one training after another
        ("one+two,one+two,one+two,one+two", []),  # together: the first of them ends the step
    ],
)
def test_turns_are_counted(order: str, counts: list[int]) -> None:
    net = Pair()
    with th.record(net) as rec:
        train(net, order)
    assert rec.recording.manifest.optimizer_steps == counts
    assert rec.recording.manifest.steps == len(order.split(","))


def test_steps_that_the_user_marks_are_no_turns() -> None:
    net = Pair()
    with th.record(net) as rec:
        rec.step()
        train(net, "one,two,one,two", rec)
    assert rec.recording.manifest.optimizer_steps == []


def test_show_and_the_summary_of_a_script_tell_it_once(tmp_path: Path) -> None:
    (tmp_path / "gan.py").write_text(GAN)
    done = record(tmp_path, "--to", "a.thk", "gan.py")
    assert " ".join(done.stderr.split()).count(TOLD) == 1
    stream = io.StringIO()
    print_page(Console(file=stream, width=400), page_of(th.open(tmp_path / "a.thk"), "a.thk"))
    assert stream.getvalue().count(TOLD) == 1


@pytest.mark.parametrize("at", range(8))
@pytest.mark.parametrize("kept", [False, True], ids=["gone", "kept"])
def test_an_optimizer_that_takes_the_place_of_another_ends_its_steps(kept: bool, at: int) -> None:
    """On a step that is recorded or between two of them, whether or not the old one is kept."""
    net = nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(net.parameters(), 0.1)]
    with th.record(net, every=3, kinds=["output", "input"]) as rec:
        for turn in range(13):
            net(torch.full((1, 2), float(turn))).sum().backward()
            optimizers[-1].step()
            if turn == at:
                optimizers = [*(optimizers if kept else []), torch.optim.SGD(net.parameters(), 0.1)]
    assert _inputs_of_steps(rec) == [(0, 0.0), (3, 3.0), (6, 6.0), (9, 9.0), (12, 12.0)]
    assert rec.recording.manifest.steps == 13


def _inputs_of_steps(rec: th.Recorder) -> list[tuple[int, float]]:
    """Which turn of the loop each recorded step is."""
    rows = rec.query(
        "select distinct step, \"mean\" from \"values\" where kind = 'input' and path = '' order by step"
    ).to_pylist()
    return [(row["step"], row["mean"]) for row in rows]


@pytest.mark.parametrize(
    "order", ["one,two", "one,two,two", "one+two,two", "one+two", "two+one,one+two", "one,one,two+one"]
)
def test_steps_are_counted_alike_where_they_are_not_recorded(order: str) -> None:
    """In turn, together, or one of them not always: what ends a step does not hang on whether calls are seen."""

    def steps(**options: int) -> int:
        net = Pair()
        with th.record(net, **options) as rec:
            train(net, ",".join([order] * 6))
        return rec.recording.manifest.steps

    assert steps() == steps(every=2) == steps(every=5) == steps(every=7) == 6 * len(order.split(","))


def test_one_forward_for_two_optimizers_is_one_step() -> None:
    """Each has its own backward pass, after which it steps; that is nothing new that was differentiated."""

    def steps(**options: int) -> int:
        net = Pair()
        optimizers = [torch.optim.Adam(part.parameters(), 0.1) for part in (net.one, net.two)]
        with th.record(net, **options) as rec:
            for _ in range(9):
                output = net(torch.randn(3, 2)).sum()
                for optimizer in optimizers:
                    optimizer.zero_grad()
                    output.backward(retain_graph=True)
                    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizers[0].step()
                with torch.no_grad():
                    net(torch.randn(3, 2))
                optimizers[1].step()
        return rec.recording.manifest.steps

    assert steps(every=4) == 9


def test_a_gan_counts_alike_where_steps_are_not_recorded() -> None:
    """Two models of which each has its forward and its optimizer."""

    def steps(**options: int) -> int:
        net = Pair()
        one, two = (torch.optim.SGD(part.parameters(), 0.1) for part in (net.one, net.two))
        with th.record(net, **options) as rec:
            for _ in range(6):
                fake = net.one(torch.randn(3, 2))
                net.two(fake.detach()).sum().backward()
                two.step()
                net.two(fake).sum().backward()
                one.step()
        return rec.recording.manifest.steps

    assert steps() == steps(every=2) == steps(every=3) == steps(every=5) == 12
