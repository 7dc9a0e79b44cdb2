"""For an output that is no terminal and has no bar: after a while of silence, a line on what is under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from ebbtide.progress import Progress, duration

SILENCE = 15.0  # seconds after which a log that stands still looks like a run that hangs
LOOKS = 1.0  # seconds between looks at the clock


@dataclass(eq=False)
class _Work:
    what: str
    began: float
    share: float | None = None
    """Of it that is done, where that is known."""


class Heartbeat:
    """It beats in a thread of its own, as some long work (loading a model) tells nothing of how far it is."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._under_way: list[_Work] = []
        self._spoken = clock()
        self._stopped = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def stop(self) -> None:
        """Waits for nothing: it may be called where the output is taken, and the thread waits for that."""
        self._stopped.set()

    @contextmanager
    def doing(self, what: str) -> Iterator[Progress]:
        work = _Work(what, self._clock())
        self._under_way.append(work)

        def progress(done: int, of: int) -> None:
            work.share = done / of if of else None

        try:
            yield progress
        finally:
            self._under_way.remove(work)

    def spoke(self) -> None:
        """Something was said: the silence begins anew."""
        self._spoken = self._clock()

    def beat(self) -> None:
        """Says what is under way, if it is time to."""
        now = self._clock()
        for work in self._under_way[-1:]:
            if now - self._spoken >= SILENCE and now - work.began >= LOOKS:  # what has only begun may be done at once
                share = "" if work.share is None else f"{work.share:.0%} "
                self._say(f"  {work.what}  {share}after {duration(now - work.began)}")
                self.spoke()

    def _beat(self) -> None:
        with suppress(OSError):  # the output is gone: for those to hear of who have more to say
            while not self._stopped.wait(timeout=LOOKS):
                self.beat()
