"""A connection of the HTTP server. It is closed when its client sends too slowly, sends too much or receives nothing,
and it notices when its client has left."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ebbtide.rollout.serve.error import ApiError

# The most bytes that are read after a request: of the next ones while it is being answered, or of its own body once it
# is refused.
MOST = 65_536
LOOK_SECONDS = 0.1  # between checks whether a client that sends no more is still connected
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1 connection with deadlines in both directions."""

    def __init__(self, *arguments: Any, patience: float, **options: Any) -> None:
        """A request has to arrive within `patience` seconds of its first byte or of the connection's start. A client
        that has received nothing of its response for as long is disconnected."""
        super().__init__(*arguments, **options)
        self._patience = patience
        self._deadline: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._look: asyncio.TimerHandle | None = None
        self._refused_bytes = 0

    # The signature is uvicorn's own.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that `pause_writing` is called whenever bytes are left
        self.app_state = {"cut": transport.abort}
        self._set_deadline()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._set_deadline()
        # uvicorn stops reading when more bytes arrive after a request that is being answered. It could then not notice
        # that the client has left.
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
        """Returns whether to keep the connection: a client may send no more and still wait for its response.

        A client that has left looks the same until something is sent to it, which its machine then rejects."""
        if (
            not self._response_pending or self.scope["http_version"] != "1.1"
        ):  # older clients do not know `100 Continue`
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
        if self._look is not None and not self._response_pending:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "this is not a valid HTTP/1.1 request"))

    # Receiving from the client

    @property
    def _response_pending(self) -> bool:
        """Whether a complete request has not been answered completely."""
        whole = self.conn.their_state in (h11.DONE, h11.MUST_CLOSE)
        return whole and self.cycle is not None and not self.cycle.response_complete

    def _set_deadline(self) -> None:
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):  # the request is complete
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None
        elif self._deadline is None:
            late = ApiError(408, f"the request was not complete after {self._patience:g} s")
            self._deadline = self.loop.call_later(self._patience, self._refuse, late)

    def _refuse(self, error: ApiError) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not self.transport.is_closing():
            self.transport.write(error.response())
        self.transport.close()

    def _look_again(self) -> None:
        """Polls for a socket error, as asyncio watches no connection that it neither reads nor writes."""
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self._look = self.loop.call_later(LOOK_SECONDS, self._look_again)

    # Sending to the client

    def pause_writing(self) -> None:
        """Called when the kernel's send buffer is full, as the client does not receive. Nothing more is written until
        it drains."""
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
