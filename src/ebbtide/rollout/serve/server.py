"""Accepts the connections of the HTTP server: how many there may be, how one too many is refused, how the last ones
end."""

from __future__ import annotations

import asyncio
import resource
import socket
from contextlib import suppress

import uvicorn

from ebbtide.rollout.serve.connection import Connection
from ebbtide.rollout.serve.error import ApiError
from ebbtide.rollout.serve.queue import RequestQueue

# Connections beyond those whose requests fill the queue, for health checks and for being told that the queue is full.
EXTRA_CONNECTIONS = 128
LAST_SECONDS = 1.0  # for the last responses to be sent when no more time is left
PAUSE_SECONDS = 0.1  # until the next try, when a connection could not be accepted
# Bytes. The kernel's default may be megabytes, from which a client could read for minutes before its connection drains.
SEND_BUFFER = 65_536
# How a dead client machine is detected: a probe after so many idle seconds, then every so many seconds, until so many
# probes are unanswered.
KEEPALIVE = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))


def max_connections(queue: int) -> int:
    """The most connections: one for each sample that may wait, if that is at most half of the process's limit on open
    files (the other half is for everything else). The limit is raised for it as far as the system allows."""
    wanted = queue + EXTRA_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = 2 * wanted if hard == resource.RLIM_INFINITY else min(2 * wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < files:
        with suppress(OSError, ValueError):  # some systems allow less than they report
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if soft == resource.RLIM_INFINITY else min(wanted, soft // 2)


class HttpServer(uvicorn.Server):
    """uvicorn's server with its own accept loop and shutdown.

    uvicorn itself accepts every connection, whatever that costs the process, and its shutdown waits for clients that
    may never receive their responses."""

    def __init__(self, config: uvicorn.Config, queue: RequestQueue, *, most: int, patience: float) -> None:
        super().__init__(config)
        self._queue, self._most, self._patience = queue, most, patience

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None
        self._accepting = asyncio.create_task(self._accept(sockets[0]))
        self._accepting.add_done_callback(self._ended)
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._accepting.cancel()
        with suppress(asyncio.CancelledError):
            await self._accepting
        for one in sockets or ():
            one.close()
        connections, tasks = self.server_state.connections, self.server_state.tasks
        for connection in list(connections):
            connection.shutdown()
        loop = asyncio.get_running_loop()
        last = loop.time() + LAST_SECONDS
        while connections and (self._queue.seconds_left > 0.0 or loop.time() < last):
            await asyncio.sleep(0.02)
        for connection in list(connections):
            connection.transport.abort()
        if tasks:
            await asyncio.wait(list(tasks))

    def _ended(self, _: asyncio.Task[None]) -> None:
        self.should_exit = True

    async def _accept(self, listening: socket.socket) -> None:
        """Accepts one connection at a time, so that there are never more than allowed."""
        loop = asyncio.get_running_loop()
        listening.setblocking(False)
        full = ApiError(503, f"{self._most} connections are open, which is the limit: try again later").response()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listening)
            except OSError:  # it was closed meanwhile, or the process has no file descriptor left
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            if len(self.server_state.connections) < self._most:
                _prepare(accepted)
                await loop.connect_accepted_socket(self._connection, accepted)
            else:
                with accepted, suppress(OSError):
                    accepted.send(full)
                    accepted.recv(65_536)  # closing with unread bytes would discard the response at some clients
                await asyncio.sleep(0)

    def _connection(self) -> Connection:
        return Connection(self.config, self.server_state, {}, patience=self._patience)


def _prepare(accepted: socket.socket) -> None:
    with suppress(OSError):  # the client may have left already
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE:
            if hasattr(socket, name):
                accepted.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
