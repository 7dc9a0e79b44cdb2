"""The run's side of one scoring process: its start, the messages to and from it, and its end.

Nothing here blocks on the process: foreign code may have stopped it in the middle of a message.
"""

from __future__ import annotations

import json
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from typing import Any

from ebbtide.tasks.process_guard import kill_descendants
from ebbtide.tasks.score_message import MAX_BYTES, ScoringMessage, decode_message
from ebbtide.tasks.scoring_worker import encode_request

START = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from ebbtide.tasks.process_guard import main
main(int(sys.argv[1]))
"""
"""The program of the guard. It gets this process's sys.path as an argument, so that no environment variable for it
reaches what a scorer starts."""
GRACE = 10.0  # Seconds for the guard to kill everything below it.
SEND_BYTES = 1 << 20  # Bytes per call of send.


class BrokenProcess(Exception):  # noqa: N818 (the process is broken)
    """The process cannot be used any more; the text says why."""


class ScoringProcess:
    """A guard (process_guard.py) and its child, which scores (scoring_worker.py)."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        path = json.dumps([path for path in sys.path if path])
        with theirs:
            self._guard = subprocess.Popen(  # noqa: S603
                [sys.executable, "-P", "-c", START, str(theirs.fileno()), path],
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is for the run to handle.
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # What a scorer prints is not the run's output.
                stderr=subprocess.DEVNULL,
            )
        self._unsent = memoryview(b"")
        self._received = bytearray()

    def fileno(self) -> int:
        return self._channel.fileno()

    @property
    def poll_events(self) -> int:
        """The events that `poll` should wait for."""
        return select.POLLIN | (select.POLLOUT if self._unsent else 0)

    def send(self, of: Any) -> None:
        """Sends a request, as much of it as fits now; `receive` sends the rest."""
        self._unsent = memoryview(encode_request(of))
        self._send()

    def receive(self) -> ScoringMessage | None:
        """The next message of the process once it is complete. Sends and receives what is possible now; raises
        `BrokenProcess` when no more can come."""
        self._send()
        if b"\n" not in self._received:
            try:
                data = self._channel.recv(MAX_BYTES)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                data = b""
            if not data:
                raise BrokenProcess(f"the scorer's process died ({self._cause()})")
            self._received += data
        message, ended, rest = self._received.partition(b"\n")
        if len(message) > MAX_BYTES:
            raise BrokenProcess("the scorer's process sent a line without end")
        if not ended:
            return None
        self._received = rest
        try:
            return decode_message(message)
        except ValueError:
            raise BrokenProcess("the scorer's process sent something that is not a result") from None

    @property
    def has_extra_output(self) -> bool:
        """Whether the process has sent more than was requested."""
        return bool(self._received)

    def _send(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[self._channel.send(self._unsent[:SEND_BYTES]) :]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):  # The process has died, which `receive` notices.
            self._unsent = memoryview(b"")

    def _cause(self) -> str:
        """How the process died: a signal or an exit code."""
        with suppress(subprocess.TimeoutExpired):
            code = self._guard.wait(GRACE)
            code = -code if code < 0 else code - 128  # The guard passes on how its child ended.
            return signal.Signals(code).name if code in set(signal.Signals) else f"exit code {code + 128}"
        return "its guard is stopped"

    def close(self) -> None:
        """Closes the channel; the guard notices that and kills everything below it."""
        self._channel.close()

    def stop(self) -> None:
        """Ends the guard and everything below it."""
        self.close()
        try:
            self._guard.wait(GRACE)
        except subprocess.TimeoutExpired:  # Foreign code has stopped the guard as well.
            kill_descendants(self._guard.pid)
            self._guard.kill()
            self._guard.wait()
