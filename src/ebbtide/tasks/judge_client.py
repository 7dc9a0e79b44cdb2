"""Asks one judge at an OpenAI-compatible URL: many requests in flight, each under a time limit, repeated where that
may help, and remembered."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

import httpx

from ebbtide.config.rewards import JudgeConfig
from ebbtide.system.printable import printable
from ebbtide.system.units import ceil_div
from ebbtide.tasks.judgement import read_api_key
from ebbtide.tasks.score_message import ScoreResult, failed_score

MAX_BYTES = 1 << 20  # Of a response.
MAX_ANSWER = 20_000  # Characters of an answer; scores are at its end, so that is what is kept.
FIRST_DELAY, MAX_DELAY = 0.5, 30.0  # Seconds before a request is repeated; doubled each time.
REPEATED = (408, 409, 425, 429)  # Statuses after which a request is repeated, beside those from 500 on.
SHOWN = 200  # Characters of a response in an error message.

Sleep = Callable[[float], Awaitable[None]]


class _RequestError(Exception):
    """A request had no answer."""

    def __init__(self, kind: Literal["judge_timeout", "judge_error"], why: str, *, repeat: bool = True) -> None:
        super().__init__(why)
        self.kind, self.repeat, self.delay = kind, repeat, 0.0


class JudgeClient:
    """Asks one judge. All of it runs in one event loop."""

    def __init__(self, config: JudgeConfig, key: str, *, ranks: int = 1, sleep: Sleep = asyncio.sleep) -> None:
        """`key`: where it is configured, for error messages. `ranks`: those that share `concurrency`. `sleep`: how it
        waits before it repeats a request."""
        self._config, self._called, self._sleep = config, f"`{key}.url: {config.url}`", sleep
        self._secret = read_api_key(config, key)
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self._secret is not None:
            self._headers["Authorization"] = f"Bearer {self._secret}"
        end = "/chat/completions"
        self._url = config.url.rstrip("/").removesuffix(end) + end
        self._slots = asyncio.Semaphore(ceil_div(config.concurrency, ranks))
        self._certificates = httpx.create_ssl_context()
        # A client for each connection: one with a pool of 64 takes 5 to 10 times as long for 1,000 requests.
        self._clients: list[httpx.AsyncClient] = []
        self._free: list[httpx.AsyncClient] = []
        # By digests of the requests, which are as long as completions.
        self._cache: OrderedDict[bytes, str] = OrderedDict()
        self._requests = self._cached = self._retries = 0
        self._seconds: list[float] = []

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()

    def drain(self) -> dict[str, float]:
        """The figures since the last call."""
        found = {"requests": self._requests, "cached": self._cached, "retries": self._retries}
        figures = {name: float(value) for name, value in found.items()}
        if self._seconds:
            figures["seconds"] = sum(self._seconds) / len(self._seconds)
        self._requests = self._cached = self._retries = 0
        self._seconds = []
        return figures

    async def ask(
        self, chats: Sequence[list[dict[str, str]]], done: Callable[[], None] = lambda: None
    ) -> list[str | ScoreResult]:
        """The answer to each chat, or a failure. `done` is called after each of them."""
        bodies = [self._body(messages) for messages in chats]
        results: list[str | ScoreResult | None] = [None] * len(bodies)
        waiting: dict[object, list[int]] = {}
        for place, body in enumerate(bodies):
            if (known := self._known(body)) is not None:
                results[place] = known
                done()
            else:  # The same request is asked once, unless nothing is to be remembered.
                waiting.setdefault(body if self._config.cache_size else place, []).append(place)
        self._cached += len(bodies) - len(waiting)
        tasks = {asyncio.create_task(self._answer(bodies[places[0]])): places for places in waiting.values()}

        def record(task: asyncio.Task[str | ScoreResult]) -> None:
            for place in tasks[task]:
                if not task.cancelled() and task.exception() is None:
                    results[place] = task.result()
                done()

        for task in tasks:
            task.add_done_callback(record)
        try:
            if tasks:
                await asyncio.wait(tasks, timeout=self._config.step_timeout_s)
        finally:
            late = [task for task in tasks if not task.done()]
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        for task in tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error
        limit = f"{self._called} had no time for it within {self._config.step_timeout_s:g} s (`step_timeout_s`)"
        return [failed_score("judge_timeout", limit) if one is None else one for one in results]

    def _body(self, messages: list[dict[str, str]]) -> bytes:
        # Escaped, so that half a character in a completion does not matter.
        return json.dumps({"model": self._config.model, "messages": messages, **self._config.options}).encode()

    def _known(self, body: bytes) -> str | None:
        if (digest := _digest(body)) in self._cache:
            self._cache.move_to_end(digest)
        return self._cache.get(digest)

    async def _answer(self, body: bytes) -> str | ScoreResult:
        """The answer to a request, tried as often as configured."""
        async with self._slots:
            for attempt in range(self._config.retries + 1):
                try:
                    started = time.perf_counter()
                    self._requests += 1
                    answer = await self._limited(body)
                    self._seconds.append(time.perf_counter() - started)
                    break
                except _RequestError as error:
                    if attempt == self._config.retries or not error.repeat:
                        return failed_score(error.kind, f"{self._called} {error}")
                    delay = max(FIRST_DELAY * 2**attempt, error.delay)
                self._retries += 1
                await self._sleep(min(delay, MAX_DELAY))
        if self._config.cache_size:
            self._cache[_digest(body)] = answer
            if len(self._cache) > self._config.cache_size:
                self._cache.popitem(last=False)
        return answer

    async def _limited(self, body: bytes) -> str:
        try:
            async with asyncio.timeout(self._config.timeout_s):
                return await self._post(body)
        except TimeoutError:
            raise _RequestError("judge_timeout", f"did not answer within {self._config.timeout_s:g} s") from None
        except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL, OSError) as error:
            raise _RequestError("judge_error", f"cannot be asked: {type(error).__name__}: {error}") from None

    async def _post(self, body: bytes) -> str:
        data = bytearray()
        async with self._connection() as client, client.stream("POST", self._url, content=body) as response:
            async for part in response.aiter_raw():
                data += part
                if len(data) > MAX_BYTES:
                    raise _RequestError("judge_error", f"answered with more than {MAX_BYTES:,} bytes", repeat=False)
        if response.status_code != 200:
            shown = self._shown(data)
            repeat = response.status_code in REPEATED or response.status_code >= 500
            failed = _RequestError(
                "judge_error", f"answered with status {response.status_code}: {shown}", repeat=repeat
            )
            failed.delay = _retry_after(response.headers.get("Retry-After", ""))
            raise failed
        if (text := _content(data)) is None:
            raise _RequestError(
                "judge_error", f"answered with something that is no chat completion: {self._shown(data)}"
            )
        return self._without_secret(text)[-MAX_ANSWER:]

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[httpx.AsyncClient]:
        """A client that no other request uses."""
        if not self._free:
            # The time limit is of the whole request; httpx has one for each of its reads only.
            made = httpx.AsyncClient(headers=self._headers, verify=self._certificates, timeout=None)  # noqa: S113
            self._clients.append(made)
            self._free.append(made)
        client = self._free.pop()
        try:
            yield client
        finally:
            self._free.append(client)

    def _shown(self, data: bytearray) -> str:
        return printable(self._without_secret(data.decode(errors="replace")), SHOWN)

    def _without_secret(self, text: str) -> str:
        """A server may repeat what it was sent."""
        return text.replace(self._secret, "***") if self._secret else text


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()


def _content(data: bytes | bytearray) -> str | None:
    """The text of a chat completion; None if it is none."""
    found: Any
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    match found:
        case {"choices": [{"message": {"content": str(text)}}, *_]}:
            return text
    return None


def _retry_after(text: str) -> float:
    """The seconds that a server asks to wait; 0 if it names none."""
    return min(MAX_DELAY, float(text)) if text.isascii() and text.isdigit() and len(text) < 10 else 0.0
