"""The settings of `algorithm: dpo`: training on pairs of a better and a worse completion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from ebbtide.config.base import Positive, Section
from ebbtide.config.data import PairsConfig
from ebbtide.config.root import Config, StepSize


class PreferenceLossConfig(Section):
    """The loss of a pair."""

    kind: Literal["sigmoid", "ipo"] = "sigmoid"
    """`sigmoid`: the log-sigmoid of the margin (DPO); `ipo`: the squared distance of the margin per token from
    1 / (2 beta) (IPO)."""

    beta: Positive = 0.1
    """How strongly the policy is held to the reference: a larger value allows less distance."""

    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """The probability that a pair is labelled the wrong way round (conservative DPO). For `sigmoid` only."""

    reference: Literal["once", "each_step"] = "once"
    """When the reference's log-probs are computed: `once`, before the first step, for every pair that the run will
    draw, with the initial weights, so that no reference is held; `each_step`, in the logprob phase, under a frozen
    copy of the initial weights."""

    @model_validator(mode="after")
    def _smoothing_needs_sigmoid(self) -> PreferenceLossConfig:
        if self.kind == "ipo" and self.label_smoothing:
            raise ValueError(
                f"`loss.label_smoothing: {self.label_smoothing}` is for `loss.kind: sigmoid`: remove one of the two"
            )
        return self


class DpoConfig(Config):
    """All settings of a run that trains on pairs of completions (direct preference optimization)."""

    length_keys: ClassVar[str] = "`data.max_tokens`"
    packed_together: ClassVar[int] = 2

    algorithm: Literal["dpo"] = "dpo"
    """What is trained and how."""

    data: PairsConfig
    """The pairs to train on."""

    loss: PreferenceLossConfig = PreferenceLossConfig()
    """The loss of a pair."""

    @model_validator(mode="after")
    def _one_update_per_step(self) -> DpoConfig:
        for key in ("minibatches", "epochs"):
            if getattr(self.train, key) != 1:
                raise ValueError(
                    f"`train.{key}: {getattr(self.train, key)}` cuts a step of RL into updates, and a step of DPO is"
                    " one: remove it. `data.batch_size` is the size of an update, and `train.steps` their number"
                )
        return self

    @property
    def cycle(self) -> tuple[str, ...]:
        return ("logprob", "train", "step") if self.loss.reference == "each_step" else ("train", "step")

    @property
    def max_sequence_tokens(self) -> int:
        sampled = super().max_sequence_tokens if self.generates else 0
        return max(self.data.max_tokens, sampled)

    @property
    def min_microbatch_tokens(self) -> int:
        return max(self.packed_together * self.data.max_tokens, self.max_sequence_tokens)

    @property
    def step_size(self) -> StepSize:
        return StepSize(self.data.batch_size, self.packed_together, 1, self.data.max_tokens - 1)

    @property
    def forward_passes(self) -> Mapping[str, tuple[str, ...]]:
        found = {"logprob": ("reference",)} if self.loss.reference == "each_step" else {}
        return found | ({"evaluate": ("policy",)} if self.held_out_examples else {})

    @property
    def held_out_examples(self) -> int:
        return self.data.held_out_examples if self.evaluate is not None else 0

    @property
    def needs_initial_weights(self) -> bool:
        return True  # they are the reference


Root = DpoConfig
