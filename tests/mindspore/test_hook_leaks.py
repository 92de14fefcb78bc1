"""The fixture that guards all other tests also sees MindSpore's hooks."""

from __future__ import annotations

import pytest

from tests.test_hook_leaks import run

PRELUDE = """
import numpy as np
import mindspore as ms
from mindspore import nn

OURS = {"__name__": "tenterhook.pretended"}
exec('''
def hook(*args): return None
def put(cell, fn): return cell.register_forward_hook(fn)
''', OURS)
hook, put = OURS["hook"], OURS["put"]
KEPT = []
def theirs(*args): return None
"""

LEAKS = {
    "on a cell that is gone": ("nn.Dense(1, 1).register_forward_hook(hook)", "Dense.register_forward_hook"),
    "a callback of the user's that we put on": ("put(nn.Dense(1, 1), theirs)", "Dense.register_forward_hook"),
    "past the handles": ("KEPT.append(nn.ReLU()); KEPT[-1]._lazy_forward_hook = {7: hook}", "ReLU._lazy_forward_hook"),
    "backward": ("nn.ReLU().register_backward_hook(hook)", "ReLU.register_backward_hook"),
    "construct of an instance": ("KEPT.append(nn.ReLU()); KEPT[-1].construct = hook", "ReLU.__dict__['construct']"),
    "Cell.__call__": ("nn.Cell.__call__ = theirs", "mindspore.nn.Cell.__call__"),
}

CLEAN = {
    "put on and taken off": "put(nn.ReLU(), theirs).remove()",
    "somebody else's hook on their own cell": "KEPT.append(nn.ReLU()); KEPT[-1].register_forward_hook(theirs)",
    "a cell that ran": "nn.Dense(1, 1)(ms.Tensor(np.ones((1, 1), np.float32)))",
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    tests = CLEAN | {name: body for name, (body, _) in LEAKS.items()}
    return run(tmp_path_factory.mktemp("leaks"), tests, before=PRELUDE)


@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_fails_and_is_named(name: str, said: dict[str, str]) -> None:
    assert LEAKS[name][1] in said[name]


@pytest.mark.parametrize("name", CLEAN)
def test_a_test_that_leaves_nothing_passes(name: str, said: dict[str, str]) -> None:
    assert said[name] == ""
