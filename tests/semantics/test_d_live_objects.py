"""Row 52: looking for live optimizers and compiled models holds nothing that another thread is about to finish."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.backends._live_objects import instances_of
from tenterhook.backends.torch import BACKEND


@pytest.fixture(autouse=True)
def eager_switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def _model() -> Any:
    return nn.Sequential(nn.Linear(2, 2))


LOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "optimizers": BACKEND.has_optimizer,
    "installed hooks": th.installed_hooks,
    "compiled models": BACKEND.is_compiled,
    "a session": lambda model: th.record(model).start().close(),
}


@pytest.mark.usefixtures("loaded_compiler")
@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_other_threads_go_on_making_tuples(look: Callable[[nn.Module], Any]) -> None:
    """Row 52: Python refuses to go on with a tuple that is still being filled where somebody else holds it (SystemError)."""
    compiled = torch.compile(_model(), backend="eager")
    model = compiled._orig_mod
    errors: list[BaseException] = []
    done = threading.Event()

    def work() -> None:
        values = [1, 2, 3]
        while not done.is_set():
            try:
                tuple(value for value in values)
            except SystemError as error:
                errors.append(error)
                return

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        look(model)
    done.set()
    for thread in threads:
        thread.join()
    assert errors == []


class Own(torch.optim.SGD):
    pass


def test_objects_of_a_class_and_of_those_derived_from_it_are_found_while_they_live() -> None:
    """Row 52, same kind: what is looked for is found."""
    model = _model()
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0), Own(model.parameters(), lr=1.0)]
    assert {id(one) for one in optimizers} <= {id(one) for one in instances_of(torch.optim.Optimizer)}
    assert [one for one in instances_of(Own) if one is optimizers[1]] == optimizers[1:]
    assert BACKEND.has_optimizer(model) and not BACKEND.has_optimizer(_model())
    optimizers.clear()
    assert not BACKEND.has_optimizer(model)
    assert instances_of(type("Unheard", (), {})) == []
