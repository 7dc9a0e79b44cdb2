"""Makes foreign text (from a model, a file, a name) safe for a terminal: control characters are escaped."""

from __future__ import annotations

import unicodedata

ESCAPED = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
"""The Unicode categories that a terminal interprets (colours, cursor moves, text direction) or cannot write."""


def printable(text: str, limit: int) -> str:
    """The text as one line of at most about `limit` characters."""
    shown = cut_middle(text, limit)
    return shown if shown.isprintable() else "".join(_escape(c) for c in shown)


def printable_lines(text: str) -> str:
    """The text with its line breaks, of any length."""
    return "".join(c if c in "\n\t" else _escape(c) for c in text)


def cut_middle(text: str, limit: int) -> str:
    """Cuts the middle out of a text that is longer than the limit."""
    return text if len(text) <= limit else f"{text[: limit // 2]} … {text[-limit // 2 :]}"


def has_controls(text: str) -> bool:
    """Whether a text has characters that no name should have: control characters, line breaks, unpaired surrogates."""
    return any(unicodedata.category(character) in ("Cc", "Cs") for character in text)


def _escape(character: str) -> str:
    return repr(character)[1:-1] if unicodedata.category(character) in ESCAPED else character
