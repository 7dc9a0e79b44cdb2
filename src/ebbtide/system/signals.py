"""Ctrl-C and SIGTERM outside of the steps of a run (during the steps, the Checkpointer handles them).

As long as a process has written nothing that would be missed, it exits inside the signal handler. An exception would be
raised in the middle of an import, a library's callback or a destructor, which print it as a traceback, replace it or
lose it. This file has no slow imports, so that it works before those of others.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

STOPPED = 130  # exit code after Ctrl-C or SIGTERM
SIGNALS = (signal.SIGINT, signal.SIGTERM)

Handler = Callable[[int, FrameType | None], None]


def install_handlers(handler: Handler) -> dict[int, Any]:
    """Installs a handler for both signals and returns the old handlers. A signal that is ignored, as Ctrl-C is in a
    background job, stays ignored."""
    if threading.current_thread() is not threading.main_thread():
        return {}  # only the main thread can install handlers
    unignored = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in unignored}


def restore_handlers(before: dict[int, Any]) -> None:
    """Restores the old handlers."""
    for number, handler in before.items():
        signal.signal(number, handler)


def exit_on_signal(last: Callable[[], str] = str) -> dict[int, Any]:
    """Makes a signal end the process from now on. `last` is called first: it cleans up and returns the message to
    print."""

    def leave(number: int, frame: FrameType | None) -> None:
        install_handlers(lambda *_: os._exit(STOPPED))  # a second signal does not wait for the cleanup
        try:
            if message := last():
                os.write(2, f"{message}\n".encode())
        finally:
            os._exit(STOPPED)  # even if the cleanup fails

    return install_handlers(leave)


@contextmanager
def interrupt_on_signal() -> Iterator[None]:
    """A context for a command that writes one file or folder: the first signal raises KeyboardInterrupt, so that a
    partial result is removed, and the second ends the process."""

    def stop(number: int, frame: FrameType | None) -> None:
        exit_on_signal()
        raise KeyboardInterrupt

    before = install_handlers(stop)
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(STOPPED) from None
    finally:
        restore_handlers(before)
