"""The HTTP API: routes, the key, bodies, and answers that end when their client is gone."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ebbtide.hosts import OWN, is_own
from ebbtide.rollout.serve.answer import Answer, Said
from ebbtide.rollout.serve.ask import Served, asked_of, encoded, job_of
from ebbtide.rollout.serve.body import ChatBody, CompletionBody, check_name, parsed
from ebbtide.rollout.serve.desk import Desk, Job, Piece
from ebbtide.rollout.serve.error import ApiError

GONE = 499  # a status that nobody sees: nginx's for a client that is gone


class Api:
    def __init__(self, desk: Desk, served: Served, *, key: str | None, max_body: int) -> None:
        self._desk, self._served, self._max_body = desk, served, max_body
        self._key = None if key is None else key.encode()
        self._since = int(time.time())
        self._encoder = ThreadPoolExecutor(1, "encode")  # a long prompt must not hold up those that are being answered
        self.app = Starlette(
            routes=[
                Route("/health", self.health),
                Route("/v1/models", self.models),
                Route("/v1/models/{name:path}", self.model),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
            ],
            exception_handlers={ApiError: _refused, HTTPException: _http_error, ClientDisconnect: _gone, 500: _failed},
        )

    def close(self) -> None:
        self._encoder.shutdown()

    async def health(self, _: Request) -> Response:
        if (closed := self._desk.closed) is not None:
            raise closed
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> Response:
        self._admit(request)
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._admit(request)
        check_name(request.path_params["name"], self._served.name)
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._served.name,
            "object": "model",
            "created": self._since,
            "owned_by": "ebbtide",
            "max_model_len": self._served.limits.together,
        }

    async def completions(self, request: Request) -> Reply:
        return await self._reply(request, CompletionBody)

    async def chat(self, request: Request) -> Reply:
        return await self._reply(request, ChatBody)

    async def _reply(self, request: Request, kind: type[CompletionBody] | type[ChatBody]) -> Reply:
        self._admit(request)
        body = parsed(kind, await self._read(request), self._served.name)
        return Reply(self._desk, self._served, body, self._encoder)

    def _admit(self, request: Request) -> None:
        if self._key is None:
            if (request.scope.get("server") or ("",))[0] in OWN and not is_own(request.headers.get("host", "")):
                raise ApiError(403, "ask for 127.0.0.1 or localhost, or have the server started with a key")
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("latin-1"), self._key):
            raise ApiError(401, "the API key is missing or wrong: send it as `Authorization: Bearer KEY`", code="invalid_api_key")

    async def _read(self, request: Request) -> bytes:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "the body must be JSON: send it with `Content-Type: application/json`")  # which a foreign web page may not
        too_large = ApiError(413, f"the body has more than {self._max_body} bytes")
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._max_body:
            raise too_large
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self._max_body:
                raise too_large
        return bytes(body)


class Reply:
    """The answer to a request, sent as it comes or whole. When the client is gone, all that is done for it ends."""

    def __init__(self, desk: Desk, served: Served, body: CompletionBody | ChatBody, encoder: Executor) -> None:
        self._desk, self._served, self._body, self._encoder = desk, served, body, encoder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work, gone = asyncio.create_task(self._work(scope, send)), asyncio.create_task(_gone_client(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            work.cancel()
            await asyncio.wait((work,))
        if not work.cancelled():
            work.result()  # what was refused is answered by the app

    async def _work(self, scope: Scope, send: Send) -> None:
        self._job = await self._encoded(scope["state"]["cut"])
        self._answer = Answer(self._body, self._job, self._served)
        self._desk.submit(self._job)
        try:
            first = await self._next()  # before the status is sent: it may be that there will be no answer
            if self._body.stream:
                await self._send_stream(first, send)
            else:
                await self._send_whole(first, send)
        finally:
            self._desk.withdraw(self._job)

    async def _encoded(self, cut: Callable[[], None]) -> Job:
        """One prompt at a time: those of other requests come between them."""
        loop, served = asyncio.get_running_loop(), self._served
        prompts = [await loop.run_in_executor(self._encoder, encoded, asked, served) for asked in asked_of(self._body, served)]
        return job_of(self._body, prompts, served, cut)

    async def _next(self) -> Said:
        event = await self._job.events.get()
        if isinstance(event, Piece):
            return self._answer.take(event)
        raise event

    async def _whole(self, first: Said) -> dict[str, Any]:
        samples = [Said(index) for index in range(self._answer.samples)]
        samples[first.index] += first
        while not self._answer.done:
            said = await self._next()
            samples[said.index] += said
        for said in samples:
            said.offsets = [min(offset, len(said.text)) for offset in said.offsets]
        return self._answer.whole(samples)

    async def _send_whole(self, first: Said, send: Send) -> None:
        answer = JSONResponse(await self._whole(first))
        await send({"type": "http.response.start", "status": 200, "headers": answer.raw_headers})
        await send({"type": "http.response.body", "body": answer.body, "more_body": True})
        # This waits until the client has taken it all: till then it is kept in memory.
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_stream(self, said: Said, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def event(data: str, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": more})

        try:
            while True:
                if (chunk := self._answer.chunk(said)) is not None:
                    await event(json.dumps(chunk))
                if self._answer.done:
                    break
                said = await self._next()
        except ApiError as refused:
            await event(json.dumps(refused.body()), more=False)
            return
        if self._answer.tells_usage:
            await event(json.dumps(self._answer.last_chunk()))
        await event("[DONE]", more=False)


async def _gone_client(receive: Receive) -> None:
    """Ends when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    headers = {401: {"www-authenticate": "Bearer"}, 429: {"retry-after": "1"}}.get(error.status)
    return JSONResponse(error.body(), error.status, headers=headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = {404: f"there is no {request.url.path} here", 405: f"{request.url.path} does not take {request.method}"}
    return JSONResponse(ApiError(error.status_code, what.get(error.status_code, error.detail)).body(), error.status_code, error.headers)


async def _gone(_: Request, error: Exception) -> Response:
    return Response(status_code=GONE)


async def _failed(_: Request, error: Exception) -> Response:
    return JSONResponse(ApiError(500, "the server failed at this request; its own output says why").body(), 500)
