"""Progress of long work: its callback, durations for people, and abandoning work when the run has to stop."""

from collections.abc import Callable
from dataclasses import dataclass

Progress = Callable[[int, int], None]
"""A callback that is called with (done, total)."""


def format_duration(seconds: float) -> str:
    """Formats seconds for people: `39 s`, `12 min`, `3.5 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class WorkAbandoned(Exception):  # noqa: N818 (nothing went wrong)
    """Raised inside work that can be done later, when the run has to stop now."""


@dataclass(frozen=True)
class AbandonableProgress:
    """A progress callback that abandons the work (raises WorkAbandoned) once the run has to stop soon."""

    progress: Progress
    must_stop: Callable[[], bool]

    def __call__(self, done: int, of: int) -> None:
        if self.must_stop():
            raise WorkAbandoned
        self.progress(done, of)


def no_progress(done: int, of: int) -> None:
    """Shows nothing."""
