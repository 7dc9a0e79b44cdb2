"""The run's end of a socket to a process that runs foreign code: pickled requests out, lines of text in.

Nothing here blocks on the process: foreign code may have stopped it in the middle of a message.
"""

from __future__ import annotations

import pickle
import select
import socket
from collections.abc import Callable
from typing import Any, BinaryIO

SEND_BYTES = 1 << 20  # Bytes per call of send.
RECEIVE_BYTES = 1 << 16  # Bytes per call of recv, which allocates as many: 4 MiB take 5 ms.
LENGTH = 8  # Bytes of the length before each request.


class BrokenProcess(Exception):  # noqa: N818 (the process is broken)
    """The process cannot be used any more; the text says why."""


def encode_request(of: Any) -> bytes:
    """A request, made in the run's process; only the run's own objects are pickled."""
    pickled = pickle.dumps(of)
    return len(pickled).to_bytes(LENGTH, "big") + pickled


def read_request(requests: BinaryIO) -> Any:
    """The next request, in the process that runs foreign code; raises EOFError when the run is over."""
    size = requests.read(LENGTH)
    if len(size) < LENGTH:
        raise EOFError("the run is over")
    return pickle.loads(requests.read(int.from_bytes(size, "big")))  # noqa: S301 (only the run writes here)


class Channel:
    """The run's end of the socket."""

    def __init__(self, end: socket.socket, called: str, max_bytes: int, cause: Callable[[], str]) -> None:
        """`called`: the process in error messages; `max_bytes`: of a line; `cause`: how the process died."""
        self._socket, self._called, self._max_bytes, self._cause = end, called, max_bytes, cause
        end.setblocking(False)
        self._unsent = memoryview(b"")
        self._received = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def poll_events(self) -> int:
        """The events that `poll` should wait for."""
        return select.POLLIN | (select.POLLOUT if self._unsent else 0)

    def send(self, of: Any) -> None:
        """Sends a request, as much of it as fits now; `receive` sends the rest."""
        self._unsent = memoryview(encode_request(of))
        self._send()

    def receive(self) -> bytearray | None:
        """The next line once it is complete. Sends and receives what is possible now; raises `BrokenProcess` when no
        more can come."""
        self._send()
        while b"\n" not in self._received and len(self._received) <= self._max_bytes:
            try:
                data = self._socket.recv(RECEIVE_BYTES)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                data = b""
            if not data:
                raise BrokenProcess(f"{self._called} died ({self._cause()})")
            self._received += data
        message, ended, rest = self._received.partition(b"\n")
        if len(message) > self._max_bytes:
            raise BrokenProcess(f"{self._called} sent a line without end")
        if not ended:
            return None
        self._received = rest
        return message

    @property
    def has_extra_output(self) -> bool:
        """Whether the process has sent more than was requested."""
        return bool(self._received)

    def _send(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent[:SEND_BYTES]) :]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):  # The process has died, which `receive` notices.
            self._unsent = memoryview(b"")

    def close(self) -> None:
        self._socket.close()
