"""The guard: the parent of a process that runs foreign code, such as a scorer. It runs none itself; when that process
or the run ends, in whatever way, it kills every process that foreign code has started.

It adopts orphans among its descendants (a subreaper on Linux), so that everything they start stays below it, even
with a session of its own.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from importlib import import_module
from typing import NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # From <linux/prctl.h>.
KILL_SECONDS = 5.0  # A process that cannot be killed by then (it waits for a disk that does not answer) is left alone.
TICK = 0.002  # Seconds between checks of which processes are left.


def main(channel: int, entry: str) -> NoReturn:
    """The main function of the guard, a new process with one thread; `channel` is the socket to the run, and `entry`
    the `module:function` that its child calls with it."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    guard, worker = os.getpid(), os.fork()
    if worker == 0:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # In case foreign code kills the guard.
        try:
            if os.getppid() == guard:
                module, _, name = entry.partition(":")
                getattr(import_module(module), name)(channel)  # Imported here, so that the guard stays small.
        finally:
            os._exit(1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # The guard ends when the run does, not before.
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_run, args=(channel,), daemon=True).start()
    while True:
        ended, status = os.wait()
        if ended == worker:
            break
    kill_descendants(guard)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _end_with_run(channel: int) -> None:
    """Waits until the run closes its end of the channel, then kills all descendants."""
    hang_up = select.poll()
    hang_up.register(channel, 0)  # Only for a hang-up: data on the channel is for the worker.
    hang_up.poll()
    kill_descendants(os.getpid())


def kill_descendants(root: int, keep: Collection[int] = ()) -> None:
    """Kills all descendants of a process, but for some of them and what these have started. They are stopped first, so
    that none starts others meanwhile."""
    until, known = time.monotonic() + KILL_SECONDS, set[int]()
    while (found := _below(root, keep)) and time.monotonic() < until:
        number = signal.SIGKILL if found <= known else signal.SIGSTOP
        for process in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, number)
        if number == signal.SIGKILL:
            time.sleep(TICK)
        known |= found


def _below(root: int, keep: Collection[int]) -> set[int]:
    """The living descendants of a process, without those to keep and what is below them. The dead ones are passed
    through: one that is about to end may be seen with its children, or its children with the parent they get then."""
    children, dead = _processes()
    found, last = set[int](), [root]
    while last:
        last = [child for one in last for child in children.get(one, ()) if child not in found and child not in keep]
        found |= set(last)
    return found - dead


def _processes() -> tuple[dict[int, list[int]], set[int]]:
    """(a process -> its children, processes that have ended)."""
    children: dict[int, list[int]] = {}
    dead = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{entry}/stat", "rb") as file:
            state, parent = file.read().rpartition(b")")[2].split()[:2]  # The name before it may contain anything.
            children.setdefault(int(parent), []).append(int(entry))
            dead |= {int(entry)} if state in (b"Z", b"X") else set()
    return children, dead


def prctl(option: int, value: int) -> None:
    """Sets an option of this process (Linux)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")
