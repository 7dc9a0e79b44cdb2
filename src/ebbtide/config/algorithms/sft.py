"""The settings of `algorithm: sft`: training on given text."""

from __future__ import annotations

from collections.abc import Mapping
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

    @property
    def forward_passes(self) -> Mapping[str, tuple[str, ...]]:
        return {"evaluate": ("policy",)} if self.held_out_examples else {}

    @property
    def held_out_examples(self) -> int:
        return self.data.held_out_examples if self.evaluate is not None else 0


Root = SftConfig
