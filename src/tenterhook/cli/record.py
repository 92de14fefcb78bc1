"""``tenterhook record``: its options, and the checks that need not wait for the script."""

from __future__ import annotations

import difflib
import importlib.util
import os
import shutil
import sys
import time
import zipimport
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from tenterhook.address import ROOT, Kind
from tenterhook.cli.group import Work, verbose_option
from tenterhook.cli.launch import LAUNCHERS, is_launcher, label_of, with_us_between
from tenterhook.cli.script import Target
from tenterhook.errors import SelectionError
from tenterhook.selection import check_patterns

__all__ = ["command", "find_target"]

_DASHES = "tenterhook.dashes"
_OURS = "tenterhook.ours"


_SHARED = ("--help", "--verbose", "--version")
"""Options that most programs have: nobody means ours by them behind a script's name."""


def _split(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    return None if value is None else tuple(part.strip() for part in value.split(",") if part.strip())


def _patterns(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> list[str] | None:
    for pattern in value:
        _check_pattern(ctx, param, pattern)
    return list(value) or None


def _check_pattern(ctx: click.Context, param: click.Parameter, pattern: str) -> None:
    """Refuse what cannot be read before the script starts; whether it matches anything only the script's models can tell."""
    if not pattern.strip():
        raise click.BadParameter(
            f"an empty pattern\nleave it out for all modules; the outermost one is {ROOT}", ctx, param
        )
    try:
        check_patterns(pattern)
    except SelectionError as error:
        raise click.BadParameter(str(error), ctx, param) from error


def _rates(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> int | dict[str, int]:
    """Read ``10``, ``head.**=1``: the number alone is for all modules that no pattern says otherwise of."""
    common: list[int] = []
    by_pattern: dict[str, int] = {}
    for text in value:
        pattern, equals, number = text.rpartition("=")
        if not (number.isascii() and number.isdigit() and int(number)):
            raise click.BadParameter(
                f"{text!r} is no rate\nwrite --every 10, or a rate of their own for some modules: --every 'head.**=1'",
                ctx,
                param,
            )
        if equals:
            _check_pattern(ctx, param, pattern)
            by_pattern[pattern] = int(number)
        else:
            common.append(int(number))
    if len(common) > 1:
        raise click.BadParameter(
            f"two rates for all modules: {common[0]} and {common[1]}\na rate for some is written --every 'head.**=1'",
            ctx,
            param,
        )
    rate = common[0] if common else 1
    return {"**": rate, **by_pattern} if by_pattern else rate


class _Step(click.ParamType[int]):
    """The number of a step; what stands in its place where it was forgotten is named as what it is."""

    name = "step"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read it."""
        if not _is_number(str(value)):
            raise click.UsageError(_no_step(str(value)), ctx)
        return int(value)


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdigit()


def _no_step(word: str) -> str:
    return (
        f"--resume needs the number of the step that the script does first, not {word!r}\n"
        "write it behind: tenterhook record --to runs/NAME.thk --resume 500 train.py"
    )


def _forgotten_step(args: Sequence[str]) -> str | None:
    """Find what stands behind our own ``--resume`` in place of a number: click would go on behind it, among the script's options."""
    for word, following in pairwise([*args, ""]):
        if word == "--resume" and not _is_number(following):
            return following
    return None


class _RecordCommand(click.Command):
    """Remembers whether ``--`` stood before the target, and our own options as they were typed: click's parser forgets both."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            at = next((at for at, word in enumerate(given) if word.startswith(error.option_name)), len(given))
            word = _forgotten_step(given[:at])
            if word is None:
                raise
            raise click.UsageError(_no_step(word), ctx) from error
        target = ctx.params.get("target") or ()
        before = given[: len(given) - len(target)]
        ctx.meta[_DASHES] = before[-1:] == ["--"]
        ctx.meta[_OURS] = before[:-1] if ctx.meta[_DASHES] else before
        return rest


@click.command(
    "record",
    cls=_RecordCommand,
    context_settings={"allow_interspersed_args": False},
    short_help="Run a script and record what happens in its models.",
    epilog="Everything after the script (or module) belongs to it, also what looks like options of tenterhook.",
)
@click.option(
    "-o", "--to", type=click.Path(path_type=Path), help="Directory to write.  [default: runs/SCRIPT-MMDD-HHMMSS.thk]"
)
@click.option("--overwrite", is_flag=True, help="Replace a recording that is there already.")
@click.option(
    "--resume",
    type=_Step(),
    metavar="STEP",
    help="Go on with the recording at --to: the script starts from its own checkpoint, and this is the number of the step that it "
    "does first. What was recorded of that and later steps is replaced.",
)
@click.option(
    "--select",
    multiple=True,
    metavar="PATTERN",
    callback=_patterns,
    help="Modules to record: 'features.*', '**.attn', 'type:Conv2d', '!head'; repeatable.  [default: all]",
)
@click.option(
    "--kinds",
    metavar="KIND,...",
    callback=_split,
    help=f"What to look at: {', '.join(Kind)}.  [default: output,grad_output; with --tensors also input]",
)
@click.option(
    "--stats",
    type=click.Choice(["basic", "none"]),
    default="basic",
    show_default=True,
    help="Statistics of each tensor: mean, std, extremes, counts of nan, inf and 0.",
)
@click.option(
    "--no-sketch",
    is_flag=True,
    help="Leave out the sketch by which recordings can be compared without tensors (256 bytes a value).",
)
@click.option("--tensors", is_flag=True, help="Store the tensors themselves, inputs too.")
@click.option("--ops", is_flag=True, help="Record functional calls between modules, too: F.relu, @, flatten.")
@click.option(
    "--every",
    multiple=True,
    metavar="N",
    callback=_rates,
    help="Record every N-th step; 'PATTERN=N' gives some modules a rate of their own, repeatable.  [default: 1]",
)
@click.option(
    "--steps",
    metavar="RANGES",
    help="Record these steps only: '0:100:10,500' (from, to, by; single ones).  [default: all]",
)
@click.option(
    "--log",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Also write a line per event as it happens, so that a crash can be located; of several processes each has a file of its own.",
)
@click.option(
    "--on-error",
    type=click.Choice(["warn", "raise"]),
    default="warn",
    show_default=True,
    help="When recording itself fails: go on without it, or stop the script.",
)
@click.option("--note", metavar="TEXT", help="A note to keep with the recording.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing of ours unless something is wrong.")
@click.option("-m", "module", is_flag=True, help="The target is a module, as with python -m.")
@click.argument("target", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT|-m MODULE|-- torchrun [ARGS]...")
@verbose_option
@click.pass_context
def command(ctx: click.Context, target: tuple[str, ...], module: bool, to: Path | None, **options: Any) -> Work:
    """Run a script and record what happens in its models, forward and backward.

    The script needs no change and notices nothing: its output, exit code and tracebacks are its own (4 is the exit code where it ended
    well and nothing was recorded). A summary comes at the end, on standard error.

    \b
    tenterhook record train.py --lr 3e-4
    tenterhook record --select 'encoder.**' --every 50 -m package.train
    tenterhook record -- torchrun --nproc-per-node 2 train.py

    Steps are counted from 0. A step ends when an optimizer steps; what runs between two of these, an evaluation for one, belongs to the
    step before. Where no optimizer holds its parameters, each call of a model is a step.
    """  # noqa: D301 - click's mark for lines that are not to be filled
    if options["resume"] is not None and (to is None or options["overwrite"]):
        raise click.UsageError(
            "--resume goes on with a recording that is there\nname it with --to, and leave out --overwrite", ctx
        )
    if not target:
        raise click.UsageError("what shall be run? Name a script, or a module after -m", ctx)
    if ctx.meta[_DASHES] and not module and is_launcher(target[0]):
        return _launch(ctx, target, to)
    if ctx.meta[_DASHES] and not module and not Path(target[0]).exists():
        raise click.UsageError(_no_command(target[0]), ctx)
    found = find_target(target[0], target[1:], module=module)
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if to is None:
        if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
            raise click.UsageError(
                "several processes are recorded, and each would find a name of its own\nname the directory that they share: "
                f"tenterhook record --to runs/{found.label}.thk ...",
                ctx,
            )
        to = _free_place(found.label)
    elif restarts.isascii() and restarts.isdigit() and int(restarts):
        to = _restarted(to, restarts)  # what the processes before have written stays
        options["log"] = options["log"] and _restarted(options["log"], restarts)
    options["sketch"] = not options.pop("no_sketch")
    options["stats"] = None if options["stats"] == "none" else options["stats"]
    options["misplaced"] = _misplaced(ctx, found)
    return Work("tenterhook.cli.run_record:run", {"target": found, "to": to, **options})


def _restarted(path: Path, restarts: str) -> Path:
    return path.with_name(f"{path.stem}-restart{restarts}{path.suffix}")


def _launch(ctx: click.Context, target: tuple[str, ...], to: Path | None) -> Work:
    """Have a launcher start this very command in each of its processes."""
    ours = list(ctx.meta[_OURS])
    if to is None:
        if any(word.partition("=")[0] in ("--nnodes", "--nodes") for word in target):
            raise click.UsageError(
                "each of several nodes would find a name of its own\nname the directory that they share: "
                f"tenterhook record --to runs/NAME.thk -- {target[0]} ...",
                ctx,
            )
        ours += ["--to", str(_free_place(label_of(target)))]
    return Work("tenterhook.cli.launch:run", {"command": with_us_between(target, ours)})


def _misplaced(ctx: click.Context, target: Target) -> tuple[str, ...]:
    """List the arguments of the script that look like options of ours."""
    ours = {name for param in ctx.command.params for name in param.opts if name.startswith("--")} - set(_SHARED)
    given = (arg.partition("=")[0] for arg in target.args)
    return tuple(dict.fromkeys(name for name in given if name in ours))


def find_target(name: str, args: tuple[str, ...], *, module: bool) -> Target:
    """Check that a target can be run, before anything else is done.

    Raises:
        click.UsageError: there is no such script or module, or it is no Python program.
    """
    if module:
        _check_module(name)
    else:
        _check_script(name)
    return Target(name, args, module)


def _check_module(name: str) -> None:
    top = name.partition(".")[0]
    if not top or name.startswith("-"):
        raise click.UsageError(f"-m needs the name of a module, not {name!r}")
    if name.endswith(".py") and Path(name).is_file():
        raise click.UsageError(f"{name!r} is a script, not a module\nleave out -m: tenterhook record {name}")
    sys.path.insert(0, str(Path.cwd()))  # where python -m looks first
    try:
        spec = importlib.util.find_spec(top)  # the top only: to look deeper would import it
    finally:
        sys.path.pop(0)
    if spec is None:
        raise click.UsageError(f"there is no module {top!r} here or among the installed packages")


def _check_script(name: str) -> None:
    path = Path(name)
    if path.is_dir():
        if not any((path / f"__main__{suffix}").is_file() for suffix in (".py", ".pyc")):
            raise click.UsageError(f"{name} is a directory without a __main__.py, so it cannot be run")
    elif path.is_file():
        _check_file(path)
    else:
        raise click.UsageError(_no_script(name))


def _check_file(path: Path) -> None:
    try:
        with path.open("rb") as file:
            head = file.read(4)
    except OSError as error:
        raise click.UsageError(f"{path} cannot be read: {error.strerror}") from error
    if path.name.startswith("python") and path.suffix != ".py" and os.access(path, os.X_OK):
        raise click.UsageError(_no_command(str(path)))
    if head[:4] == b"\x7fELF" or (b"\0" in head and path.suffix != ".pyc" and not _is_archive(path)):
        raise click.UsageError(f"{path} is not a Python program")


def _is_archive(path: Path) -> bool:
    try:
        zipimport.zipimporter(str(path))
    except zipimport.ZipImportError:
        return False
    return True


def _no_script(name: str) -> str:
    if name == "-":
        return "a program on standard input cannot be recorded\nsave it to a file, and record that"
    path = Path(name)
    if path.suffix == "" and os.sep not in name:
        if name.startswith("python"):
            return f"there is no script {name!r}\nleave out {name!r}, the script runs in this very Python: tenterhook record SCRIPT ARGS"
        if shutil.which(name):
            return _no_command(name)
    folder = path.parent
    scripts = sorted(entry.name for entry in folder.glob("*.py")) if folder.is_dir() else []
    near = difflib.get_close_matches(path.name, scripts, n=3, cutoff=0.5)
    where = f"in {folder}" if folder.parts else "here"
    if near:
        return f"there is no script {name!r}\nnearest {where}: {', '.join(near)}"
    if not folder.is_dir():
        return f"there is no script {name!r}\nthere is no directory {str(folder)!r} either"
    return f"there is no script {name!r}"


def _no_command(name: str) -> str:
    if is_launcher(name):
        return f"there is no script {name!r}\nto record what it starts, write '--' before it: tenterhook record -- {name} ..."
    return (
        f"{name!r} is a command; only Python scripts and modules can be recorded, and what torchrun starts\n"
        f"record the script itself: tenterhook record SCRIPT ARGS, or its module: tenterhook record -m MODULE ARGS\n"
        f"several processes: tenterhook record -- {LAUNCHERS[0]} ARGS SCRIPT, in place of python -m torch.distributed.run"
    )


def _free_place(label: str) -> Path:
    name = f"{label}-{time.strftime('%m%d-%H%M%S')}"
    places = (Path("runs") / f"{name}{suffix}.thk" for suffix in ("", *(f"-{number}" for number in range(2, 100))))
    return next((place for place in places if not place.exists()), Path("runs") / f"{name}.thk")
