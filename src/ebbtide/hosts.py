"""The names by which only this machine reaches its servers."""

from __future__ import annotations

import re

OWN = ("127.0.0.1", "::1", "localhost")
_HEADER = re.compile(r"(127\.0\.0\.1|\[::1\]|localhost)(:[0-9]{1,5})?", re.IGNORECASE)


def is_own(header: str) -> bool:
    """Whether a request's Host header names this machine. A page of another site may have its own name lead here: the name it asked for gives it away.

    The header is compared as it was sent: what parses an address may find a host in `127.0.0.1:80@elsewhere`.
    """
    return _HEADER.fullmatch(header) is not None
