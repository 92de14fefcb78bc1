"""Draw the README's picture: what ``tenterhook show`` prints of a run of examples/digits.py, as SVG.

python docs/pictures/draw.py runs/digits.thk docs/pictures/show.svg
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

from rich.console import Console

from tenterhook.cli.run_show import page_of
from tenterhook.recording import open_recording
from tenterhook.reporters.text import print_page


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw what show prints, as SVG.")
    parser.add_argument("recording", type=Path)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    console = Console(record=True, width=104, file=io.StringIO(), force_terminal=True)
    print_page(console, page_of(open_recording(arguments.recording), "@0"))
    svg = console.export_svg(title="tenterhook show @0")
    # the fonts would come from the network; the reader's own serve as well
    svg = "\n".join(line for line in svg.splitlines() if "url(" not in line or "clip-path" in line)
    arguments.picture.write_text(svg + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
