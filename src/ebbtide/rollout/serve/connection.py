"""A connection of the HTTP server: it is cut when its client sends too slowly, sends too much, or takes nothing, and it
is known when its client has left."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ebbtide.rollout.serve.error import ApiError

MOST = 65_536  # bytes that are read behind a request: of others while it is answered, or of its own once it is refused
LOOK_SECONDS = 0.1  # between looks whether a client that sends no more still listens
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Connection(H11Protocol):
    def __init__(self, *arguments: Any, patience: float, **options: Any) -> None:
        """A request has `patience` seconds to arrive, from its first byte, or from the connection's beginning, to its
        last. A client has as many to take something of its answer."""
        super().__init__(*arguments, **options)
        self._patience = patience
        self._deadline: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._look: asyncio.TimerHandle | None = None
        self._refused_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's own signature
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # `pause_writing` is called whenever something is left
        self.app_state = {"cut": transport.abort}
        self._set_deadline()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._set_deadline()
        # uvicorn stops reading when more comes behind a request that is being answered; then nothing would tell that the client has left.
        if self.conn.their_state is h11.DONE and self.flow.read_paused:
            if len(self.conn.trailing_data[0]) > MOST:
                self.transport.close()
            else:
                self.flow.resume_reading()
        refused = self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.DONE
        self._refused_bytes = self._refused_bytes + len(data) if refused else 0
        if self._refused_bytes > MOST:
            self.transport.close()

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio's signature, which uvicorn narrows
        """True keeps the connection: a client may send no more and still wait for its answer.

        One that has left altogether looks the same until something is sent to it, which its machine then refuses."""
        if not self._owes_answer or self.scope["http_version"] != "1.1":  # older clients do not know `CONTINUE`
            return False
        if self.conn.our_state is h11.SEND_RESPONSE:
            self.transport.write(CONTINUE)
        self._look_again()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._deadline, self._stall, self._look):
            if timer is not None:
                timer.cancel()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._look is not None and not self._owes_answer:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "this is not HTTP/1.1"))

    # What the client sends

    @property
    def _owes_answer(self) -> bool:
        """To a request that is whole."""
        whole = self.conn.their_state in (h11.DONE, h11.MUST_CLOSE)
        return whole and self.cycle is not None and not self.cycle.response_complete

    def _set_deadline(self) -> None:
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):  # the request is whole
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None
        elif self._deadline is None:
            late = ApiError(408, f"the request was not whole after {self._patience:g} s")
            self._deadline = self.loop.call_later(self._patience, self._refuse, late)

    def _refuse(self, error: ApiError) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not self.transport.is_closing():
            self.transport.write(error.response())
        self.transport.close()

    def _look_again(self) -> None:
        """asyncio does not look at a connection that it neither reads nor writes."""
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self._look = self.loop.call_later(LOOK_SECONDS, self._look_again)

    # What the client takes

    def pause_writing(self) -> None:
        """The kernel has not taken all, because the client has not; until it has, nothing more is written."""
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()

    def _watch(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._stall = self.loop.call_later(self._patience, self._check_taken, left)

    def _check_taken(self, left: int) -> None:
        if self.transport.get_write_buffer_size() < left:
            self._watch()
        else:
            self.transport.abort()
