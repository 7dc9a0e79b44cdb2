"""The messages of a scoring process to the run: lines of JSON.

Foreign code runs in that process, so its messages are checked and truncated, and never unpickled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

from ebbtide.system.printable import cut_middle, printable

ScorerFailure = Literal["error", "not_finite", "too_large", "judge_unreadable"]
"""Failures of a scorer that its own process detects."""
Failure = Literal["timeout", "crash", "judge_timeout", "judge_error", "reward_model_error", "too_long"] | ScorerFailure
"""Why a sample has no score."""
UNJUDGED: tuple[Failure, ...] = ("judge_timeout", "judge_error", "judge_unreadable", "reward_model_error", "too_long")
"""Those of a judge or a reward model, which say nothing about the completion."""

MAX_REWARD = 1e6
"""A sample with a larger reward or part fails. Rewards are about 1: a million is far above any of them, and far below
where squares, sums and float32 overflow."""
MAX_PARTS = 100
MAX_NAME = 100  # Characters in the name of a part.
MAX_MESSAGE = 2000  # Characters of an error's text.
MAX_BYTES = 1 << 18
"""Bytes of a line: all of the above with every character escaped take less."""


@dataclass(frozen=True)
class ScoreResult:
    """A completion's reward; `failure` says why it is 0 if its scorer gave none."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)
    failure: Failure | None = None
    message: str = ""

    @property
    def is_unjudged(self) -> bool:
        """Whether a judge or a reward model could not score it: it is no part of the loss, and nothing is compared with
        it."""
        return self.failure in UNJUDGED


def failed_score(failure: Failure, message: str) -> ScoreResult:
    """The result of a sample whose scoring failed: reward 0."""
    return ScoreResult(0.0, failure=failure, message=cut_middle(message, MAX_MESSAGE))


def check_score(value: float, parts: Mapping[str, float]) -> ScoreResult:
    """The result for a score, or a failure if a step cannot be trained on it."""
    if len(parts) > MAX_PARTS:
        return failed_score("error", f"the score has {len(parts)} parts, more than {MAX_PARTS}")
    for what, figure in (("score", value), *((f"score's part `{name}`", part) for name, part in parts.items())):
        if not math.isfinite(figure):
            return failed_score("not_finite", f"the {what} is {figure}")
        if abs(figure) > MAX_REWARD:
            return failed_score(
                "too_large", f"the {what} is {figure:,.10g}: rewards are from -{MAX_REWARD:,.0f} to {MAX_REWARD:,.0f}"
            )
    return ScoreResult(value, {printable(name, MAX_NAME): part for name, part in parts.items()})


def encode_message(kind: Literal["ready", "unbuilt", "scored"], *rest: Any) -> bytes:
    """A message as a line of JSON."""
    return json.dumps([kind, *rest]).encode() + b"\n"


def encode_result(ticket: int, scored: ScoreResult) -> bytes:
    """The message with the result of a request; `ticket` is the request's number."""
    return encode_message("scored", ticket, scored.value, scored.parts, scored.failure, scored.message)


ScoringMessage = tuple[Literal["ready"]] | tuple[Literal["unbuilt"], str] | tuple[Literal["scored"], float, ScoreResult]
"""A parsed message."""


_DECODER = json.JSONDecoder(parse_int=float)  # An integer of thousands of digits becomes infinite.


def decode_message(message: bytes | bytearray) -> ScoringMessage:
    """Parses a line; raises ValueError if it is not one of these messages."""
    try:
        found = _DECODER.decode(message.decode())
    except (ValueError, RecursionError):
        found = None
    match found:
        case ["ready"]:
            return ("ready",)
        case ["unbuilt", str(why)]:
            return "unbuilt", cut_middle(why, MAX_MESSAGE)
        case ["scored", float(ticket), float(value), dict(parts), None, str()] if _floats(parts):
            return "scored", ticket, check_score(value, parts)
        case ["scored", float(ticket), float(), dict(), str(failure), str(why)] if failure in get_args(ScorerFailure):
            return "scored", ticket, failed_score(cast(ScorerFailure, failure), why)
    raise ValueError("not a message of a scoring process")


def _floats(parts: dict[str, Any]) -> bool:
    return all(isinstance(part, float) for part in parts.values())
