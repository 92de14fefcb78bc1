"""`recording.json`: what a recording says about itself, its run and its cost.

Everything here is plain data: a reader needs nothing but JSON to know whether it can read the rest.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import msgspec

from tenterhook.errors import RecordingError
from tenterhook.recording.schema import FORMAT_VERSION

__all__ = ["MANIFEST_NAME", "MAX_BYTES", "Cost", "Git", "Manifest", "Model"]

MANIFEST_NAME = "recording.json"

MAX_BYTES = 16 << 20  # a manifest is a few kB; whatever is bigger was not written by us


class Git(msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True):
    """The commit of the working directory that the run was started from.

    Attributes:
        commit: full hash of the commit.
        branch: name of the branch, None when detached.
        dirty: whether tracked files differed from the commit; None where git could not say that within two seconds.
    """

    commit: str
    branch: str | None = None
    dirty: bool | None = False


class Model(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An outermost module that ran.

    Attributes:
        name: its name in the recording: `Net`, a second one `Net-2`.
        type: its class, with the module it comes from.
        parameters: number of elements of all its parameters.
        modules: number of modules in it.
    """

    name: str
    type: str | None = None
    parameters: int | None = None
    modules: int | None = None


class Cost(msgspec.Struct, kw_only=True):
    """What the recording cost the run.

    Attributes:
        hook_seconds: time spent inside our hooks.
        wall_seconds: time from the start of the recording (of a script: from the first call of a model) to its end.
        blocked_seconds: time the run waited for the disk (part of `hook_seconds`).
    """

    hook_seconds: float = 0.0
    wall_seconds: float = 0.0
    blocked_seconds: float = 0.0


class Manifest(msgspec.Struct, kw_only=True):
    """Everything that is known about a recording besides its rows.

    The recorder makes one at the start and hands the finished one to `Sink.close`; the sink fills in `complete`,
    `partial`, `lost_rows`, `tensors_stopped` and `cost.blocked_seconds` itself.

    Attributes:
        format_version: `major.minor` of the format.
        complete: whether the recording was closed; false while it is being written, and after a kill.
        partial: why something that was asked for is not in it; None when all is.
        error: the exception that ended what was recorded, as type and message, `"ValueError: bad batch"`,
            `"KeyboardInterrupt"`, `"SystemExit: 3"`; None where it ended well, and where nobody could say since it was killed.
        resumed: the steps from which it was gone on with, after it had ended early or since that step was asked for.
        gaps: (first, first after it) of the steps that are missing, since it was gone on with at a later one.
        lost_rows: rows that were handed over and not stored, because of `partial`.
        tensors_stopped: why tensors were no longer stored from some point on (`budget=`), rows going on.
        framework: `torch`, `mindspore` or `toy`.
        versions: version of each package that matters, tenterhook and python among them.
        models: the outermost modules that ran.
        argv: the command line.
        git: the commit the run was started from, None outside a repository.
        seeds: the seeds in force at the start, by generator.
        modes: numeric modes of the framework that change what it computes.
        devices: names of the devices that were used.
        rank: number of the process that wrote this manifest.
        world: number of processes.
        select: the selection, as text.
        kinds: the kinds recorded.
        tensors: which tensors were stored, as text: `false`, `true` or a selection.
        options: what else was asked for and changes the rows, by the names of `tenterhook.record`: `stats`, `sketch`, `every`,
            `steps`, `ops`, `recompute`, `scaler` (whether there was one), `tensors_dtype`, `fused`.
        environment: values of the environment variables that are on our list, and nothing else of the environment.
        started: start of the recording, UTC, ISO 8601.
        ended: end of the recording, None while it runs.
        steps: number of steps that ran while it was made.
        steps_recorded: of how many of them something was recorded (`every=`, `steps=`); None where that is not known.
        optimizer_steps: how many steps each of several optimizers has ended that step in turn (a GAN's); empty for one.
        cost: what it cost.
        edits: what :func:`tenterhook.edit` did to the model meanwhile: kind, selection, value, where and how often.
        told: what was changed for the recording's time so that hooks see everything, as sentences.
        note: the user's own words.
    """

    format_version: str = FORMAT_VERSION
    complete: bool = False
    partial: str | None = None
    error: str | None = None
    resumed: list[int] = []
    gaps: list[tuple[int, int]] = []
    lost_rows: int = 0
    tensors_stopped: str | None = None
    framework: str | None = None
    versions: dict[str, str] = {}
    models: list[Model] = []
    argv: list[str] = []
    git: Git | None = None
    seeds: dict[str, int] = {}
    modes: dict[str, str | int | bool] = {}
    devices: list[str] = []
    rank: int = 0
    world: int = 1
    select: str | None = None
    kinds: list[str] = []
    tensors: str | None = None
    options: dict[str, Any] = {}
    environment: dict[str, str] = {}
    started: str | None = None
    ended: str | None = None
    steps: int = 0
    steps_recorded: int | None = None
    optimizer_steps: list[int] = []
    cost: Cost = msgspec.field(default_factory=Cost)
    edits: list[dict[str, Any]] = []
    told: list[str] = []
    note: str | None = None

    @property
    def missing_steps(self) -> list[str]:
        """The steps that are missing since the recording was gone on with at a later one, as sentences."""
        return [
            f"{f'step {begin} is' if end - begin == 1 else f'steps {begin} to {end - 1} are'} missing: "
            f"the recording {'was gone on with' if begin else 'began'} at step {end}"
            for begin, end in self.gaps
        ]

    def to_json(self) -> bytes:
        """Write the manifest as indented JSON, with a final line feed."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"

    @classmethod
    def from_json(cls, data: bytes, *, where: str = MANIFEST_NAME) -> Manifest:
        """Read a manifest.

        The version is looked at before all else, so that a newer format is named as such and not as damage.

        Args:
            data: the bytes of the file.
            where: what to call it in messages.

        Raises:
            RecordingError: it is not JSON, not a manifest, or of a newer major version.
        """
        if len(data) > MAX_BYTES:
            raise RecordingError(
                f"{where} is {len(data)} bytes long, which no recording of ours is; it is not a recording"
            )
        try:
            head = msgspec.json.decode(data, type=_Head)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise RecordingError(f"{where} is damaged or is not a recording's: {_first_line(error)}") from error
        _check_version(head.format_version, where)
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise RecordingError(f"{where} is damaged: {_first_line(error)}") from error

    @staticmethod
    def json_schema() -> dict[str, Any]:
        """Give the JSON Schema of `recording.json`, each field with its meaning."""
        schema = msgspec.json.schema(Manifest)
        for name, kind in (("Manifest", Manifest), ("Model", Model), ("Git", Git), ("Cost", Cost)):
            described = schema["$defs"][name]
            text = inspect.getdoc(kind) or ""
            described["description"] = text.partition("\n")[0]
            for field, words in _meanings(text).items():
                described["properties"][field]["description"] = words
        schema["$defs"]["Manifest"]["required"] = ["format_version"]
        return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _meanings(docstring: str) -> dict[str, str]:
    """Read the section on attributes: field -> what it means."""
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", docstring.partition("Attributes:\n")[2], re.M)
    return {name: " ".join(words.split()) for name, words in entries}


class _Head(msgspec.Struct):
    format_version: str


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _check_version(version: str, where: str) -> None:
    ours = int(FORMAT_VERSION.partition(".")[0])
    major = version.partition(".")[0]
    if not (major.isascii() and major.isdigit() and len(major) < 6):
        raise RecordingError(f"{where} is damaged: its format_version is {version[:40]!r}, not a version")
    if int(major) > ours:
        raise RecordingError(
            f"{where} was written by format {version[:40]}, this tenterhook reads {ours}.x; upgrade tenterhook"
        )
