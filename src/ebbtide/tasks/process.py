"""The run's side of one scoring process: what it is given, what it says, and its end.

Nothing here waits for it to read or to speak: foreign code may have stopped it in the middle of a message.
"""

from __future__ import annotations

import json
import selectors
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from typing import Any

from ebbtide.tasks.answer import MOST_BYTES, Said, read
from ebbtide.tasks.guard import end_below
from ebbtide.tasks.worker import request

START = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from ebbtide.tasks.guard import main
main(int(sys.argv[1]))
"""
"""With this process's path, given so that no variable of it reaches what a scorer starts."""
GRACE = 10.0  # seconds for the guard to end all that is below it
AT_ONCE = 1 << 20  # bytes


class Broken(Exception):  # noqa: N818 (it is the process that is)
    """It is not to be asked again; the text says why."""


class ScoringProcess:
    """A guard (guard.py) and the process below it, which is the one that scores (worker.py)."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        path = json.dumps([path for path in sys.path if path])
        with theirs:
            self._guard = subprocess.Popen(  # noqa: S603
                [sys.executable, "-P", "-c", START, str(theirs.fileno()), path],
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # a Ctrl-C is the run's to handle
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # what a scorer prints is not the run's output
                stderr=subprocess.DEVNULL,
            )
        self._unsent = memoryview(b"")
        self._heard = bytearray()

    def fileno(self) -> int:
        return self._channel.fileno()

    @property
    def awaited(self) -> int:
        """What a selector should look for."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)

    def ask(self, of: Any) -> None:
        """Sends what fits now; `hear` sends the rest."""
        self._unsent = memoryview(request(of))
        self._send()

    def hear(self) -> Said | None:
        """What it says, once that is whole. Sends and receives what can be now; `Broken` when no more will come."""
        self._send()
        try:
            data = self._channel.recv(MOST_BYTES)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            data = b""
        if not data:
            raise Broken(f"the scorer's process died ({self._how()})")
        self._heard += data
        said, ended, rest = self._heard.partition(b"\n")
        if len(said) > MOST_BYTES:
            raise Broken("the scorer's process wrote a line without end to the run")
        if not ended:
            return None
        self._heard = rest
        try:
            return read(said)
        except ValueError:
            raise Broken("the scorer's process wrote something else than an answer to the run") from None

    @property
    def chatters(self) -> bool:
        """It has said more than it was asked."""
        return bool(self._heard)

    def _send(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[self._channel.send(self._unsent[:AT_ONCE]) :]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):  # it has died: that is heard as well
            self._unsent = memoryview(b"")

    def _how(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            code = self._guard.wait(GRACE)
            code = -code if code < 0 else code - 128  # the guard ends as the process did that it was for
            return signal.Signals(code).name if code in set(signal.Signals) else f"exit code {code + 128}"
        return "its guard is stopped"

    def let_go(self) -> None:
        """The guard sees it, and ends all that is below it."""
        self._channel.close()

    def stop(self) -> None:
        self.let_go()
        try:
            self._guard.wait(GRACE)
        except subprocess.TimeoutExpired:  # foreign code has stopped the guard as well
            end_below(self._guard.pid)
            self._guard.kill()
            self._guard.wait()
