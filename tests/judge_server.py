"""A judge on this machine: an OpenAI-compatible server that answers as a test says, and counts."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

Reply = tuple[int, bytes] | str | None
"""A status and a body, the text of a chat completion, or None: no answer at all."""


class JudgeServer:
    """What was asked, and by how many at once."""

    def __init__(self, reply: Callable[[int, dict[str, Any]], Reply | Awaitable[Reply]]) -> None:
        self._reply = reply
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.inside = self.most_inside = 0
        self.url = ""

    def asked(self) -> list[str]:
        return [request["messages"][-1]["content"] for request in self.requests]

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().strip().split("\r\n")
                headers = {name.title(): value for name, value in (line.split(": ", 1) for line in lines)}
                request = json.loads(await reader.readexactly(int(headers["Content-Length"])))
                number = len(self.requests)
                self.requests.append({"path": first.split()[1], **request})
                self.headers.append(headers)
                self.inside += 1
                self.most_inside = max(self.most_inside, self.inside)
                found = self._reply(number, request)
                status_and_body = await found if isinstance(found, Awaitable) else found
                if status_and_body is None:
                    await asyncio.Event().wait()
                self.inside -= 1
                if isinstance(status_and_body, str):
                    status_and_body = 200, completion(status_and_body)
                status, body = status_and_body
                start = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\nRetry-After: 7\r\n\r\n"
                writer.write(start.encode() + body)
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.CancelledError, OSError):
            writer.close()  # who asked has gone, or the test is over


def completion(text: str) -> bytes:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()


@contextmanager
def judge_server(reply: Callable[[int, dict[str, Any]], Reply | Awaitable[Reply]]) -> Iterator[JudgeServer]:
    """`reply(number, request)` says what becomes of each request."""
    state, loop = JudgeServer(reply), asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(state.connected, "127.0.0.1", 0, backlog=256))
    state.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def close() -> None:
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    try:
        yield state
    finally:
        asyncio.run_coroutine_threadsafe(close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
