"""The README's block on MindSpore does what it says."""

from __future__ import annotations

import runpy
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"
IMPORTS = "import mindspore as ms\nimport numpy as np\nfrom mindspore import nn\nimport tenterhook as th\n"


def test_the_block_in_the_readme_runs(tmp_path: Path) -> None:
    blocks = [part.split("```")[0] for part in README.read_text(encoding="utf-8").split("```python\n")[1:]]
    [block] = [block for block in blocks if "nn.SequentialCell" in block]
    (tmp_path / "block.py").write_text(IMPORTS + block)  # MindSpore looks into the file that a function is from
    known = runpy.run_path(str(tmp_path / "block.py"))
    assert (known["rec"]["1"].output.shape, known["rec"]["1"].grad_output.shape) == ((3, 8), (3, 8))
