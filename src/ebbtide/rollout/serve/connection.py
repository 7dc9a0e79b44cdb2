"""A connection of the HTTP server: it is cut where a request is not whole in time, and it is known when its client has left."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ebbtide.rollout.serve.error import ApiError

MOST = 65_536  # bytes of further requests that may wait behind one that is being answered


class Connection(H11Protocol):
    def __init__(self, *arguments: Any, seconds: float, **options: Any) -> None:
        """A request has so many seconds to arrive, from its first byte, or from the connection's beginning, to its last."""
        super().__init__(*arguments, **options)
        self._seconds = seconds
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's own signature
        super().connection_made(transport)
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

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_deadline()

    def _set_deadline(self) -> None:
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):  # the request is whole
            self._unset_deadline()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self._seconds, self._cut)

    def _unset_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _cut(self) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not self.transport.is_closing():
            body = json.dumps(ApiError(408, f"the request was not whole after {self._seconds:g} s").body()).encode()
            headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
            response = h11.Response(status_code=408, headers=headers, reason=b"Request Timeout")
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
