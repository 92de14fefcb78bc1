"""What ``tenterhook doctor`` does. It looks at what is installed without importing any framework."""

from __future__ import annotations

import itertools
import os
import platform
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from rich.table import Table
from rich.text import Text

import tenterhook
from tenterhook import stats
from tenterhook.cli.console import stdout_console
from tenterhook.cli.envelope import print_json
from tenterhook.errors import RecordingError
from tenterhook.native import CALLS
from tenterhook.recording import newest_recordings, open_recording
from tenterhook.recording.schema import FORMAT_VERSION

__all__ = ["Report", "report", "run"]

FRAMEWORKS = ("torch", "mindspore")
DEPENDENCIES = ("numpy", "pyarrow", "duckdb", "safetensors", "ml_dtypes", "click", "rich", "msgspec", "Jinja2", "wrapt")
"""What is looked for where tenterhook runs from its sources and so has no list of its own."""

PREFIXES = ("TENTERHOOK",)
VARIABLES = (
    "NO_COLOR", "FORCE_COLOR", "COLUMNS", "CI", "GITHUB_ACTIONS",
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS",
    "PYTHONPATH", "PYTHONWARNINGS", "PYTHONUNBUFFERED", "PYTHONOPTIMIZE", "TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE",
)  # fmt: skip
_RECENT = 5
_WITHOUT_KERNEL = " (the native one is not built: same results, slower; install with a C compiler at hand)"


@dataclass(frozen=True)
class Report:
    """What is known of this place.

    Attributes:
        versions: version of each package, None where it is not installed.
        frameworks: the same for the frameworks.
        system: interpreter, operating system, processor, kernel of the statistics, what records plain calls, format of recordings.
        limits: what cannot be hooked here, and why.
        environment: the variables that are set, of those that matter.
        recordings: the newest ones, with their state.
    """

    versions: dict[str, str | None]
    frameworks: dict[str, str | None]
    system: dict[str, str]
    limits: list[str]
    environment: dict[str, str]
    recordings: list[tuple[str, str]]


def run(*, as_json: bool) -> int:
    """Print the report; gives 0, whatever it says."""
    found = report()
    if as_json:
        print_json(found)
    else:
        _print(found)
    return 0


def report() -> Report:
    """Look around."""
    frameworks = {name: _version(name) for name in FRAMEWORKS}
    return Report(
        versions={name: _version(name) for name in _dependencies()},
        frameworks=frameworks,
        system={
            "tenterhook": f"{tenterhook.__version__}, {Path(tenterhook.__file__).parent}",
            "python": f"{platform.python_version()} ({platform.python_implementation()}), {sys.executable}",
            "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
            "processor": f"{_processor()}, {os.cpu_count()} cores",
            "statistics": f"kernel: {stats.KERNEL}" + _WITHOUT_KERNEL * (stats.KERNEL == "numpy"),
            "calls": f"plain calls are recorded by {CALLS} code",
            "format": f"recordings {FORMAT_VERSION}",
        },
        limits=_limits(frameworks),
        environment={
            name: os.environ[name] for name in sorted(os.environ) if name in VARIABLES or name.startswith(PREFIXES)
        },
        recordings=[(str(path), _state(path)) for path in itertools.islice(newest_recordings(), _RECENT)],
    )


def _dependencies() -> list[str]:
    try:
        listed = requires("tenterhook") or []
    except PackageNotFoundError:
        return list(DEPENDENCIES)
    return [_bare(line) for line in listed if "extra ==" not in line]


def _bare(requirement: str) -> str:
    for place, character in enumerate(requirement):
        if not (character.isalnum() or character in "-_."):
            return requirement[:place]
    return requirement


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _limits(frameworks: dict[str, str | None]) -> list[str]:
    limits: list[str] = []
    if frameworks["torch"]:
        limits += [
            "torch script modules (torch.jit.script, .trace) take no hooks: record the model they were made of",
            "torch.compile runs eagerly while hooks are on: they are put on before the first call, and slow it down",
            "functional calls (F.relu, @) are no modules: they are seen where that is asked for, with --ops or ops=True",
        ]
    if frameworks["mindspore"]:
        limits.append("mindspore in graph mode and under jit takes no hooks: record in PyNative mode")
        if sys.version_info >= (3, 13):
            limits.append("mindspore has no release for this Python")
    if not any(frameworks.values()):
        limits.append("neither torch nor mindspore is installed here: recordings can be read, none can be made")
    if sys.platform == "win32":
        limits.append("on Windows a recording of a process that is ended from outside is not closed")
    limits.append(
        "processes that a script starts itself (spawned workers) are not recorded; those of torchrun are: record -- torchrun ..."
    )
    return limits


def _state(path: Path) -> str:
    try:
        manifest = open_recording(path).manifest
    except RecordingError as error:
        return f"cannot be read: {error}"
    if manifest.complete:
        state = "partial" if manifest.partial else "stopped" if manifest.error else "complete"
    else:
        state = "unfinished"
    return f"{state}, {manifest.steps} steps" + (f", {manifest.note}" if manifest.note else "")


def _print(found: Report) -> None:
    console = stdout_console()
    sections: list[tuple[str, list[tuple[str, str]]]] = [
        ("", list(found.system.items())),
        ("frameworks", [(name, number or "not installed") for name, number in found.frameworks.items()]),
        ("packages", [(name, number or "MISSING") for name, number in found.versions.items()]),
        ("cannot be hooked here", [("-", text) for text in found.limits]),
        ("environment", list(found.environment.items()) or [("-", "none of the variables that matter is set")]),
        (
            "newest recordings",
            [(f"@{place} {path}", state) for place, (path, state) in enumerate(found.recordings)]
            or [("-", "none here or in ./runs")],
        ),
    ]
    for title, rows in sections:
        if title:
            console.print()
            console.print(Text(title, style="bold"))
        part = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
        part.add_column(style="cyan", no_wrap=True)
        part.add_column(overflow="fold")
        for name, text in rows:
            part.add_row(Text(name), Text(text, style="bold red" if text == "MISSING" else ""))
        console.print(part)
