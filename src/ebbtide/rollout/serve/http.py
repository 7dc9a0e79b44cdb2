"""The HTTP server in a thread of its own, beside the one that owns the engine."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ebbtide.errors import UserError
from ebbtide.rollout.serve.ask import Served
from ebbtide.rollout.serve.desk import Desk

BACKLOG = 1024  # connections that wait to be taken: of more, clients ask again a second later
PATIENCE = 30.0  # seconds for a request to arrive, and for a client to take something of its answer


def listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:
        raise UserError(f"cannot listen at {host}, port {port}: {error}. Choose another, or end what uses it") from None


def url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


@contextmanager
def answering(
    desk: Desk, served: Served, listening: socket.socket, *, key: str | None, max_body: int, patience: float = PATIENCE
) -> Iterator[None]:
    """Requests reach the desk; at the end those that are left are refused."""
    import uvicorn

    from ebbtide.rollout.serve.app import Api
    from ebbtide.rollout.serve.door import Server, most_connections

    api = Api(desk, served, key=key, max_body=max_body)
    settings = uvicorn.Config(
        api.app,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # what clients do wrong is told to them alone
        access_log=False,
        server_header=False,
    )
    server = Server(settings, desk, most=most_connections(served.limits.samples), patience=patience)
    ready = threading.Event()

    async def serve() -> None:
        desk.loop = asyncio.get_running_loop()
        ready.set()
        await server.serve(sockets=[listening])

    def run() -> None:
        try:
            asyncio.run(serve())
        finally:
            desk.lose()
            ready.set()

    thread = threading.Thread(target=run, name="http", daemon=True)
    thread.start()
    ready.wait()
    why = 503, "the server has stopped"
    try:
        yield
    except Exception:
        why = 500, "the engine failed; the server's own output says why"
        raise
    finally:
        desk.call(desk.close, *why)
        server.should_exit = True
        thread.join()
        api.close()
