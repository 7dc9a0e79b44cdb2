"""The run's side of one scoring process: its start, the messages to and from it, and its end."""

from __future__ import annotations

import socket
from typing import Any

from ebbtide.tasks.channel import BrokenProcess, Channel
from ebbtide.tasks.guarded_process import GuardedProcess
from ebbtide.tasks.score_message import MAX_BYTES, ScoringMessage, decode_message


class ScoringProcess:
    """A guard (process_guard.py) and its child, which scores (scoring_worker.py)."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._process = GuardedProcess("ebbtide.tasks.scoring_worker:score_requests", theirs)
        self._channel = Channel(ours, "the scorer's process", MAX_BYTES, self._process.cause)

    def fileno(self) -> int:
        return self._channel.fileno()

    @property
    def poll_events(self) -> int:
        """The events that `poll` should wait for."""
        return self._channel.poll_events

    def send(self, of: Any) -> None:
        """Sends a request, as much of it as fits now; `receive` sends the rest."""
        self._channel.send(of)

    def receive(self) -> ScoringMessage | None:
        """The next message of the process once it is complete; raises `BrokenProcess` when no more can come."""
        message = self._channel.receive()
        if message is None:
            return None
        try:
            return decode_message(message)
        except ValueError:
            raise BrokenProcess("the scorer's process sent something that is not a result") from None

    @property
    def has_extra_output(self) -> bool:
        """Whether the process has sent more than was requested."""
        return self._channel.has_extra_output

    def close(self) -> None:
        """Closes the channel; the guard notices that and kills everything below it."""
        self._channel.close()

    def stop(self) -> None:
        """Ends the guard and everything below it."""
        self.close()
        self._process.stop()
