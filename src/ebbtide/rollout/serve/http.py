"""Runs the HTTP server in a thread of its own, beside the one that owns the engine."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ebbtide.errors import UserError
from ebbtide.rollout.serve.queue import RequestQueue
from ebbtide.rollout.serve.to_request import ServedModel

BACKLOG = 1024  # connections that wait to be accepted; beyond it, clients retry after a second
PATIENCE = 30.0  # seconds for a request to arrive, and for a client to receive a part of its response


def listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:
        raise UserError(
            f"cannot listen at {host}, port {port}: {error}. Choose another host or port, or stop what uses it"
        ) from None


def server_url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


@contextmanager
def run_http_server(
    queue: RequestQueue,
    models: Sequence[ServedModel],
    listening: socket.socket,
    *,
    key: str | None,
    max_body: int,
    patience: float = PATIENCE,
) -> Iterator[None]:
    """Runs the HTTP server, which puts requests into the queue. On exit the remaining requests are refused. `models`:
    the model, and the same with each of its adapters by name."""
    import uvicorn

    from ebbtide.rollout.serve.app import Api
    from ebbtide.rollout.serve.server import HttpServer, max_connections

    api = Api(queue, models, key=key, max_body=max_body)
    settings = uvicorn.Config(
        api.app,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # errors of clients are reported to the clients only
        access_log=False,
        server_header=False,
    )
    server = HttpServer(settings, queue, most=max_connections(models[0].limits.samples), patience=patience)
    ready = threading.Event()

    async def serve() -> None:
        queue.loop = asyncio.get_running_loop()
        ready.set()
        await server.serve(sockets=[listening])

    def run() -> None:
        try:
            asyncio.run(serve())
        finally:
            queue.note_server_end()
            ready.set()

    thread = threading.Thread(target=run, name="http", daemon=True)
    thread.start()
    ready.wait()
    reason = 503, "the server has stopped"
    try:
        yield
    except Exception:
        reason = 500, "the engine failed; see the server's output"
        raise
    finally:
        queue.call_in_event_loop(queue.close, *reason)
        server.should_exit = True
        thread.join()
        api.close()
