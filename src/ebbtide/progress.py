"""How long work tells how far it is, how long it has taken, and how it gives way to a stop."""

from collections.abc import Callable
from dataclasses import dataclass

Progress = Callable[[int, int], None]
"""Called with (done, of)."""


def duration(seconds: float) -> str:
    """For people: `39 s`, `12 min`, `3.5 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class GivenUp(Exception):  # noqa: N818 (nothing went wrong)
    """Raised in work that can be made up for later, where the run has no time for it."""


@dataclass(frozen=True)
class GivingWay:
    """The progress of work that is given up when the run is in haste."""

    progress: Progress
    in_haste: Callable[[], bool]

    def __call__(self, done: int, of: int) -> None:
        if self.in_haste():
            raise GivenUp
        self.progress(done, of)
