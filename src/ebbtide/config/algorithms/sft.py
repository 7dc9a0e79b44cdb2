"""The settings of `algorithm: sft`: training on given text."""

from __future__ import annotations

from typing import ClassVar, Literal

from ebbtide.config.data import ExamplesConfig
from ebbtide.config.root import Config


class SftConfig(Config):
    """All settings of a run that trains on examples (supervised fine-tuning)."""

    length_keys: ClassVar[str] = "`data.max_tokens`"
    single_update: ClassVar[bool] = True

    algorithm: Literal["sft"] = "sft"
    """What is trained and how."""

    data: ExamplesConfig
    """The examples to train on."""

    @property
    def cycle(self) -> tuple[str, ...]:
        return ("train", "step")


Root = SftConfig
