"""What ``tenterhook record`` does: the script, between a recorder's start and its close."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console
from rich.text import Text

from tenterhook.analysis.numbers import Numbers, numbers_of
from tenterhook.cli import script
from tenterhook.cli.console import stderr_console
from tenterhook.errors import RecordingError
from tenterhook.recording import open_recording
from tenterhook.reporters.summary import (
    print_failure,
    print_header,
    print_note,
    print_summary,
    print_trouble,
    why_empty,
)
from tenterhook.script_recorder import RecordSummary, ScriptRecorder, ScriptRequest

__all__ = ["Terminated", "run"]

_USAGE = 2
_NOTHING = 4
_FAULT = 70


class Terminated(BaseException):
    """The process was told to end; the message names the signal. Given to the recorder, never raised."""


def run(*, target: script.Target, to: Path, quiet: bool, misplaced: Sequence[str] = (), **options: Any) -> NoReturn:
    """Record a target and leave the process as the target would have.

    Args:
        target: what to run.
        to: the directory to write.
        quiet: print neither header nor summary.
        misplaced: the options among the script's arguments that look like ours.
        options: the fields of `ScriptRequest`.

    Raises:
        TargetError: the directory is there already, or cannot be written; the script has not started.
        SelectionError: the selection is malformed; the script has not started.
    """
    session = ScriptRecorder(to, ScriptRequest(argv=target.argv, **options))
    close = _Close(session, stderr_console(), to, quiet=quiet, owner=os.getpid(), name=target.name)
    quiet = quiet or session.rank > 0  # one of the processes speaks for all, the others of trouble only
    session.tell = close.tell
    if not quiet:
        asked = {name: options[name] for name in ("select", "every", "steps", "stats")}
        print_header(close.console, to, **asked)
        for entry in script.shadowed(target):
            print_note(
                close.console,
                f"{entry} is beside the script, but another module of that name is loaded: the script gets that one",
            )
        _tell_misplaced(close.console, target, [name for name in misplaced if not _knows(target, name)])
    session.start()
    with _closed_by_signals(close), _tidy_threads(session.tidy):
        error = script.run(target)
        session.tidy(error)
        script.show_error(error)
        script.wait_for_threads()
        code = close(error)
    if not quiet and isinstance(error, SystemExit) and error.code == _USAGE:
        _tell_misplaced(close.console, target, [name for name in misplaced if _knows(target, name)])
    script.leave(error if script.failed(error) else close.interrupt or error, code)


def _knows(target: script.Target, option: str) -> bool:
    """Whether a script speaks of an option; of a module it is taken for granted, since its parser may be anywhere."""
    try:
        return target.module or option.encode() in Path(target.name).read_bytes()
    except OSError:  # a directory or an archive with a __main__.py
        return True


def _tell_misplaced(console: Console, target: script.Target, options: Sequence[str]) -> None:
    if options:
        which = ", ".join(options)
        print_note(
            console, f"{which} after {target.name} is the script's own; options of tenterhook go before {target.name}"
        )


def _safe() -> bool:
    """Whether the interpreter was told (``-P``) to put no folder of a program's own first."""
    return getattr(sys.flags, "safe_path", False)


@dataclass
class _Close:
    """Closes the recorder once, in the process that opened it, and prints the summary."""

    session: ScriptRecorder
    console: Console
    to: Path
    quiet: bool
    owner: int
    name: str
    path: list[str] = field(default_factory=lambda: sys.path[0 if sys.flags.isolated or _safe() else 1 :])
    done: bool = False
    interrupt: KeyboardInterrupt | None = None  # that came while the recording was finished
    signalled: Terminated | None = None  # also where the script comes to its end before it is ended
    lock: threading.RLock = field(default_factory=threading.RLock)

    def tell(self, text: str) -> None:
        """Print what should be known while the script runs."""
        if not self.quiet and self.session.rank == 0 and os.getpid() == self.owner:
            with contextlib.suppress(OSError, ValueError):  # the script has closed standard error
                print_note(self.console, f"tenterhook: {text}")

    def __call__(self, error: BaseException | None) -> int:
        """Give the exit code for a script that ended well."""
        if os.getpid() != self.owner:  # a forked child that runs on to the end of the script
            return 0
        with self.lock:  # the end of the script waits for a signal's closing, at whose end the process dies
            if self.done:
                return 0
            self.done = True
            return self._finish(self.signalled or error)

    def _finish(self, error: BaseException | None) -> int:
        try:
            summary = self.session.close(error)
        except KeyboardInterrupt as interrupt:
            self.interrupt = interrupt
            self.console.print(
                Text(
                    f"tenterhook: interrupted while {self.to} was finished; all that was recorded is in it, and it counts as "
                    f"unfinished: tenterhook show {self.to}"
                ),
                soft_wrap=True,
            )
            return 0
        except Exception as fault:  # a fault of ours must not take the place of how the script ended
            self.console.print(
                f"tenterhook: the recording {self.to} was not finished, by a fault in tenterhook itself: "
                f"{type(fault).__name__}: {fault}\n  please report it with the output of 'tenterhook doctor'",
                markup=False, soft_wrap=True,
            )  # fmt: skip
            return _FAULT
        with contextlib.suppress(
            OSError, ValueError
        ):  # closed or broken: the interpreter reports that itself at the end
            sys.stdout.flush()
        with contextlib.suppress(OSError, ValueError):  # nobody reads standard error any more; the recording is safe
            try:
                self._sum_up(summary)
            except KeyboardInterrupt as interrupt:
                self.interrupt = interrupt  # the recording is complete
        return _NOTHING if why_empty(summary) else 0

    def _sum_up(self, summary: RecordSummary) -> None:
        rank, world = self.session.rank, self.session.world
        who = f"rank {rank} of {world}" if world > 1 else ""
        numbers = self._look(summary)
        if self.quiet or rank > 0:
            print_trouble(self.console, summary, self.to, who=who, numbers=numbers)
        else:
            print_summary(self.console, summary, self.to, who=who, world=world, numbers=numbers)
        if not self.quiet and rank > 0:
            print_failure(self.console, summary, self.to, who=who, rank=rank, name=self.name)

    def _look(self, summary: RecordSummary) -> Numbers | None:
        """Look through the statistics that were written: of all ranks where this one speaks for them, else of what it had no time for."""
        if why_empty(summary):
            return None
        path, rank = summary.path, self.session.rank
        there, sys.path[:] = sys.path[:], self.path  # a module beside the script must not be taken for one of ours
        try:
            if rank > 0 and not open_recording(path, ranks=[0]).manifest.complete:
                return None  # the first rank has still to tell, and reads what this one has written
            return numbers_of(open_recording(path, ranks=None if rank == 0 else [rank]))
        except RecordingError as error:  # `show` says the same of it
            self.console.print(Text(f"tenterhook: {self.to} could not be looked through: {error}"), soft_wrap=True)
            return None
        finally:
            sys.path[:] = there


@contextlib.contextmanager
def _tidy_threads(tidy: Callable[[BaseException | None], None]) -> Iterator[None]:
    """Show the exceptions that end the script's threads without what recording has brought into their tracebacks.

    A script that says itself how these are shown has its own way.
    """
    shown_by = threading.excepthook

    def show(args: threading.ExceptHookArgs) -> None:
        tidy(args.exc_value)
        trace = args.exc_traceback if args.exc_value is None else args.exc_value.__traceback__
        shown_by(threading.ExceptHookArgs((args.exc_type, args.exc_value, trace, args.thread)))

    threading.excepthook = show
    try:
        yield
    finally:
        if threading.excepthook is show:
            threading.excepthook = shown_by


@contextlib.contextmanager
def _closed_by_signals(close: _Close) -> Iterator[None]:
    """Close the recording when the process is told to end, then let it die by that very signal.

    Signals that the script handles itself, or that are ignored, stay as they are. Another thread does it: what a signal
    interrupts may hold a lock that closing waits for, or be in the middle of printing.
    """
    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    ours = [number for name in names if signal.getsignal(number := getattr(signal, name)) is signal.SIG_DFL]
    came: SimpleQueue[int | None] = SimpleQueue()  # putting into it interrupts nothing that waits for it

    def wait() -> None:
        number = came.get()
        if number is not None:
            close(close.signalled)
            os.kill(os.getpid(), number)

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once
        close.signalled = Terminated(f"ended by {signal.Signals(number).name}")
        came.put(number)

    def restore() -> None:
        for number in ours:
            if signal.getsignal(number) is handle:
                signal.signal(number, signal.SIG_DFL)

    waiting = threading.Thread(target=wait, name="tenterhook-signals", daemon=True)
    waiting.start()
    for number in ours:
        signal.signal(number, handle)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=restore)  # workers are ended by SIGTERM, at once
    try:
        yield
    finally:
        restore()
        came.put(None)
        waiting.join()  # where a signal came at the very end, the process dies by it in there
