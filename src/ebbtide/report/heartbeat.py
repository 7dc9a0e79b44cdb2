"""A heartbeat for an output that is not a terminal and so has no progress bar: after some silence, it prints a line on
the work in progress."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from ebbtide.progress import Progress, format_duration

SILENCE = 15.0  # seconds; a log that is silent for longer looks like a run that hangs
LOOKS = 1.0  # seconds between checks of the clock


@dataclass(eq=False)
class _Work:
    what: str
    began: float
    share: float | None = None
    """The fraction that is done, if that is known."""


class Heartbeat:
    """A thread that prints the work in progress. It is a thread because some long work, such as loading a model, never
    reports progress."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._in_progress: list[_Work] = []
        self._last_print = clock()
        self._stopped = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def stop(self) -> None:
        """Stops the thread without joining it: the caller may hold the output's lock, which the thread may wait for."""
        self._stopped.set()

    @contextmanager
    def show_progress(self, what: str) -> Iterator[Progress]:
        work = _Work(what, self._clock())
        self._in_progress.append(work)

        def progress(done: int, of: int) -> None:
            work.share = done / of if of else None

        try:
            yield progress
        finally:
            self._in_progress.remove(work)

    def note_output(self) -> None:
        """Restarts the timer, as something was just printed."""
        self._last_print = self._clock()

    def beat(self) -> None:
        """Prints the work in progress if the output has been silent for long enough."""
        now = self._clock()
        for work in self._in_progress[-1:]:
            # Work that has just begun may be done in a moment.
            if now - self._last_print >= SILENCE and now - work.began >= LOOKS:
                share = "" if work.share is None else f"{work.share:.0%} "
                self._say(f"  {work.what}  {share}after {format_duration(now - work.began)}")
                self.note_output()

    def _run(self) -> None:
        with suppress(OSError):  # the output is gone; whoever prints next handles that
            while not self._stopped.wait(timeout=LOOKS):
                self.beat()
