"""The MindSpore example of the edits runs, and does what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "mindspore_clip.py"


def test_clipping_rescues_a_run_that_diverges(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(EXAMPLE)], cwd=tmp_path, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"no clipping +last loss +nan  accuracy 0\.0\d+", lines[0])
    found = re.fullmatch(r"clip_norm\(0\.05\) +last loss +[\d.]+  accuracy (0\.\d+)", lines[1])
    assert found and float(found[1]) > 0.3
    assert [line.split()[-1] for line in lines[4:]] == ["30"] * 8
