"""The door of the HTTP server: how many connections there may be, what one too many is told, how the last ones end."""

from __future__ import annotations

import asyncio
import resource
import socket
from contextlib import suppress

import uvicorn

from ebbtide.rollout.serve.connection import Connection
from ebbtide.rollout.serve.desk import Desk
from ebbtide.rollout.serve.error import ApiError

SPARE = 128  # connections beside those whose requests fill the queue: to ask for its health, or be told that it is full
LAST_SECONDS = 1.0  # for the last answers to leave, where no more time is left
PAUSE_SECONDS = 0.1  # until the next try, when a connection could not be taken
# The kernel's own choice may be megabytes: a client could read for minutes before any more is taken of what is left.
SEND_BUFFER = 65_536  # bytes
# How it is found that the client's machine is gone: after so many seconds of silence, by a question every so many
# seconds, of which so many have no answer.
KEEPALIVE = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))


def most_connections(queue: int) -> int:
    """One for each sample that may wait, if they need no more than half of the files that the process may open: the
    other half is left to what else it does. That limit is raised for it, as far as the system lets it."""
    wanted = queue + SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = 2 * wanted if hard == resource.RLIM_INFINITY else min(2 * wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < files:
        with suppress(OSError, ValueError):  # some systems allow less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if soft == resource.RLIM_INFINITY else min(wanted, soft // 2)


class Server(uvicorn.Server):
    """uvicorn's, but for how connections begin and end.

    uvicorn's own takes every connection there is, whatever it costs the process, and at its end waits for clients that
    may never take their answers."""

    def __init__(self, config: uvicorn.Config, desk: Desk, *, most: int, patience: float) -> None:
        super().__init__(config)
        self._desk, self._most, self._patience = desk, most, patience

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None
        self._taking = asyncio.create_task(self._take(sockets[0]))
        self._taking.add_done_callback(self._ended)
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._taking.cancel()
        with suppress(asyncio.CancelledError):
            await self._taking
        for one in sockets or ():
            one.close()
        connections, tasks = self.server_state.connections, self.server_state.tasks
        for connection in list(connections):
            connection.shutdown()
        loop = asyncio.get_running_loop()
        last = loop.time() + LAST_SECONDS
        while connections and (self._desk.seconds_left > 0.0 or loop.time() < last):
            await asyncio.sleep(0.02)
        for connection in list(connections):
            connection.transport.abort()
        if tasks:
            await asyncio.wait(list(tasks))

    def _ended(self, _: asyncio.Task[None]) -> None:
        self.should_exit = True

    async def _take(self, listening: socket.socket) -> None:
        """One connection at a time, so that there are never more than there may be."""
        loop = asyncio.get_running_loop()
        listening.setblocking(False)
        full = ApiError(503, f"{self._most} connections are open, as many as there may be: try again later").response()
        while True:
            try:
                taken, _ = await loop.sock_accept(listening)
            except OSError:  # it was closed meanwhile, or the process has no file left for it
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            if len(self.server_state.connections) < self._most:
                _prepare(taken)
                await loop.connect_accepted_socket(self._connection, taken)
            else:
                with taken, suppress(OSError):
                    taken.send(full)
                    taken.recv(65_536)  # what is left unread when it is closed would take the answer from some clients
                await asyncio.sleep(0)

    def _connection(self) -> Connection:
        return Connection(self.config, self.server_state, {}, patience=self._patience)


def _prepare(taken: socket.socket) -> None:
    with suppress(OSError):  # the client may be gone already
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE:
            if hasattr(socket, name):
                taken.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
