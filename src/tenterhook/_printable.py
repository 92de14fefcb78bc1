"""Text for a terminal: what the terminal would take for a command is shown, and not obeyed. A recording may be anybody's."""

from __future__ import annotations

__all__ = ["escaped", "printable"]

_COMMANDS = (
    *(code for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"),
    *range(0x202A, 0x202F),  # these and the next write text backwards
    *range(0x2066, 0x206A),
)
_REPLACED = dict.fromkeys(_COMMANDS, "\N{REPLACEMENT CHARACTER}")
_ESCAPED = {code: f"\\u{code:04x}" for code in _COMMANDS}


def printable(text: str) -> str:
    """Replace control characters, but line feeds and tabs, each by one character."""
    return text.translate(_REPLACED)


def escaped(json_text: str) -> str:
    r"""Write control characters in JSON as JSON has them, ``\u009b``: the text means the same."""
    return json_text.translate(_ESCAPED)
