"""What a task is: problems to practise on, and a score for each completion. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, TypedDict


class Message(TypedDict):
    role: str
    content: str


@dataclass(frozen=True)
class Problem:
    """One prompt, as messages, with what its scorer needs."""

    messages: list[Message]
    answer: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def question(self) -> str:
        """What is asked last, for people to see: without a system message, and without a chat template around it."""
        asked = [message["content"] for message in self.messages if message["role"] == "user"]
        return (asked or [message["content"] for message in self.messages] or [""])[-1]


@dataclass(frozen=True)
class Problems:
    """The problems of a task: to train on, and held out from training."""

    train: list[Problem]
    held_out: list[Problem]


@dataclass(frozen=True)
class Score:
    """The reward of a completion, and the named parts it is made of."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)


class Task(Protocol):
    """What Ebbtide asks of a task. `score` runs in worker processes that build the task anew: keep it free of shared state."""

    def problems(self) -> Problems: ...

    def score(self, problem: Problem, completion: str) -> Score: ...


def ask(text: str) -> list[Message]:
    """One user message."""
    return [{"role": "user", "content": text}]


def why_no_messages(found: object) -> str | None:
    """What is wrong with something that should be a list of messages; None if nothing is."""
    if not isinstance(found, list) or not found:
        return "are no list of messages with `role` and `content`"
    for message in found:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            return "are not all texts with a `role` and a `content`"
    try:
        "".join(message["role"] + message["content"] for message in found).encode()
    except UnicodeEncodeError:
        return "hold half of a character (a lone surrogate), which no tokenizer takes"
    return None
