"""The directory that a recording is written to: claiming it, and clearing an older recording out of it.

NAME.thk/
  recording.json            the manifest (of rank 0)
  findings.json             when diagnosed
  rank-00000/
    claim.json              which process writes here; exclusive creation of the folder is the claim
    recording.json          the manifest of this rank, where there are several
    calls-00000.arrows      rows, while recording; becomes calls-00000.parquet
    tensors-00000.safetensors, tensors.parquet, modules.parquet
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
from pathlib import Path
from typing import Annotated

import msgspec

from tenterhook.errors import RecordingError, TargetError
from tenterhook.recording.ends import ends_of, step_reached
from tenterhook.recording.files import load_manifest, plain_file, rank_files
from tenterhook.recording.manifest import MANIFEST_NAME, Manifest

__all__ = [
    "CLAIM_NAME",
    "RANK_FOLDER",
    "RESERVE_NAME",
    "claim",
    "has_begun",
    "publish",
    "rank_folder",
    "reached",
    "refuse_taken",
    "sign",
    "sign_off",
    "signed_steps",
    "take_back",
    "take_over",
    "write_manifest",
    "writer_of",
    "writers",
]

CLAIM_NAME = "claim.json"
RESERVE_NAME = ".reserve"
RANK_FOLDER = re.compile(r"rank-(\d{5,9})")
_OURS = re.compile(
    r"(calls|values|tensors)-\d{5,9}\.(arrows|parquet|safetensors|safetensors\.part|jsonl)(\.tmp)?"
    r"|(modules|tensors)\.parquet(\.tmp)?|(recording|claim)\.json(\.tmp)?|\.reserve(\.tmp)?"
)
_FIRST = re.compile(r"(claim|recording)\.json(\.tmp)?|\.reserve(\.tmp)?")  # what is there before the manifest
_RESERVE = 128 << 10
_MAX_CLAIM = 64 << 10
_QUIET = 10  # seconds without a change after which a writer on another machine counts as gone
_NO_SYNC = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}  # of file systems that cannot be told to


class Claim(msgspec.Struct):
    """Who writes into a rank's folder, and up to where.

    Attributes:
        host: the machine.
        pid: the process.
        steps: the steps before this one are whole: all their rows are in the files.
    """

    host: str
    pid: int
    steps: Annotated[int, msgspec.Meta(ge=0, lt=2**62)] = 0


def rank_folder(target: Path, rank: int) -> Path:
    """Give the folder of a rank."""
    return target / f"rank-{rank:05d}"


def claim(target: Path, manifest: Manifest, rank: int, *, overwrite: bool) -> Path:
    """Make the rank's folder, which no other process can then make; write the first manifest into the target.

    Args:
        target: the recording's directory.
        manifest: says how many ranks there are.
        rank: this process.
        overwrite: whether an older recording there may be deleted. Nothing but a recording ever is.

    Raises:
        TargetError: something is there, someone writes there, or it cannot be written.
    """
    folder = rank_folder(target, rank)
    made: list[Path] = []
    try:
        if target.is_symlink() or target.exists():
            _make_room(target, manifest.world, rank, overwrite=overwrite)
        if not target.exists():
            target.mkdir(parents=True, exist_ok=True)
            made.append(target)
        folder.mkdir()
        made.append(folder)
        sign(folder)
        # Given back when the disk is full, so that there is room to say so.
        (folder / RESERVE_NAME).write_bytes(b"\0" * _RESERVE)
        write_manifest(target, manifest, rank)
    except FileExistsError as error:
        raise TargetError(f"{target} is being written by another process; choose another directory") from error
    except OSError as error:
        take_back(made)
        raise TargetError(f"{target} cannot be written: {_words(error)}") from error
    return folder


def refuse_taken(target: Path, world: int, rank: int) -> None:
    """Look whether :func:`claim` could be made, without making it: a directory that is there is not replaced.

    Raises:
        TargetError: something is there already.
    """
    if target.is_symlink() or target.exists():
        _make_room(target, world, rank, overwrite=False)


def has_begun(target: Path, folder: Path, rank: int) -> bool:
    """Look whether there is a recording of a rank to go on with.

    What a process has left that died before it had written a manifest, and so any row, is taken away.

    Raises:
        TargetError: another process is just beginning there, or what is there cannot be removed.
        RecordingError: there are files of a recording without a manifest.
    """
    if (folder / MANIFEST_NAME).exists():
        return True
    with contextlib.suppress(FileNotFoundError):
        if load_manifest(target / MANIFEST_NAME).world <= 1 or not folder.is_dir():
            return folder.is_dir()  # of several, each rank has its own, which is written first
    if folder.is_dir():
        _refuse_if_alive(target, folder)
        left = [path.name for path in folder.iterdir() if not _FIRST.fullmatch(path.name)]
        if left:
            raise RecordingError(
                f"{target} has no {MANIFEST_NAME} for rank {rank}, but {sorted(left)[0]:.80}; it cannot be gone on with"
            )
        _clear(folder)
    with contextlib.suppress(OSError):  # it holds what is not ours, or other ranks'
        if {path.name for path in target.iterdir()} <= {f"{MANIFEST_NAME}.tmp"}:
            (target / f"{MANIFEST_NAME}.tmp").unlink(missing_ok=True)
            target.rmdir()
    return False


def take_over(target: Path, folder: Path, manifest: Manifest) -> None:
    """Sign for a rank's folder whose writer is gone, and mark the recording unfinished again.

    Raises:
        TargetError: its writer is alive, or it cannot be written.
    """
    _refuse_if_alive(target, folder)
    try:
        sign(folder, manifest.steps)
        (folder / RESERVE_NAME).write_bytes(b"\0" * _RESERVE)
        write_manifest(target, manifest, manifest.rank)
    except OSError as error:
        raise TargetError(f"{target} cannot be written: {_words(error)}") from error


def sign(folder: Path, steps: int = 0) -> None:
    """Say in a rank's folder that this process writes there, and that the steps before ``steps`` are whole."""
    draft = folder / f"{CLAIM_NAME}.tmp"
    draft.write_bytes(msgspec.json.encode(Claim(socket.gethostname(), os.getpid(), steps)))
    draft.replace(folder / CLAIM_NAME)


def sign_off(folder: Path) -> None:
    """Say that nobody writes in a rank's folder any more, and give back the space that was kept there."""
    for name in (RESERVE_NAME, CLAIM_NAME):
        (folder / name).unlink(missing_ok=True)


def signed_steps(folder: Path) -> int:
    """Give the step up to which whoever wrote last has said that all is whole; 0 where nobody has."""
    owner = _claimed_by(folder)
    return 0 if owner is None else owner.steps


def reached(folder: Path, rank: int) -> int | None:
    """Give the step in which a rank was when it was last heard of; None where it has no rows and has signed for no step.

    Raises:
        RecordingError: a file of it is damaged.
    """
    files = rank_files(folder, rank)
    ends = {table: ends_of(files, table) for table in ("calls", "values")}
    signed = signed_steps(folder)
    if not signed and all(end["step"] < 0 for end in ends.values()):
        return None
    return max(step_reached(ends), signed)


def take_back(made: list[Path]) -> None:
    """Remove the folders of a recording that could not be begun, the outermost first; what is not ours stays.

    What cannot be removed is left: why it could not be begun is in the error that follows.
    """
    for folder in reversed(made):
        with contextlib.suppress(OSError, TargetError):
            (folder / MANIFEST_NAME).unlink(missing_ok=True)
            _clear(folder)


def write_manifest(target: Path, manifest: Manifest, rank: int) -> None:
    """Publish a manifest by rename: rank 0's is the recording's; of several ranks, each has its own too."""
    data = manifest.to_json()
    if manifest.world > 1:
        publish(rank_folder(target, rank) / MANIFEST_NAME, data)
    if rank == 0 or manifest.world <= 1:
        publish(target / MANIFEST_NAME, data)


def publish(path: Path, data: bytes) -> None:
    """Write a file such that it is there whole, or not at all."""
    draft = path.with_name(path.name + ".tmp")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        try:
            os.fsync(file.fileno())
        except OSError as error:
            if error.errno not in _NO_SYNC:
                raise
    draft.replace(path)


def _make_room(target: Path, world: int, rank: int, *, overwrite: bool) -> None:
    if not target.is_dir():
        raise TargetError(f"{target} exists and is not a directory; choose another name")
    own = rank_folder(target, rank)
    if not overwrite:
        if world > 1 and not own.exists() and _worlds(target) <= {world}:
            return  # the other ranks of this run share the directory
        if not (target / MANIFEST_NAME).is_file():
            raise TargetError(
                f"{target} is a directory already, and not a recording; "
                f"give the recording a name of its own: {target / 'NAME.thk'}"
            )
        _refuse_if_alive(target, own)
        raise TargetError(_taken(target, rank))
    if any(target.iterdir()) and not _is_recording(target):
        raise TargetError(f"{target} exists and is not a recording, so it is not overwritten; choose another name")
    folders = [entry for entry in target.iterdir() if RANK_FOLDER.fullmatch(entry.name) and entry.is_dir()]
    doomed = [entry for entry in folders if entry == own or (rank == 0 and int(entry.name[5:]) >= world)]
    for folder in doomed:
        _refuse_if_alive(target, folder)
    if rank == 0 or world <= 1:
        for name in (MANIFEST_NAME, f"{MANIFEST_NAME}.tmp", "findings.json"):
            (target / name).unlink(missing_ok=True)
    for folder in doomed:
        _clear(folder)


def _taken(target: Path, rank: int) -> str:
    """Say what stands in the way, and what to do; of a run that ended early it is what is left to find out why."""
    with contextlib.suppress(OSError, RecordingError):  # a damaged one is none that can be gone on with
        manifest = load_manifest(target / MANIFEST_NAME)
        go_on = f"read it with 'tenterhook show {target}', go on with it (--resume STEP, resume=True), or choose another name"
        if not manifest.complete:
            step = reached(rank_folder(target, rank), rank) or 0
            return f"{target} is unfinished, it was killed in step {step} or soon after; {go_on}"
        if manifest.error is not None:
            return f"{target} ended early, by {manifest.error:.80}; {go_on}"
    return f"{target} exists; choose another name, or allow it to be replaced (--overwrite, overwrite=True)"


def _worlds(target: Path) -> set[int]:
    """Find of how many processes those are that have written here."""
    found = set()
    for file in [target / MANIFEST_NAME, *target.glob(f"rank-*/{MANIFEST_NAME}")]:
        with contextlib.suppress(OSError):  # being made or gone: the folder's exclusive creation decides
            found.add(load_manifest(file).world)
    return found


def _is_recording(target: Path) -> bool:
    if (target / MANIFEST_NAME).is_file():
        return True
    # Other ranks of this run may have made their folders already, and nothing else yet.
    return all(RANK_FOLDER.fullmatch(entry.name) or entry.name == f"{MANIFEST_NAME}.tmp" for entry in target.iterdir())


def _refuse_if_alive(target: Path, folder: Path) -> None:
    owner = _claimed_by(folder)
    if owner is None:
        return
    if owner.host == socket.gethostname():
        if _alive(owner.pid):
            raise TargetError(
                f"{target} is being written by process {owner.pid}; choose another name, or wait for it to end"
            )
    elif (quiet := _quiet_seconds(folder)) < _QUIET:
        raise TargetError(
            f"{target} is being written by process {owner.pid} on {owner.host:.80}: its files changed {quiet:.0f} seconds ago; "
            f"choose another name, or wait until they have rested for {_QUIET} seconds"
        )


def _claimed_by(folder: Path) -> Claim | None:
    """Give who has signed for a rank's folder; None where it is closed, or its writer died before it could sign."""
    claimed = folder / CLAIM_NAME
    try:
        if plain_file(claimed).stat().st_size > _MAX_CLAIM:
            return None
        return msgspec.json.decode(claimed.read_bytes(), type=Claim)
    except (OSError, RecordingError, msgspec.MsgspecError, RecursionError):
        return None  # or what stands there is nothing of ours


def writers(target: Path) -> list[int]:
    """List the processes on this machine that write a recording now; those on others cannot be seen from here."""
    owners = (_claimed_by(folder) for folder in sorted(target.glob("rank-*")))
    return [one.pid for one in owners if one is not None and one.host == socket.gethostname() and _alive(one.pid)]


def writer_of(folder: Path) -> tuple[str | None, bool]:
    """Say who writes in a rank's folder: the machine, where it is another one, and whether it is a live process of this one."""
    owner = _claimed_by(folder)
    if owner is None:
        return None, False
    if owner.host != socket.gethostname():
        return owner.host, False
    return None, _alive(owner.pid)


def _quiet_seconds(folder: Path) -> float:
    """Say how long nothing was written to a folder, by the clock of its file system."""
    probe = folder / f"{RESERVE_NAME}.tmp"
    try:
        probe.write_bytes(b"")
        now = probe.stat().st_mtime
        probe.unlink()
        newest = now - _QUIET
        with os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # a draft that was published just now
                    newest = max(newest, entry.stat(follow_symlinks=False).st_mtime)
        return now - newest
    except OSError as error:
        raise TargetError(f"{folder.parent} cannot be written: {_words(error)}") from error


def _alive(pid: int) -> bool:
    if pid <= 0:  # a group of processes, for kill
        return False
    if os.name == "nt":  # os.kill(pid, 0) ends a process there
        return pid == os.getpid()
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno == errno.EPERM
    except OverflowError:
        return False  # no system has such a process
    return True


def _clear(folder: Path) -> None:
    for entry in folder.iterdir():
        if _OURS.fullmatch(entry.name) and (entry.is_symlink() or not entry.is_dir()):
            entry.unlink()
    try:
        folder.rmdir()
    except OSError as error:
        raise TargetError(
            f"{folder} holds files that are not a recording's; move them away, or choose another name"
        ) from error


def _words(error: OSError) -> str:
    return error.strerror or str(error)
