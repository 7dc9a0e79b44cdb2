"""What a scoring process says of a completion: one line of JSON.

Foreign code runs in that process, so what comes from there is checked and cut, and never unpickled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from ebbtide.printable import cut, printable

Judged = Literal["error", "not_finite", "too_large"]
"""What a scorer did wrong, found in its own process."""
Failure = Literal["timeout", "crash"] | Judged

LARGEST = 1e6
"""A reward or part beyond it costs its sample. Rewards are scores of about 1: a million is far above any of them, and
far below where squares, sums and float32 overflow."""
MOST_PARTS = 100
MOST_NAME = 100  # characters in the name of a part
MOST_MESSAGE = 2000  # characters kept of an error's text
MOST_BYTES = 1 << 18
"""Of a line: all of the above, with every character escaped, take less."""


@dataclass(frozen=True)
class Scored:
    """A completion's reward; `failure` says why it is 0 where its scorer did not give one."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)
    failure: Failure | None = None
    message: str = ""


def failed(failure: Failure, message: str) -> Scored:
    return Scored(0.0, failure=failure, message=cut(message, MOST_MESSAGE))


def judged(value: float, parts: Mapping[str, float]) -> Scored:
    """A score that a step can be trained on; any other costs its sample."""
    if len(parts) > MOST_PARTS:
        return failed("error", f"the score has {len(parts)} parts, more than {MOST_PARTS}")
    for what, figure in (("score", value), *((f"score's part `{name}`", part) for name, part in parts.items())):
        if not math.isfinite(figure):
            return failed("not_finite", f"the {what} is {figure}")
        if abs(figure) > LARGEST:
            return failed("too_large", f"the {what} is {figure:,.10g}: rewards are from -{LARGEST:,.0f} to {LARGEST:,.0f}")
    return Scored(value, {printable(name, MOST_NAME): part for name, part in parts.items()})


def line(kind: Literal["ready", "unbuilt", "scored"], *rest: Any) -> bytes:
    return json.dumps([kind, *rest]).encode() + b"\n"


def scored_line(ticket: int, scored: Scored) -> bytes:
    return line("scored", ticket, scored.value, scored.parts, scored.failure, scored.message)


Said = tuple[Literal["ready"]] | tuple[Literal["unbuilt"], str] | tuple[Literal["scored"], float, Scored]


def read(said: bytes | bytearray) -> Said:
    """What a line says; ValueError where it is none of ours."""
    try:
        found = json.loads(said, parse_int=float)  # a number of thousands of digits is infinite then
    except (ValueError, RecursionError):
        found = None
    match found:
        case ["ready"]:
            return ("ready",)
        case ["unbuilt", str(why)]:
            return "unbuilt", cut(why, MOST_MESSAGE)
        case ["scored", float(ticket), float(value), dict(parts), None, str()] if _floats(parts):
            return "scored", ticket, judged(value, parts)
        case ["scored", float(ticket), float(), dict(), "error" | "not_finite" | "too_large" as failure, str(why)]:
            return "scored", ticket, failed(cast(Judged, failure), why)
    raise ValueError("not a line that a scoring process writes")


def _floats(parts: dict[str, Any]) -> bool:
    return all(isinstance(part, float) for part in parts.values())
