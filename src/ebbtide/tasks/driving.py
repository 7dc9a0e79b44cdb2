"""Episodes that an environment drives: it asks the policy for turns by token ids, when and as often as it likes.

The policy is a function, and an HTTP endpoint of this process for programs that speak `/inference/v1/generate` (vLLM's,
which verifiers and others use). What is asked goes to the run, which samples it together with all other episodes.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import queue
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "policy"
"""The name of the model at the endpoint."""
MAX_BODY = 1 << 26  # Bytes of a request to the endpoint.


@dataclass(frozen=True)
class PolicyFacts:
    """What an environment that drives its episodes may know of the policy."""

    tokenizer: str = ""
    """A folder with the tokenizer, and its chat template."""
    max_model_len: int = 0
    """The most tokens of a sequence."""
    end_tokens: list[int] = field(default_factory=list)
    """Tokens that end a turn."""


NOTHING_KNOWN = PolicyFacts()


@dataclass(frozen=True)
class Asked:
    """A turn of the policy that an environment asks for."""

    tokens: list[int]
    """All that the policy is to have in its context."""
    max_tokens: int | None = None


@dataclass(frozen=True)
class Sampled:
    """A turn of the policy."""

    tokens: list[int]
    logprobs: list[float]
    finish: str
    """`stop`, or `length` if a limit has ended it."""


class PolicyError(Exception):
    """The policy cannot be asked for this, or not any more; the text says why."""


class Policy:
    """The policy, as an environment has it."""

    def __init__(self, facts: PolicyFacts) -> None:
        self.facts, self.model = facts, MODEL
        self.asks: queue.Queue[Asked | BaseException | None] = queue.Queue()
        """What the environment asks; what it raised, or None, when its episode is over."""
        self.answers: queue.Queue[Sampled | PolicyError] = queue.Queue()
        self._one_at_a_time = threading.Lock()

    def sample(self, token_ids: list[int], max_tokens: int | None = None) -> Sampled:
        """Samples a turn after these tokens, with the run's sampling parameters."""
        with self._one_at_a_time:
            self.asks.put(Asked([int(token) for token in token_ids], max_tokens))
            answer = self.answers.get()
        if isinstance(answer, PolicyError):
            raise answer
        return answer

    async def generate(self, token_ids: list[int], max_tokens: int | None = None) -> Sampled:
        """The same as `sample`, for asynchronous environments."""
        return await asyncio.to_thread(self.sample, token_ids, max_tokens)

    @cached_property
    def url(self) -> str:
        """The address of the endpoint, which answers `POST /inference/v1/generate` and `GET /v1/models`."""
        policy = self

        class Handler(_Endpoint):
            served = policy

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"


class _Endpoint(BaseHTTPRequestHandler):
    """Requests to the endpoint. Its program runs in the same process, so nobody else can be kept from it."""

    served: Policy
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path != "/v1/models":
            self._send(404, _error(f"there is no {self.path} here"))
            return
        card = {"id": MODEL, "object": "model", "max_model_len": self.served.facts.max_model_len}
        self._send(200, {"object": "list", "data": [card]})

    def do_POST(self) -> None:
        try:
            size = int(self.headers.get("Content-Length", "0"))
            body = json.loads(self.rfile.read(size)) if size <= MAX_BODY else None
            if self.path != "/inference/v1/generate":
                self._send(404, _error(f"there is no {self.path} here: POST /inference/v1/generate"))
                return
            self._send(200, _response(self.served.sample(*_asked(body, self.served.facts))))
        except (PolicyError, ValueError, TypeError) as error:
            self._send(400, _error(str(error)))

    def _send(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""


def _asked(body: Any, facts: PolicyFacts) -> tuple[list[int], int | None]:
    """(the token ids, the most new tokens) of a request; raises `PolicyError` if it asks for something else."""
    match body:
        case {"token_ids": list(tokens)} if tokens and all(type(token) is int and token >= 0 for token in tokens):
            given = body.get("sampling_params") or {}
        case _:
            raise PolicyError("`token_ids` must be a list of token ids")
    stops = set(given.get("stop_token_ids") or ()) - set(facts.end_tokens)
    if stops or given.get("stop"):
        raise PolicyError(
            f"a turn ends at the model's own end tokens {facts.end_tokens}: it cannot stop at"
            f" {sorted(stops) or given['stop']} as well"
        )
    if given.get("n", 1) != 1:
        raise PolicyError("`n` must be 1: ask once for each turn")
    most = given.get("max_tokens")
    if most is not None and (type(most) is not int or most < 1):
        raise PolicyError("`max_tokens` must be a positive integer")
    return tokens, most


def _response(sampled: Sampled) -> dict[str, Any]:
    found = zip(sampled.tokens, sampled.logprobs, strict=True)
    content = [{"token": f"token_id:{token}", "logprob": logprob} for token, logprob in found]
    choice = {"index": 0, "token_ids": sampled.tokens, "finish_reason": sampled.finish}
    return {"request_id": uuid.uuid4().hex, "choices": [{**choice, "logprobs": {"content": content}}]}


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error"}}


class DrivenEpisode:
    """One episode, which runs in a thread of its own until it asks for a turn."""

    def __init__(self, run: Callable[..., Any], facts: PolicyFacts, named: dict[str, Any]) -> None:
        self._run, self._named, self._policy = run, named, Policy(facts)
        self.result: Any = None
        threading.Thread(target=self._play, daemon=True).start()

    def _play(self) -> None:
        try:
            found = self._run(policy=self._policy, **self._named)
            self.result = asyncio.run(_awaited(found)) if inspect.isawaitable(found) else found
        except BaseException as error:  # noqa: BLE001 (foreign code: what it raises costs this episode)
            self._policy.asks.put(error)
            return
        self._policy.asks.put(None)

    def asks(self) -> Asked | None:
        """The next turn that it asks for; None when it is over. Raises what it raised."""
        found = self._policy.asks.get()
        if isinstance(found, BaseException):
            raise RuntimeError(f"{type(found).__name__}: {found}") from found
        return found

    def give(self, answer: Sampled | PolicyError) -> None:
        """Answers what it asked."""
        self._policy.answers.put(answer)


async def _awaited(found: Any) -> Any:
    return await found
