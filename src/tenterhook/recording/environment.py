"""What surrounds a run and is worth keeping with it: command line, commit, versions, chosen environment variables.

Only the variables on the list are ever read, so that no secret of the environment reaches a file.
"""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import sys
import time
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

from tenterhook.recording.manifest import Git, Manifest

__all__ = ["ENVIRONMENT", "git_state", "now", "start_manifest", "versions"]

ENVIRONMENT = (
    "ASCEND_RT_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_VISIBLE_DEVICES",
    "GROUP_RANK",
    "HCCL_DETERMINISTIC",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MKL_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "PYTHONHASHSEED",
    "RANK",
    "SLURM_JOB_ID",
    "SLURM_PROCID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID",
    "WORLD_SIZE",
)
"""The environment variables that change what a network computes, or say which process of a job this is."""

_LASTS = 60.0
"""Seconds for which what was found holds for further recordings: in a large repository git takes long, and many may begin."""

_PACKAGES = ("tenterhook", "numpy", "pyarrow", "torch", "mindspore", "transformers", "lightning", "accelerate")


def now() -> str:
    """Give the time, UTC, ISO 8601, to the millisecond."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def versions() -> dict[str, str]:
    """Give the versions of Python, the platform and the installed packages that matter; imports none."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_state(folder: str | os.PathLike[str] | None = None) -> Git | None:
    """Give the commit of `folder` (default: the working directory); None without git or a repository."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    branch = _git(folder, "symbolic-ref", "--short", "-q", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return Git(commit=commit, branch=branch or None, dirty=None if changes is None else bool(changes))


def start_manifest(**fields: object) -> Manifest:
    """Make the manifest of a recording that begins now, in this process, with what can be known without a framework.

    The commit and the versions are those that were found at most a minute ago.

    Args:
        fields: fields of `Manifest` to set or replace.
    """
    known: dict[str, object] = {
        "argv": list(sys.argv),
        "git": _recent_git_state(_working_directory(), _period()),
        "versions": dict(_recent_versions(_period())),
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        "rank": _whole("RANK", 0),
        "world": _whole("WORLD_SIZE", 1),
        "started": now(),
    }
    return Manifest(**{**known, **fields})  # type: ignore[arg-type]


def _period() -> int:
    return int(time.monotonic() / _LASTS)


_recent_versions = functools.lru_cache(1)(lambda period: versions())


@functools.lru_cache(8)
def _recent_git_state(folder: str | None, period: int) -> Git | None:
    return None if folder is None else git_state(folder)


def _working_directory() -> str | None:
    try:
        return str(Path.cwd())
    except OSError:  # it has been removed
        return None


def _whole(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else default


def _git(folder: str | os.PathLike[str] | None, *arguments: str) -> str | None:
    # Optional locks are refused so that looking at a repository never makes another git command in it fail.
    command = ["git", "--no-optional-locks", *arguments]
    try:
        done = subprocess.run(
            command,
            cwd=folder or Path.cwd(),
            capture_output=True,
            text=True,
            timeout=2,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None  # no git, no folder, too slow: the recording then says nothing of it
    return done.stdout.strip() if done.returncode == 0 else None
