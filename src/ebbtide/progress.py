"""How long work tells how far it is, and how long it has taken."""

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with (done, of)."""


def duration(seconds: float) -> str:
    """For people: `39 s`, `12 min`, `3.5 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
