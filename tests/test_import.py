"""What `import tenterhook` brings in, and what it offers."""

from __future__ import annotations

import importlib
import importlib.resources
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import tenterhook
from tests.cli.recordings import write_net

MODULES = [module.name for module in pkgutil.walk_packages(tenterhook.__path__, "tenterhook.")]
FOR_MINDSPORE = {"tenterhook.mindspore"} | {
    name for name in MODULES if name.startswith(("tenterhook.backends.mindspore", "tenterhook.backends._mindspore_"))
}


def loaded_after(statement: str) -> set[str]:
    """Top-level packages that a fresh interpreter holds after a statement."""
    code = f"{statement}\nimport sys\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_import_loads_no_framework() -> None:
    loaded = loaded_after("import tenterhook")
    assert "tenterhook" in loaded
    assert loaded.isdisjoint({"torch", "mindspore"})


def test_reading_loads_no_framework() -> None:
    loaded = loaded_after("import tenterhook.cli, tenterhook.reporters, tenterhook.analysis, tenterhook.recording")
    assert loaded.isdisjoint({"torch", "mindspore"})


@pytest.mark.parametrize("asked", [["--help"], ["show", "--help"], ["show", "{recording}"]])
def test_what_a_command_does_not_need_is_not_loaded(tmp_path: Path, asked: list[str]) -> None:
    importlib.import_module("pandas")  # it is there, and pyarrow loads it for many of the things that it can do
    recording = write_net(tmp_path / "a.thk")
    args = [word.format(recording=recording) for word in asked]
    code = (
        f"import contextlib\nfrom tenterhook.cli import main\nwith contextlib.suppress(SystemExit):\n    main({args!r})"
    )
    loaded = loaded_after(code)
    assert "pandas" not in loaded
    assert ("duckdb" in loaded) == ("show" in asked and "--help" not in asked)


def test_import_changes_nothing_in_the_interpreter() -> None:
    code = """
import sys, threading, warnings
def state():
    return (sys.gettrace(), sys.getprofile(), threading.gettrace(), sys.excepthook, threading.excepthook,
            tuple(warnings.filters), sys.argv[:], [type(f).__name__ for f in sys.meta_path], threading.active_count())
import numpy, pyarrow
before = state()
import tenterhook
assert state() == before, (before, state())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_public_names_are_sorted_and_complete() -> None:
    listed = tenterhook.__all__
    assert listed == sorted(listed)
    assert all(hasattr(tenterhook, name) for name in listed)
    modules = {name.split(".")[1] for name in MODULES}
    public = {name for name in vars(tenterhook) if not name.startswith("_")} - {"annotations"}
    assert public - modules == {name for name in listed if not name.startswith("_")} - modules


def test_every_module_lists_only_names_that_it_has() -> None:
    for name in set(MODULES) - FOR_MINDSPORE:
        module = importlib.import_module(name)
        for listed in getattr(module, "__all__", ()):
            assert hasattr(module, listed), f"{name}.__all__ lists {listed}"


EACH_ON_ITS_OWN = """
import importlib, os, sys, traceback
import tenterhook.cli, tenterhook.backends.torch  # with all that is not ours, which takes long: once for all
for name in [name for name in sys.modules if name.partition(".")[0] == "tenterhook"]:
    del sys.modules[name]
for name in sys.argv[1:]:
    child = os.fork()
    if not child:
        try:
            importlib.import_module(name)
        except BaseException:
            print(f"{name} on its own:", file=sys.stderr)
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{name} cannot be imported on its own")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="each module is imported in a fork of an interpreter without any")
def test_each_module_imports_on_its_own() -> None:
    names = [name for name in MODULES if name not in FOR_MINDSPORE and "__main__" not in name]
    assert len(names) > 100
    code = [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning:os", "-c", EACH_ON_ITS_OWN]
    done = subprocess.run([*code, *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_types_are_shipped() -> None:
    assert importlib.resources.files(tenterhook).joinpath("py.typed").is_file()


def test_what_is_listed_is_what_is_public() -> None:
    import tenterhook

    assert dir(tenterhook) == sorted(tenterhook.__all__)
