"""The tools of an MCP server: `{object: mcp, options: {command: [python, server.py]}}`, which starts a server for each
episode, or `{url: "http://127.0.0.1:8000/mcp"}` for one that runs. It gives no reward: the task's scorer scores the
last turn of an episode."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from ebbtide.errors import UserError

try:
    import mcp
except ImportError:
    raise UserError("`task.environment.object: mcp` needs the package mcp: pip install 'ebbtide[mcp]'") from None


class McpTools:
    """A client of the server, in a thread: its connection must be opened and closed by one task."""

    def __init__(self, command: list[str] | None = None, url: str | None = None) -> None:
        if (command is None) == (url is None):
            raise UserError("`task.environment.options` for `mcp` are either `command` or `url`")
        self._server = url if command is None else mcp.StdioServerParameters(command=command[0], args=command[1:])
        self._connected: Future[list[Any]] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._connect()), daemon=True)
        self._thread.start()
        self.tools = {tool.name: _Tool(tool, self._call) for tool in self._connected.result()}

    async def _connect(self) -> None:
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with mcp.Client(self._server) as self._client:
                self._connected.set_result((await self._client.list_tools()).tools)
                await self._closing.wait()
        except Exception as error:  # noqa: BLE001 (foreign code: the main thread raises it)
            if not self._connected.done():
                self._connected.set_exception(error)

    def _call(self, name: str, arguments: dict[str, Any]) -> str:
        called = asyncio.run_coroutine_threadsafe(self._client.call_tool(name, arguments), self._loop)
        result: Any = called.result()
        text = "\n".join(block.text for block in result.content if hasattr(block, "text"))
        if result.is_error:
            raise RuntimeError(text)
        return text

    def close(self) -> None:
        with suppress(RuntimeError):  # The server has died, and the loop has ended with it.
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()


class _Tool:
    """A tool of the server, with the schema that the server gives it."""

    def __init__(self, tool: Any, call: Callable[[str, dict[str, Any]], str]) -> None:
        self._name, self._call = tool.name, call
        function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
        self.schema = {"type": "function", "function": function}

    def __call__(self, **arguments: Any) -> str:
        return self._call(self._name, arguments)


make = McpTools
