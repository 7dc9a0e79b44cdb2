"""Serves the live page to this machine only. There are two paths, and nothing else of a request is used."""

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
from ebbtide.report.page.build import build_data, build_page, read_plotly_js
from ebbtide.report.page.run import PageRun, open_runs
from ebbtide.system.hosts import is_loopback

MOST = 16  # concurrent connections; a browser opens six
SECONDS = 30.0  # for a client to send its request, and to receive its response
FULL = b"HTTP/1.0 503 Service Unavailable\r\nContent-Type: text/plain\r\n\r\nthere are too many connections\n"


class _Server(ThreadingHTTPServer):
    """A server with a limited number of connections: each has a thread and a copy of the page, and a run on this
    machine needs the memory."""

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
        if not isinstance(sys.exc_info()[1], ConnectionError):  # the page was closed meanwhile
            super().handle_error(request, client_address)


class _CachedRuns:
    """The runs, read for one request at a time. The data is cached until a file changes."""

    def __init__(self, runs: Sequence[PageRun]) -> None:
        self._runs, self._lock = runs, threading.Lock()
        self._tag, self._data = "", b""

    def page(self) -> bytes:
        with self._lock:
            return build_page(self._runs, served=True)

    def data(self, known: str | None) -> tuple[str, bytes | None]:
        """Returns (ETag, data); the data is None if the client has it already (`known` is its ETag)."""
        with self._lock:
            tag = '"' + hashlib.sha256(repr([run.version for run in self._runs]).encode()).hexdigest()[:24] + '"'
            if tag == known:
                return tag, None
            if tag != self._tag:
                self._tag, self._data = tag, build_data(self._runs, served=True)
            return tag, self._data


def build_server(folders: Sequence[Path], port: int) -> ThreadingHTTPServer:
    """A server at the loopback address; port 0 picks a free one."""
    read_plotly_js()  # raises if plotly is not installed
    served = _CachedRuns(open_runs(folders))

    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "ebbtide", ""
        timeout = SECONDS

        def do_GET(self) -> None:
            if not is_loopback(self.headers.get("Host", "")):
                return self._respond(
                    HTTPStatus.FORBIDDEN, "text/plain", b"use 127.0.0.1 or localhost as the host name\n"
                )
            if self.path == "/":
                return self._respond(HTTPStatus.OK, "text/html; charset=utf-8", served.page())
            if self.path == "/data.json":
                tag, body = served.data(self.headers.get("If-None-Match"))
                status = HTTPStatus.OK if body is not None else HTTPStatus.NOT_MODIFIED
                return self._respond(status, "application/json", body or b"", tag)
            return self._respond(HTTPStatus.NOT_FOUND, "text/plain", b"not found: the paths are / and /data.json\n")

        do_HEAD = do_GET  # noqa: N815

        def _respond(self, status: HTTPStatus, kind: str, body: bytes, tag: str | None = None) -> None:
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
            """Logs nothing: one line per request would be too many."""

    try:
        return _Server(("127.0.0.1", port), Handler)
    except OSError as error:
        raise UserError(
            f"port {port} of 127.0.0.1 cannot be used: {error.strerror}. Choose another with --port; 0 picks a free one"
        ) from None


def serve(folders: Sequence[Path], port: int, say: Callable[[str], None]) -> None:
    """Serves the page until Ctrl-C."""
    with build_server(folders, port) as running:
        try:
            say(
                f"serving {', '.join(map(str, folders))} live at http://127.0.0.1:{running.server_address[1]}/;"
                " Ctrl-C stops it"
            )
            running.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            say("stopped")
