"""Ctrl-C and SIGTERM outside of a run's steps (those are the Keeper's).

While a process has written nothing that would be missed it ends at once, from within the signal's handler: an exception
would come up in the middle of an import, a library's callback or a destructor, which show it as a traceback, turn it
into another one, or lose it. This file imports next to nothing: it is there before all that takes a second to import.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

STOPPED = 130  # exit code: by Ctrl-C or SIGTERM
SIGNALS = (signal.SIGINT, signal.SIGTERM)

Handler = Callable[[int, FrameType | None], None]


def handled(handler: Handler) -> dict[int, Any]:
    """Has both signals call this; gives what they called before. What a background job ignores stays ignored."""
    if threading.current_thread() is not threading.main_thread():
        return {}  # which alone hears signals
    heard = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heard}


def give_back(before: dict[int, Any]) -> None:
    for number, handler in before.items():
        signal.signal(number, handler)


def at_once(last: Callable[[], str] = str) -> dict[int, Any]:
    """From now on a signal ends the process. `last` is called first: it takes back what was begun, and gives words."""

    def leave(number: int, frame: FrameType | None) -> None:
        handled(lambda *_: os._exit(STOPPED))  # the second one does not wait for what the first one takes back
        try:
            if words := last():
                os.write(2, f"{words}\n".encode())
        finally:
            os._exit(STOPPED)  # also where there is a disk that nothing can be taken back on

    return handled(leave)


@contextmanager
def in_order() -> Iterator[None]:
    """For a command that writes one thing: the first signal raises KeyboardInterrupt, so that half of it is removed.

    The second ends the process.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        at_once()
        raise KeyboardInterrupt

    before = handled(stop)
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(STOPPED) from None
    finally:
        give_back(before)
