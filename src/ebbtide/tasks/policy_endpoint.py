"""The policy as an HTTP endpoint, for the program of an environment that drives its episodes: vLLM's
`/inference/v1/generate`, by token ids, which verifiers and others use, and OpenAI's chat completions."""

from __future__ import annotations

import json
import threading
import uuid
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ebbtide.tasks.policy_handle import MODEL, Policy, PolicyError, PolicyFacts, Sampled

MAX_BODY = 1 << 26  # Bytes of a request.
POLL_SECONDS = 0.02  # The end of an endpoint is noticed after so long.


class ServedPolicy(Policy):
    """The policy, with an endpoint."""

    _server: ThreadingHTTPServer | None = None

    @cached_property
    def url(self) -> str:
        """The address of the endpoint, which answers `POST /inference/v1/generate`, `POST /v1/chat/completions` and
        `GET /v1/models` from threads of this process until the episode is over."""
        policy = self

        class Endpoint(_Endpoint):
            served = policy

        server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(POLL_SECONDS,), daemon=True).start()
        self._server = server
        return f"http://127.0.0.1:{server.server_port}"

    def close(self) -> None:
        """Ends the endpoint."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


class _Endpoint(BaseHTTPRequestHandler):
    """A connection to the endpoint."""

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
            if not 0 <= size <= MAX_BODY:
                self.close_connection = True
                raise PolicyError(f"a request may have {MAX_BODY:,} bytes")
            body = json.loads(self.rfile.read(size))
            if not isinstance(body, dict):
                raise PolicyError("the request must be a JSON object")
            answer = {"/inference/v1/generate": _generate, "/v1/chat/completions": _chat}.get(self.path)
            if answer is None:
                self._send(404, _error(f"there is no {self.path} here"))
                return
            self._send(200, answer(self.served, body))
        except (PolicyError, ValueError, TypeError, KeyError, AttributeError) as error:
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


def _generate(policy: Policy, body: dict[str, Any]) -> dict[str, Any]:
    tokens, given = body.get("token_ids"), body.get("sampling_params") or {}
    if not isinstance(tokens, list) or not tokens or not all(type(token) is int and token >= 0 for token in tokens):
        raise PolicyError("`token_ids` must be a list of token ids")
    sampled = policy.sample(tokens, _max_tokens(given, policy.facts))
    choice = {"index": 0, "token_ids": sampled.tokens, "finish_reason": sampled.finish, "logprobs": _logprobs(sampled)}
    return {"request_id": uuid.uuid4().hex, "choices": [choice]}


def _chat(policy: Policy, body: dict[str, Any]) -> dict[str, Any]:
    if body.get("stream"):
        raise PolicyError("`stream` is not possible here")
    messages, tools = body.get("messages"), body.get("tools")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise PolicyError("`messages` must be a list of messages")
    said, sampled = policy.chat(messages, tools, _max_tokens(body, policy.facts))
    choice: dict[str, Any] = {"index": 0, "message": said, "logprobs": _logprobs(sampled)}
    choice["finish_reason"] = "tool_calls" if said.get("tool_calls") else sampled.finish
    if body.get("return_token_ids"):
        choice["token_ids"] = sampled.tokens
    return {
        "id": uuid.uuid4().hex,
        "object": "chat.completion",
        "created": 0,
        "model": MODEL,
        "choices": [choice],
    }


def _max_tokens(given: dict[str, Any], facts: PolicyFacts) -> int | None:
    """The most new tokens that are asked for; raises `PolicyError` if something is asked for that a turn cannot be.
    Other sampling parameters are the run's."""
    stops = set(given.get("stop_token_ids") or ()) - set(facts.end_tokens)
    if stops or given.get("stop"):
        raise PolicyError(
            f"a turn ends at the model's own end tokens {facts.end_tokens}: it cannot stop at"
            f" {sorted(stops) or given['stop']} as well"
        )
    if (given.get("n") or 1) != 1:
        raise PolicyError("`n` must be 1: ask once for each turn")
    most = given.get("max_completion_tokens") or given.get("max_tokens")
    if most is not None and (type(most) is not int or most < 1):
        raise PolicyError("`max_tokens` must be a positive integer")
    return most


def _logprobs(sampled: Sampled) -> dict[str, Any]:
    found = zip(sampled.tokens, sampled.logprobs, strict=True)
    return {"content": [{"token": f"token_id:{token}", "logprob": logprob} for token, logprob in found]}


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error"}}
