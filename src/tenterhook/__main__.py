"""``python -m tenterhook``: the same as the command ``tenterhook``."""

from __future__ import annotations

from tenterhook.cli import main

if __name__ == "__main__":
    main()
