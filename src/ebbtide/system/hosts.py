"""The loopback names: a server that listens on one is reached from this machine only."""

from __future__ import annotations

import re

LOOPBACK = ("127.0.0.1", "::1", "localhost")
_HEADER = re.compile(r"(127\.0\.0\.1|\[::1\]|localhost)(:[0-9]{1,5})?", re.IGNORECASE)


def is_loopback(header: str) -> bool:
    """Whether a request's Host header is a loopback name. This stops DNS rebinding: a page of another site can make its
    own name resolve to this machine, but then the header has that name.

    The header is compared as it was sent: a URL parser would find another host in `127.0.0.1:80@elsewhere`.
    """
    return _HEADER.fullmatch(header) is not None
