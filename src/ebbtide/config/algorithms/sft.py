"""The settings of `algorithm: sft`: training on given text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import model_validator

from ebbtide.config.data import ExamplesConfig
from ebbtide.config.root import Config, StepSize


class SftConfig(Config):
    """All settings of a run that trains on examples (supervised fine-tuning)."""

    length_keys: ClassVar[str] = "`data.max_tokens`"

    algorithm: Literal["sft"] = "sft"
    """What is trained and how."""

    data: ExamplesConfig
    """The examples to train on."""

    @model_validator(mode="after")
    def _one_update_per_step(self) -> SftConfig:
        for key in ("minibatches", "epochs"):
            if getattr(self.train, key) != 1:
                raise ValueError(
                    f"`train.{key}: {getattr(self.train, key)}` cuts a step of RL into updates, and a step of SFT is"
                    " one: remove it. `data.batch_size` is the size of an update, and `train.steps` their number"
                )
        return self

    @property
    def cycle(self) -> tuple[str, ...]:
        return ("train", "step")

    @property
    def max_sequence_tokens(self) -> int:
        sampled = super().max_sequence_tokens if self.generates else 0
        return max(self.data.max_tokens, sampled)

    @property
    def step_size(self) -> StepSize:
        return StepSize(self.data.batch_size, 1, 1, self.data.max_tokens - 1)

    @property
    def forward_passes(self) -> Mapping[str, tuple[str, ...]]:
        return {"evaluate": ("policy",)} if self.held_out_examples else {}

    @property
    def held_out_examples(self) -> int:
        return self.data.held_out_examples if self.evaluate is not None else 0


Root = SftConfig
