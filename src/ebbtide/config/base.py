"""The kinds of values that settings have, and what all sections share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
NotNegative = Annotated[float, Field(ge=0.0)]
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Port = Annotated[int, Field(ge=0, le=65535)]


class Section(BaseModel):
    """A section of the config: strict, frozen, and documented by the text under each field."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def meaning(field: FieldInfo) -> str:
    """The documentation of a setting, on one line."""
    return " ".join((field.description or "").split())
