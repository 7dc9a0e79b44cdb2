"""The messages of an environment's process to the run: lines of JSON.

Foreign code runs in that process, so its messages are checked, and never unpickled.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, cast

from ebbtide.system.printable import cut_middle
from ebbtide.tasks.environment import Description, Opening, Outcome, Reply
from ebbtide.tasks.policy_handle import Asked
from ebbtide.tasks.score_message import MAX_MESSAGE, MAX_REWARD, Failure, check_score
from ebbtide.tasks.task import Message, find_message_problem

MAX_CHARACTERS = 1 << 18
"""Characters that an environment says at once: far more than an episode has room for."""
MAX_LINE = 1 << 22
"""Bytes of a line: that many characters take less, however they are escaped."""
MAX_CALLS = 100  # Tool calls in one turn.


@dataclass(frozen=True)
class Failed:
    """Why a call of an environment gave nothing."""

    failure: Failure
    message: str


Answer = Description | Opening | Asked | Reply | Outcome | Failed
"""What an environment's process answers to a request."""


def encode_answer(ticket: int, answer: Answer) -> bytes:
    """An answer as a line of JSON; one that is too long is a failure."""
    match answer:
        case Description(tools, gives_reward, drives):
            parts: list[Any] = ["described", 0, tools, gives_reward, drives]
        case Opening(messages):
            parts = ["opened", _characters(messages), messages]
        case Asked(tokens, max_tokens, messages, continues, tools):
            size = len(tokens) + _characters(messages) + len(json.dumps(tools))
            parts = ["asked", size, tokens, max_tokens, messages, continues, tools]
        case Reply(messages, reward, done, calls, failed):
            parts = ["replied", _characters(messages), messages, reward, done, calls[:MAX_CALLS], failed]
        case Outcome(reward, figures):
            parts = ["ended", 0, reward, figures]
        case Failed(failure, message):
            parts = ["failed", 0, failure, cut_middle(message, MAX_MESSAGE)]
    if parts[1] > MAX_CHARACTERS:
        why = f"the environment says {parts[1]:,} characters or tokens at once, more than {MAX_CHARACTERS:,}"
        return encode_answer(ticket, Failed("too_large", why))
    return json.dumps([ticket, parts[0], *parts[2:]]).encode() + b"\n"


def _characters(messages: list[Message]) -> int:
    return sum(len(message["role"]) + len(message["content"]) for message in messages)


def decode_answer(line: bytes | bytearray, ticket: int) -> Answer:
    """Parses the answer to a request; raises ValueError if it is none."""
    try:
        return _decode(json.loads(line.decode()), ticket)
    except (TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not an answer to the request: {error}") from None


def _decode(found: Any, ticket: int) -> Answer:
    match found:
        case [number, "described", list(tools), bool(gives_reward), bool(drives)] if number == ticket:
            return Description([tool for tool in tools if isinstance(tool, dict)], gives_reward, drives)
        case [number, "opened", list(messages)] if number == ticket and messages:
            return Opening(_checked(messages))
        case [number, "asked", list(tokens), None | int() as most, list(messages), bool(continues), list(tools)] if (
            number == ticket
        ):
            whole = all(type(token) is int and token >= 0 for token in tokens) and (most is None or most > 0)
            if not whole or bool(tokens) == bool(messages) or not all(isinstance(tool, dict) for tool in tools):
                raise ValueError("what it asks for is no turn")
            json.dumps(tools, ensure_ascii=False).encode()  # Raises for text that no tokenizer accepts.
            return Asked(tokens, most, _checked(messages), continues, tools)
        case [number, "replied", list(messages), float() | int() as reward, bool(done), list(calls), int(failed)] if (
            number == ticket
        ):
            if (problem := _reward_problem(float(reward))) is not None:
                return problem
            return Reply(_checked(messages), float(reward), done, [str(call) for call in calls], failed)
        case [number, "ended", None | float() | int() as reward, dict(parts)] if number == ticket:
            figures = {name: float(value) for name, value in parts.items()}
            checked = check_score(float(reward or 0.0), figures)
            if checked.failure is not None:
                return Failed(checked.failure, checked.message)
            return Outcome(None if reward is None else float(reward), checked.parts)
        case [number, "failed", "error" | "too_large" as failure, str(message)] if number == ticket:
            return Failed(cast(Failure, failure), cut_middle(message, MAX_MESSAGE))
    raise ValueError("not an answer to the request")


def _checked(messages: list[Any]) -> list[Message]:
    if messages and (why := find_message_problem(messages)) is not None:
        raise ValueError(f"the messages {why}")
    return messages


def _reward_problem(reward: float) -> Failed | None:
    if not math.isfinite(reward):
        return Failed("not_finite", f"the reward of a turn is {reward}")
    if abs(reward) > MAX_REWARD:
        return Failed("too_large", f"the reward of a turn is {reward:,.10g}, and at most {MAX_REWARD:,.0f} is allowed")
    return None
