"""How the reasoning of a completion is told from its answer. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

Mark = Annotated[str, Field(min_length=1, max_length=64)]
ReasoningFormat = Literal["auto", "think", "harmony"] | Annotated[list[Mark], Field(min_length=2, max_length=2)]
"""`think`: `<think>` and `</think>`; `harmony`: the channels of gpt-oss; a list: the two texts around the reasoning;
`auto`: what the chat template has of these."""
