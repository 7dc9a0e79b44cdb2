"""The interface of a task: problems to train on, and a score (reward) for each completion. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NotRequired, Protocol, TypedDict


class Message(TypedDict):
    """A chat message."""

    role: str
    content: str
    reasoning_content: NotRequired[str]
    """What an assistant thought before: chat templates of models that reason render it, or leave it out."""


@dataclass(frozen=True)
class Problem:
    """One prompt as messages, with what its scorer needs."""

    messages: list[Message]
    answer: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    task: str | None = None
    """The task of `task.mix` that it is of."""
    judgements: dict[str, str | float] = field(default_factory=dict)
    """What was found about a completion before it is scored, by the name of the reward: a judge's answer, or a reward
    model's score."""
    level: int | None = None
    """The level of its task's curriculum."""

    @property
    def question(self) -> str:
        """The last user message, for people to read: without a system message and without a chat template."""
        users = [message["content"] for message in self.messages if message["role"] == "user"]
        return (users or [message["content"] for message in self.messages] or [""])[-1]


@dataclass(frozen=True)
class Problems:
    """The problems of a task: those to train on, and those held out for evaluation."""

    train: list[Problem]
    held_out: list[Problem]


@dataclass(frozen=True)
class Score:
    """The reward of a completion, and named parts of it to report."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)


def to_score(found: Any) -> Score:
    """The score that a task's `score` returned, of which a plain number is the reward; raises TypeError if it is
    none."""
    if isinstance(found, Real):
        return Score(float(found))
    if not (hasattr(found, "value") and hasattr(found, "parts")):
        raise TypeError(f"`score` returned {type(found).__name__}: return a number, or Score(value, parts)")
    return Score(float(found.value), {str(name): float(part) for name, part in found.parts.items()})


class Task(Protocol):
    """The interface of a task. `score` runs in worker processes that each build the task: do not rely on shared
    state."""

    def problems(self) -> Problems:
        """The problems to train on and to evaluate with."""
        ...

    def score(self, problem: Problem, completion: str) -> Score:
        """The reward of a completion."""
        ...


def ask(text: str) -> list[Message]:
    """A prompt of one user message."""
    return [{"role": "user", "content": text}]


def find_message_problem(found: object) -> str | None:
    """What is wrong with something that should be a list of messages; None if nothing is."""
    if not isinstance(found, list) or not found:
        return "are not a list of messages with `role` and `content`"
    for message in found:
        if (
            not isinstance(message, dict)
            or not isinstance(message.get("role"), str)
            or not isinstance(message.get("content"), str)
        ):
            return "are not all texts with a `role` and a `content`"
    try:
        texts = [text for message in found for text in message.values() if isinstance(text, str)]
        "".join(texts).encode()
    except UnicodeEncodeError:
        return "contain half of a character (a lone surrogate), which no tokenizer accepts"
    return None
