"""Run a script or module as ``python`` itself would, so that it cannot tell the difference.

What a program can see of its start is set up as the interpreter does it: ``sys.argv``, ``sys.orig_argv``, ``sys.path[0]``, a real
``__main__`` module (classes pickle, spawned workers find it), tracebacks that begin at the program's own first frame, the order of
traceback, threads, ``atexit`` handlers and exit, and the exit itself: a code, a message, or death by the signal.

What stays visible, since the interpreter is already running: modules that tenterhook has imported are in ``sys.modules``, a program
that walks its whole call stack (``inspect.stack()``) meets three frames of ours at the bottom, and ``signal.getsignal`` names our
handler for SIGTERM and SIGHUP where the program has none of its own.
"""

# Paths are put together as the interpreter does it, letter for letter; pathlib would tidy them.
# ruff: noqa: PTH100, PTH109, PTH112, PTH113, PTH118, PTH120, PTH122, PTH208

from __future__ import annotations

import builtins
import contextlib
import importlib.machinery
import os
import runpy
import sys
import threading
import traceback
import types
import zipimport
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

__all__ = ["Target", "failed", "leave", "run", "shadowed", "show_error", "wait_for_threads"]


@dataclass(frozen=True)
class Target:
    """What is to be run.

    Attributes:
        name: a script's path (also a directory or zip file with a ``__main__.py``) or, with ``module``, a module's dotted name.
        args: the program's own arguments, verbatim.
        module: whether this is ``python -m name`` rather than ``python name``.
    """

    name: str
    args: tuple[str, ...] = ()
    module: bool = False

    @property
    def label(self) -> str:
        """A short name for files and headings: ``train`` for ``src/train.py``, ``pkg.train`` for ``-m pkg.train``."""
        if self.module:
            return self.name
        return Path(os.path.abspath(self.name)).stem

    @property
    def argv(self) -> list[str]:
        """The command line of the target without us: ``["train.py", "--lr", "3e-4"]``."""
        return [*(["-m"] if self.module else []), self.name, *self.args]


def run(target: Target) -> BaseException | None:
    """Run a target in this process to its end, or until it raises.

    Call it once, in the main thread, with as few frames above it as can be. ``sys.modules["__main__"]`` stays the program's module
    afterwards: its exit handlers need it.

    Returns:
        None, or the exception that ended the program (``SystemExit`` too), its traceback starting at the program's first frame.
    """
    try:
        _start(target)
    except BaseException as error:  # the program's exception is its result, whatever it is
        return _without_our_frames(error)
    finally:
        if not target.module:  # the interpreter flushes after a script, before the traceback; not after a module
            for stream in (sys.stderr, sys.stdout):
                with contextlib.suppress(Exception):  # closed or broken: the interpreter ignores it here as well
                    stream.flush()
    return None


def show_error(error: BaseException | None) -> None:
    """Print what the interpreter prints when an exception ends a program: the traceback, or the message of ``sys.exit("message")``."""
    if error is None:
        return
    if isinstance(error, SystemExit):
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        return
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit:
        raise
    except BaseException as fault:  # the interpreter reports any fault of an excepthook in these words
        print("Error in sys.excepthook:", file=sys.stderr)
        traceback.print_exception(type(fault), _without_our_frames(fault), fault.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr)
        traceback.print_exception(type(error), error, error.__traceback__)


def shadowed(target: Target) -> list[str]:
    """List the files beside a script that it would import in place of modules that are loaded already.

    Under plain Python the script's own folder comes first. Here some modules were imported before it: if the script has a
    ``random.py`` or a ``click.py`` beside it, it gets the other one.
    """
    folder = os.getcwd() if target.module else os.path.dirname(os.path.realpath(_absolute(target.name)))
    if not target.module and os.path.isdir(_absolute(target.name)):
        folder = _absolute(target.name)
    found: list[str] = []
    for entry in sorted(os.listdir(folder)):
        name, extension = os.path.splitext(entry)
        package = not extension and os.path.isfile(os.path.join(folder, entry, "__init__.py"))
        loaded = sys.modules.get(name) if package or extension == ".py" else None
        origin = getattr(loaded, "__file__", None)
        if (
            name in _AT_START
            or origin is None
            or os.path.realpath(origin).startswith(os.path.realpath(folder) + os.sep)
        ):
            continue
        found.append(entry)
    return found


_AT_START = frozenset(
    {
        "__main__",
        "_collections_abc",
        "abc",
        "codecs",
        "encodings",
        "genericpath",
        "io",
        "os",
        "posixpath",
        "site",
        "stat",
    }
)
"""What the interpreter itself imports before any script."""


def wait_for_threads() -> None:
    """Wait for the program's own threads, as the interpreter does before it runs exit handlers."""
    main = threading.main_thread()
    if all(thread.daemon or thread is main for thread in threading.enumerate()):
        return
    # The interpreter's own step, brought forward: it also wakes the idle workers of executors, which a bare join() would wait for
    # for ever. A second call is a no-op on every supported version.
    try:
        threading._shutdown()  # type: ignore[attr-defined]
    except BaseException as error:  # as the interpreter: Ctrl-C while waiting is shown, then the exit goes on
        print("Exception ignored on threading shutdown:", file=sys.stderr)
        traceback.print_exception(type(error), _without_our_frames(error), error.__traceback__)


def leave(error: BaseException | None, otherwise: int = 0) -> NoReturn:
    """End this process as the interpreter would have ended the program.

    Args:
        error: what `run` returned; already shown.
        otherwise: the exit code where the program itself ended well.

    Raises:
        SystemExit: with the program's own code if it failed; the interpreter then finishes as usual.
        KeyboardInterrupt: where that ended the program; the process then dies by the signal, as shells expect.
    """
    if error is None:
        raise SystemExit(otherwise)
    if isinstance(error, SystemExit):
        code = error.code
        if code is None or code == 0:
            raise SystemExit(otherwise)
        raise SystemExit(code if isinstance(code, int) else 1)
    if isinstance(error, KeyboardInterrupt):
        sys.excepthook = lambda *_: None  # the traceback is out already
        # Only code run from a string or a file marks the interrupt as unhandled, which is what makes the interpreter die by SIGINT.
        exec("raise KeyboardInterrupt")
    raise SystemExit(1)


def failed(error: BaseException | None) -> bool:
    """Tell whether what `run` returned means a failure: anything but a plain end or an exit with 0."""
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    return error is not None


def _start(target: Target) -> None:
    sys.orig_argv = [*_interpreter(), *target.argv]
    if target.module:
        sys.argv = [target.name, *target.args]  # runpy puts the file's path first
        _replace_first_path(os.getcwd())
        _new_main()
        runpy._run_module_as_main(target.name)  # type: ignore[attr-defined]  # what `python -m` calls: its frames are in the traceback
        return
    sys.argv = [target.name, *target.args]
    path = _absolute(target.name)
    if os.path.isdir(path) or _is_archive(path):
        _replace_first_path(path, always=True)
        _new_main()
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    _replace_first_path(os.path.dirname(os.path.realpath(path)))
    main = _new_main()
    main.__file__ = path
    if sys.version_info < (3, 15):
        main.__cached__ = None  # type: ignore[attr-defined]
    compiled = path.endswith(".pyc")
    loader = importlib.machinery.SourcelessFileLoader if compiled else importlib.machinery.SourceFileLoader
    main.__loader__ = loader("__main__", path)
    if compiled:
        code = main.__loader__.get_code("__main__")
    else:
        code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    assert code is not None
    exec(code, main.__dict__)


def _interpreter() -> list[str]:
    """The interpreter and its options on our own command line: programs that start themselves again read them."""
    head = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1][:-1]  # less our own file's or module's name
    if len(head) > 1 and head[-1].startswith("-") and head[-1].endswith("m"):
        head[-1:] = [head[-1][:-1]] if len(head[-1]) > 2 else []
    return head or [sys.executable]


def _new_main() -> types.ModuleType:
    """Put an empty ``__main__`` in place, with the names and values that the interpreter gives it."""
    _kept.append(sys.modules["__main__"])
    main = types.ModuleType("__main__")
    if sys.version_info < (3, 14):
        main.__dict__["__annotations__"] = {}  # noqa: RUF063 - put in, not looked up
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    return main


_kept: list[types.ModuleType] = []
"""Our own ``__main__``, whose frames are still running."""


def _replace_first_path(entry: str, *, always: bool = False) -> None:
    """Put the program's directory where our own start put ours; under ``-P`` or ``-I`` the interpreter puts none."""
    safe = sys.flags.isolated or getattr(sys.flags, "safe_path", False)
    if safe and not always:
        return
    if safe:
        sys.path.insert(0, entry)
    else:
        sys.path[0] = entry


def _absolute(path: str) -> str:
    """Make a path absolute as the interpreter does for ``__file__``: joined to the directory, not normalised."""
    if os.name == "nt":
        return os.path.abspath(path)
    return path if path.startswith("/") else os.path.join(os.getcwd(), path)


def _is_archive(path: str) -> bool:
    try:
        zipimport.zipimporter(path)
    except zipimport.ZipImportError:
        return False
    return True


def _without_our_frames(error: BaseException) -> BaseException:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals is globals():
        trace = trace.tb_next
    return error.with_traceback(trace)
