"""Text that others wrote (a model, a file, a name), for a terminal: control characters are shown, not obeyed."""

from __future__ import annotations

import unicodedata

OBEYED = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
"""Unicode's categories of what a terminal obeys (colours, cursor moves, the direction of writing) or cannot write."""


def printable(text: str, limit: int) -> str:
    """One line of at most about so many characters."""
    return "".join(_shown(c) for c in cut(text, limit))


def printable_lines(text: str) -> str:
    """Of any length, in the lines that it has."""
    return "".join(c if c in "\n\t" else _shown(c) for c in text)


def cut(text: str, limit: int) -> str:
    """In the middle, where it is longer."""
    return text if len(text) <= limit else f"{text[: limit // 2]} … {text[-limit // 2 :]}"


def has_controls(text: str) -> bool:
    """Characters that no name should have: those that a terminal obeys, line ends too, and halves of characters."""
    return any(unicodedata.category(character) in ("Cc", "Cs") for character in text)


def _shown(character: str) -> str:
    return repr(character)[1:-1] if unicodedata.category(character) in OBEYED else character
