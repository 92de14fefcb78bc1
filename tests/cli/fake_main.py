"""The command line with a stand-in for the recorder."""

from __future__ import annotations

import os
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Summary:
    path: Path
    modules_selected: int = 7
    modules_fired: int = 6
    missing: list = field(default_factory=lambda: [("head.aux", "never called")])
    calls: int = 168
    values: int = 336
    steps: int = 12
    cost_fraction: float = 0.018
    wall_seconds: float = 761.2
    size_bytes: int = 31_400_000
    partial: str | None = None
    nothing_called: bool = False


class ScriptRecorder:
    def __init__(self, *, to, overwrite, **options):
        from tenterhook.errors import TargetError

        if Path(to).exists() and not overwrite:
            raise TargetError(f"{to} is there already\n--overwrite replaces it, -o names another place")
        self.to, self.options = to, options
        Path(to).mkdir(parents=True)

    def start(self):
        pass

    def close(self, error):
        (Path(self.to) / "closed").write_text(repr(error))
        given = os.environ.get("FAKE", "")
        return Summary(Path(self.to), **(eval(given) if given else {}))


fake = types.ModuleType("tenterhook.recorder")
fake.ScriptRecorder = ScriptRecorder
sys.modules["tenterhook.recorder"] = fake
from tenterhook.cli import main  # noqa: E402

main()
