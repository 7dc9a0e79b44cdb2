"""The process above a scoring process. It runs no foreign code; when the scoring process or the run ends, however that
ends, it ends all that foreign code has started.

It adopts what its descendants leave behind (Linux calls that a subreaper), so that everything they start stays below
it: also what has a session of its own.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading
import time
from contextlib import suppress
from typing import NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of <linux/prctl.h>
ENOUGH = 5.0  # seconds: what cannot be ended by then (it waits for a disk that does not answer) is left alone
TICK = 0.002  # seconds between looks at what is still there


def main(channel: int) -> NoReturn:
    """Of a new process with one thread; `channel` leads to the run."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    guard, worker = os.getpid(), os.fork()
    if worker == 0:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # should foreign code end the guard
        try:
            if os.getppid() == guard:
                from ebbtide.tasks.worker import work  # only now: the guard stays small

                work(channel)
        finally:
            os._exit(1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # it ends when the run does, and not before
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_run, args=(channel,), daemon=True).start()
    while True:
        ended, status = os.wait()
        if ended == worker:
            break
    end_below(guard)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _end_with_run(channel: int) -> None:
    cut = select.poll()
    cut.register(channel, 0)  # not for what can be read, which is for the worker: only for its end
    cut.poll()
    end_below(os.getpid())


def end_below(root: int) -> None:
    """Ends all that descends from a process. Each is stopped first, so that none starts others while they are ended."""
    until, known = time.monotonic() + ENOUGH, set[int]()
    while (found := _below(root)) and time.monotonic() < until:
        number = signal.SIGKILL if found <= known else signal.SIGSTOP
        for process in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, number)
        if number == signal.SIGKILL:
            time.sleep(TICK)
        known |= found


def _below(root: int) -> set[int]:
    """The living descendants of a process."""
    children: dict[int, list[int]] = {}
    dead = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{entry}/stat", "rb") as file:
            state, parent = file.read().rpartition(b")")[2].split()[:2]  # the name before it may hold anything
            children.setdefault(int(parent), []).append(int(entry))
            dead |= {int(entry)} if state in (b"Z", b"X") else set()
    found, last = set[int](), [root]
    while last:
        last = [child for one in last for child in children.get(one, ()) if child not in found]
        found |= set(last)
    return found - dead


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")
