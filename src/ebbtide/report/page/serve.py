"""The page while its runs go on: a server for this machine alone. It answers two addresses and uses nothing of a request but which of them it is."""

from __future__ import annotations

import hashlib
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ebbtide.errors import UserError
from ebbtide.hosts import is_own
from ebbtide.report.page.build import charting, data, page
from ebbtide.report.page.run import Run, named

MOST = 16  # connections at once; a browser opens six
SECONDS = 30.0  # for a client to send its request, and to take its answer
FULL = b"HTTP/1.0 503 Service Unavailable\r\nContent-Type: text/plain\r\n\r\nthere are too many connections\n"


class _Server(ThreadingHTTPServer):
    """A connection has a thread and a copy of the page: there are only so many, beside a run that needs the memory."""

    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._free = threading.BoundedSemaphore(MOST)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            return super().process_request(request, client_address)
        with suppress(OSError):
            request.send(FULL, socket.MSG_DONTWAIT)
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a page that was closed meanwhile
            super().handle_error(request, client_address)


class _Served:
    """The runs, read for one request at a time; data that nothing has changed is kept."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs, self._lock = runs, threading.Lock()
        self._tag, self._data = "", b""

    def page(self) -> bytes:
        with self._lock:
            return page(self._runs, served=True)

    def data(self, known: str | None) -> tuple[str, bytes | None]:
        """(tag, data); None for data that has the tag which is known."""
        with self._lock:
            tag = '"' + hashlib.sha256(repr([run.version for run in self._runs]).encode()).hexdigest()[:24] + '"'
            if tag == known:
                return tag, None
            if tag != self._tag:
                self._tag, self._data = tag, data(self._runs, served=True)
            return tag, self._data


def server(folders: Sequence[Path], port: int) -> ThreadingHTTPServer:
    """Bound to the loopback address; port 0 takes a free one."""
    charting()  # says so where it is not installed
    served = _Served(named(folders))

    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "ebbtide", ""
        timeout = SECONDS

        def do_GET(self) -> None:
            if not is_own(self.headers.get("Host", "")):
                return self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"ask for 127.0.0.1 or localhost\n")
            if self.path == "/":
                return self._answer(HTTPStatus.OK, "text/html; charset=utf-8", served.page())
            if self.path == "/data.json":
                tag, body = served.data(self.headers.get("If-None-Match"))
                status = HTTPStatus.OK if body is not None else HTTPStatus.NOT_MODIFIED
                return self._answer(status, "application/json", body or b"", tag)
            return self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"there is / and /data.json\n")

        do_HEAD = do_GET  # noqa: N815

        def _answer(self, status: HTTPStatus, kind: str, body: bytes, tag: str | None = None) -> None:
            self.send_response(status)
            for name, value in (
                ("Content-Type", kind),
                ("Content-Length", str(len(body))),
                ("Cache-Control", "no-store"),
                ("X-Content-Type-Options", "nosniff"),
                ("Cross-Origin-Resource-Policy", "same-origin"),
                *([("ETag", tag)] if tag else []),
            ):
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """No line for every request."""

    try:
        return _Server(("127.0.0.1", port), Handler)
    except OSError as error:
        raise UserError(f"port {port} of 127.0.0.1 cannot be taken: {error.strerror}. Name another with --port, or 0 for any") from None


def serve(folders: Sequence[Path], port: int, say: Callable[[str], None]) -> None:
    """Until Ctrl-C."""
    with server(folders, port) as running:
        try:
            say(f"http://127.0.0.1:{running.server_address[1]}/ shows {', '.join(map(str, folders))} as it goes; Ctrl-C ends it")
            running.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            say("ended")
