"""How the reasoning of a completion is told from its answer. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

Mark = Annotated[str, Field(min_length=1, max_length=64)]
ReasoningFormat = Literal["auto", "think", "harmony"] | Annotated[list[Mark], Field(min_length=2, max_length=2)]
"""`think`: `<think>` and `</think>`; `harmony`: the channels of gpt-oss; a list: the two texts around the reasoning;
`auto`: what the chat template has of these."""


def check_format(given: Any) -> Any:
    """Raises ValueError if a value is no format: one sentence for all of its kinds."""
    is_marks = isinstance(given, list) and len(given) == 2 and all(isinstance(one, str) and one for one in given)
    if given not in (None, "auto", "think", "harmony") and not is_marks:
        raise ValueError(
            f"it is {given!r} and should be `auto`, `think`, `harmony` or a list of the two texts around"
            ' the reasoning, as in `["<think>", "</think>"]`'
        )
    return given
