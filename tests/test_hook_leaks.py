"""The fixture that guards all other tests, tried on tests that leak and on tests that do not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

# The inner tests do leak: this puts back what they changed, after the fixture has looked.
CONFTEST = """
import sys, threading
import pytest, torch

@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown():
    try:
        return (yield)
    finally:
        torch.nn.Module.__call__ = CALL
        torch.nn.functional.relu = RELU
        torch.Tensor.backward = BACKWARD
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        torch.backends.mha.set_fastpath_enabled(True)
        while torch._C._len_torch_function_stack():
            torch._C._pop_torch_function_stack()
        sys.settrace(None)
        threading.settrace(None)
        sys.excepthook = sys.__excepthook__

CALL, RELU, BACKWARD = torch.nn.Module.__call__, torch.nn.functional.relu, torch.Tensor.backward
"""

PRELUDE = """
import functools, sys, threading
import torch
from torch import nn

# Functions that bear the package's name, without the package: what it really does is other tests' business.
OURS = {"__name__": "tenterhook.pretended", "torch": torch}
exec('''
def hook(*args): return None
def closing(fn):
    def inner(*args): return fn(*args)
    return inner
def put(module, fn): return module.register_forward_hook(fn)
def put_tensor(tensor, fn): return tensor.register_hook(fn)
def forward(x): return x
class Put:
    def __call__(self, *args): return None
''', OURS)
names = ("hook", "closing", "put", "put_tensor", "forward", "Put")
hook, closing, put, put_tensor, forward, Put = (OURS[name] for name in names)
KEPT = []
def theirs(*args): return None
"""

LEAKS = {
    "on a model that is gone": ("nn.Linear(1, 1).register_forward_hook(hook)", "Linear.register_forward_hook"),
    "a callback of the user's that we put on": ("put(nn.Linear(1, 1), theirs)", "Linear.register_forward_hook"),
    "on a model that lives": ("KEPT.append(nn.Linear(1, 1)); KEPT[-1].register_forward_pre_hook(hook)", "Linear"),
    "past the handles": ("KEPT.append(nn.ReLU()); KEPT[-1]._forward_hooks[7] = hook", "ReLU._forward_hooks"),
    "a partial": (
        "KEPT.append(nn.ReLU()); KEPT[-1]._forward_hooks[7] = functools.partial(hook, 1)",
        "ReLU._forward_hooks",
    ),
    "a closure": ("KEPT.append(nn.ReLU()); KEPT[-1]._forward_hooks[7] = closing(theirs)", "ReLU._forward_hooks"),
    "an object that is called": ("KEPT.append(nn.ReLU()); KEPT[-1]._forward_hooks[7] = Put()", "ReLU._forward_hooks"),
    "state dict": ("nn.ReLU()._register_load_state_dict_pre_hook(hook)", "ReLU"),
    "backward pre": ("nn.ReLU().register_full_backward_pre_hook(hook)", "ReLU.register_full_backward_pre_hook"),
    "forward of an instance": ("KEPT.append(nn.ReLU()); KEPT[-1].forward = forward", "ReLU.__dict__['forward']"),
    "in a cycle": ("m = nn.ReLU(); m.__dict__['me'] = m; m._forward_hooks[7] = hook", "ReLU._forward_hooks"),
    "on a parameter": ("put_tensor(nn.Linear(1, 1).weight, theirs)", "Parameter.register_hook"),
    "of an optimizer": (
        "torch.optim.SGD(nn.Linear(1, 1).parameters()).register_step_post_hook(hook)",
        "SGD.register_step_post_hook",
    ),
    "global forward": ("nn.modules.module.register_module_forward_hook(theirs)", "_global_forward_hooks"),
    "global forward pre": ("nn.modules.module.register_module_forward_pre_hook(theirs)", "_global_forward_pre_hooks"),
    "global optimizer": (
        "sys.modules['torch.optim.optimizer'].register_optimizer_step_post_hook(theirs)",
        "_global_optimizer_post_hooks",
    ),
    "function mode": (
        "mode = torch.overrides.BaseTorchFunctionMode(); mode.__enter__(); KEPT.append(mode)",
        "torch function modes",
    ),
    "fast path": ("torch.backends.mha.set_fastpath_enabled(False)", "fast path"),
    "grad mode": ("torch.set_grad_enabled(False)", "grad mode"),
    "default dtype": ("torch.set_default_dtype(torch.float64)", "default dtype"),
    "Module.__call__": ("nn.Module.__call__ = forward", "Module.__call__"),
    "a function": ("nn.functional.relu = theirs", "torch.nn.functional.relu"),
    "a method of tensors": ("torch.Tensor.backward = theirs", "torch.Tensor.backward"),
    "sys.settrace": ("sys.settrace(theirs)", "sys.settrace"),
    "threading.settrace": ("threading.settrace(theirs)", "threading.settrace"),
    "sys.excepthook": ("sys.excepthook = theirs", "sys.excepthook"),
    "an import hook": ("sys.meta_path.append(Put())", "sys.meta_path"),
}

CLEAN = {
    "nothing": "pass",
    "put on and taken off": "put(nn.ReLU(), theirs).remove()",
    "within a with": "with put(nn.ReLU(), theirs): pass",
    "somebody else's hook on their own model": "KEPT.append(nn.ReLU()); KEPT[-1].register_forward_hook(theirs)",
    "a global hook taken off": "nn.modules.module.register_module_forward_hook(hook).remove()",
    "on an intermediate tensor": "put_tensor(nn.Linear(1, 1)(torch.ones(1)), theirs)",
    "a mode that ended": "with torch.overrides.BaseTorchFunctionMode(): nn.ReLU()(torch.ones(1))",
    "a model, trained": (
        "m = nn.Linear(1, 1); o = torch.optim.SGD(m.parameters()); m(torch.ones(1)).sum().backward(); o.step()"
    ),
}


def run(folder: Path, tests: dict[str, str], before: str = PRELUDE) -> dict[str, str]:
    """Run statements as tests under the fixture, in a process of their own.

    Returns:
        For each test what the fixture said, "" where it said nothing.
    """
    bodies = [f"def test_{number}():\n    {body}\n" for number, body in enumerate(tests.values())]
    (folder / "conftest.py").write_text(CONFTEST if before == PRELUDE else "", "utf-8")
    (folder / "test_inner.py").write_text("\n".join([before, *bodies]), "utf-8")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.hook_leaks",
        "--junitxml=out.xml",
        "-p",
        "no:cacheprovider",
    ]
    root = Path(__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    cases = list(ElementTree.parse(folder / "out.xml").iter("testcase"))
    said = dict.fromkeys(tests, "")
    for case in cases:
        assert case.find("failure") is None, done.stdout  # the body itself must run
        error = case.find("error")
        if error is not None:
            said[list(tests)[int(case.attrib["name"].removeprefix("test_"))]] += error.text or ""
    assert {case.attrib["name"] for case in cases} == {f"test_{number}" for number in range(len(tests))}, done.stdout
    return said


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run(tmp_path_factory.mktemp("leaks"), CLEAN | {name: body for name, (body, _) in LEAKS.items()})


@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_fails_and_is_named(name: str, said: dict[str, str]) -> None:
    assert "left behind by this test" in said[name]
    assert LEAKS[name][1] in said[name]


@pytest.mark.parametrize("name", CLEAN)
def test_a_test_that_leaves_nothing_passes(name: str, said: dict[str, str]) -> None:
    assert said[name] == ""


def test_one_leak_is_told_once(said: dict[str, str]) -> None:
    lines = [line for line in said["on a model that is gone"].splitlines() if line.startswith("  ")]
    assert len(lines) == 1


def test_a_framework_that_the_test_itself_loads_is_looked_at(tmp_path: Path) -> None:
    body = "from torch.nn.modules import module; module.register_module_forward_hook(print)"
    told = run(tmp_path, {"loads": body}, before="")
    assert "_global_forward_hooks" in told["loads"]


def test_no_framework_is_loaded_by_the_fixture(tmp_path: Path) -> None:
    body = "import sys; assert not {'torch', 'mindspore'} & set(sys.modules)"
    assert run(tmp_path, {"none": body}, before="") == {"none": ""}
