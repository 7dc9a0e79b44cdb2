"""The HTTP API: routes, the API key, request bodies, and responses that end when their client disconnects."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ebbtide.rollout.serve.error import ApiError
from ebbtide.rollout.serve.generate_response import GenerateResponseBuilder
from ebbtide.rollout.serve.queue import QueuedRequest, RequestQueue, TokenEvent
from ebbtide.rollout.serve.response import ResponseBuilder, SampleDelta
from ebbtide.rollout.serve.schema import AnyBody, B, ChatBody, CompletionBody, GenerateBody, check_name, parse_body
from ebbtide.rollout.serve.to_request import ServedModel, build_queued_request, encode_prompt, parse_prompts
from ebbtide.system.hosts import LOOPBACK, is_loopback

GONE = 499  # nginx's status for a client that has disconnected; nobody sees it


class Api:
    """The routes, as a Starlette app."""

    def __init__(self, queue: RequestQueue, models: Sequence[ServedModel], *, key: str | None, max_body: int) -> None:
        """A request that names no model is for the first of `models`."""
        self._queue, self._max_body = queue, max_body
        self._base, self._models = models[0].name, {one.name: one for one in models}
        self._key = None if key is None else key.encode()
        self._since = int(time.time())
        self._encoder = ThreadPoolExecutor(1, "encode")  # a long prompt must not hold up the responses of others
        self.app = Starlette(
            routes=[
                Route("/health", self.health),
                Route("/v1/models", self.models),
                Route("/v1/models/{name:path}", self.model),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/inference/v1/generate", self.generate, methods=["POST"]),
            ],
            exception_handlers={ApiError: _refused, HTTPException: _http_error, ClientDisconnect: _gone, 500: _failed},
        )

    def close(self) -> None:
        self._encoder.shutdown()

    async def health(self, _: Request) -> Response:
        if (closed := self._queue.closed_error) is not None:
            raise closed
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> Response:
        self._admit(request)
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self._models]})

    async def model(self, request: Request) -> Response:
        self._admit(request)
        name = request.path_params["name"]
        check_name(name, [*self._models])
        return JSONResponse(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._since,
            "owned_by": "ebbtide",
            "max_model_len": self._models[name].limits.total,
            **({} if name == self._base else {"parent": self._base}),  # as in vLLM
        }

    async def completions(self, request: Request) -> Reply:
        return await self._reply(request, CompletionBody)

    async def chat(self, request: Request) -> Reply:
        return await self._reply(request, ChatBody)

    async def generate(self, request: Request) -> Reply:
        return await self._reply(request, GenerateBody)

    async def _reply(self, request: Request, kind: type[B]) -> Reply:
        self._admit(request)
        body = parse_body(kind, await self._read(request), [*self._models])
        served = self._models[self._base if body.model is None else body.model]
        return Reply(self._queue, served, body, self._encoder)

    def _admit(self, request: Request) -> None:
        if self._key is None:
            if (request.scope.get("server") or ("",))[0] in LOOPBACK and not is_loopback(
                request.headers.get("host", "")
            ):
                raise ApiError(403, "use 127.0.0.1 or localhost as the host name, or start the server with an API key")
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("latin-1"), self._key):
            raise ApiError(
                401, "the API key is missing or wrong: send it as `Authorization: Bearer KEY`", code="invalid_api_key"
            )

    async def _read(self, request: Request) -> bytes:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            # A web page of another site cannot send this type without a CORS preflight, which is not answered here.
            raise ApiError(415, "the body must be JSON: send it with `Content-Type: application/json`")
        too_large = ApiError(413, f"the body is larger than the limit of {self._max_body} bytes")
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
    """The response to a request, streamed or whole. When the client disconnects, all work for it ends."""

    def __init__(self, queue: RequestQueue, served: ServedModel, body: AnyBody, encoder: Executor) -> None:
        self._queue, self._served, self._body, self._encoder = queue, served, body, encoder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response, gone = asyncio.create_task(self._respond(scope, send)), asyncio.create_task(_gone_client(receive))
        try:
            await asyncio.wait((response, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            response.cancel()
            await asyncio.wait((response,))
        if not response.cancelled():
            response.result()  # raises an ApiError, to which the app responds

    async def _respond(self, scope: Scope, send: Send) -> None:
        self._request = await self._encoded(scope["state"]["cut"])
        self._answer = (
            GenerateResponseBuilder(self._body, self._request)
            if isinstance(self._body, GenerateBody)
            else ResponseBuilder(self._body, self._request, self._served)
        )
        self._queue.submit(self._request)
        try:
            first = await self._next()  # before the status is sent, as the request may still fail
            if isinstance(self._answer, ResponseBuilder) and self._answer.is_streamed:
                await self._send_stream(self._answer, first, send)
            else:
                await self._send_whole(first, send)
        finally:
            self._queue.withdraw(self._request)

    async def _encoded(self, cut: Callable[[], None]) -> QueuedRequest:
        """Encodes one prompt at a time, so that the prompts of other requests get their turn in between."""
        loop, served = asyncio.get_running_loop(), self._served.for_body(self._body)
        prompts = [
            await loop.run_in_executor(self._encoder, encode_prompt, prompt, served)
            for prompt in parse_prompts(self._body, served)
        ]
        return build_queued_request(self._body, prompts, served, cut)

    async def _next(self) -> SampleDelta:
        event = await self._request.events.get()
        if isinstance(event, TokenEvent):
            return self._answer.add_event(event)
        raise event

    async def _whole(self, first: SampleDelta) -> dict[str, Any]:
        samples = [SampleDelta(index) for index in range(self._answer.samples)]
        samples[first.index] += first
        while not self._answer.done:
            delta = await self._next()
            samples[delta.index] += delta
        for delta in samples:
            delta.offsets = [min(offset, len(delta.text)) for offset in delta.offsets]
        return self._answer.build_response(samples)

    async def _send_whole(self, first: SampleDelta, send: Send) -> None:
        answer = JSONResponse(await self._whole(first))
        await send({"type": "http.response.start", "status": 200, "headers": answer.raw_headers})
        await send({"type": "http.response.body", "body": answer.body, "more_body": True})
        # This waits until the client has received all of it, which stays in memory until then.
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_stream(self, answer: ResponseBuilder, delta: SampleDelta, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def event(data: str, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": more})

        try:
            while True:
                if (chunk := answer.build_chunk(delta)) is not None:
                    await event(json.dumps(chunk))
                if answer.done:
                    break
                delta = await self._next()
        except ApiError as refused:
            await event(json.dumps(refused.body()), more=False)
            return
        if answer.includes_usage:
            await event(json.dumps(answer.build_usage_chunk()))
        await event("[DONE]", more=False)


async def _gone_client(receive: Receive) -> None:
    """Returns when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    headers = {401: {"www-authenticate": "Bearer"}, 429: {"retry-after": "1"}}.get(error.status)
    return JSONResponse(error.body(), error.status, headers=headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = {404: f"there is no {request.url.path} here", 405: f"{request.url.path} does not support {request.method}"}
    return JSONResponse(
        ApiError(error.status_code, what.get(error.status_code, error.detail)).body(), error.status_code, error.headers
    )


async def _gone(_: Request, error: Exception) -> Response:
    return Response(status_code=GONE)


async def _failed(_: Request, error: Exception) -> Response:
    return JSONResponse(ApiError(500, "the server failed on this request; see the server's output").body(), 500)
