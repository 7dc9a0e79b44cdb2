"""The settings of `algorithm: distill`: training a policy to have a teacher's distribution."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import model_validator

from ebbtide.config.base import Fraction, Section
from ebbtide.config.data import ExamplesConfig
from ebbtide.config.model import ModelConfig
from ebbtide.config.root import Config


class DistillationLossConfig(Section):
    """How far the policy is from the teacher."""

    over: Literal["vocabulary", "sampled"] = "vocabulary"
    """`vocabulary`: the divergence of the whole distributions of each token, chunk by chunk. `sampled`: the reverse KL
    from the log-probs of sampled tokens alone, as a policy gradient; cheaper, and noisier."""

    beta: Fraction = 1.0
    """The divergence over the vocabulary: 0 is the forward KL(teacher || policy), 1 the reverse KL(policy || teacher),
    and between them it is the generalised Jensen-Shannon divergence."""

    @model_validator(mode="after")
    def _sampled_is_reverse(self) -> DistillationLossConfig:
        if self.over == "sampled" and self.beta != 1:
            raise ValueError(
                f"`loss.over: sampled` is the reverse KL, and `loss.beta: {self.beta:g}` is another divergence: remove"
                " one of the two"
            )
        return self


class DistillConfig(Config):
    """All settings of a run in which the policy learns a teacher's distribution, on completions that it samples itself
    (on-policy distillation) or on those of a file."""

    length_keys: ClassVar[str] = "`rollout.max_prompt_tokens` + `rollout.max_new_tokens`, or `data.max_tokens`,"

    algorithm: Literal["distill"] = "distill"
    """What is trained and how."""

    teacher: ModelConfig
    """The teacher, a frozen model with the policy's vocabulary."""

    data: ExamplesConfig | None = None
    """If set, train on the completions of a file instead of sampled ones."""

    loss: DistillationLossConfig = DistillationLossConfig()
    """How far the policy is from the teacher."""

    @model_validator(mode="after")
    def _something_to_train_on(self) -> DistillConfig:
        if self.data is None and self.task is None:
            raise ValueError("set `task`, whose prompts the policy samples completions of, or `data`, a file of them")
        if self.loss.over == "sampled":
            if self.data is not None:
                raise ValueError(
                    "`loss.over: sampled` needs completions that the policy has sampled, and `data` has those of a"
                    " file: remove one of the two"
                )
            if self.train.minibatches * self.train.epochs > 1:
                raise ValueError(
                    "`loss.over: sampled` makes one update per step: remove `train.minibatches` and `train.epochs`"
                )
        return self

    @property
    def cycle(self) -> tuple[str, ...]:
        generate = ("generate",) if self.data is None else ()
        score = ("score",) if generate and self.task is not None and self.task.is_scored else ()
        return (*generate, *score, "logprob", "train", "step")

    @property
    def forward_passes(self) -> Mapping[str, tuple[str, ...]]:
        return {"logprob": ("teacher",)} | ({"evaluate": ("teacher", "policy")} if self.held_out_examples else {})

    @property
    def held_out_examples(self) -> int:
        return self.data.held_out_examples if self.data is not None and self.evaluate is not None else 0

    @property
    def frozen_heads_in(self) -> tuple[str, ...]:
        if self.loss.over == "sampled":
            return ()
        return ("train", "evaluate") if self.held_out_examples else ("train",)

    @model_validator(mode="after")
    def _teachers_adapters_are_trained(self) -> DistillConfig:
        if self.teacher.lora is not None and self.teacher.lora.adapter is None:
            raise ValueError(
                "`teacher.lora` needs `teacher.lora.adapter`: new adapters would add nothing to the teacher"
            )
        return self

    @model_validator(mode="after")
    def _teacher_is_not_quantized(self) -> DistillConfig:
        for key in ("base", "base_embeddings"):
            if getattr(self.teacher, key):
                raise ValueError(f"`teacher.{key}` is not supported yet: remove it")
        return self

    @property
    def frozen_models(self) -> Mapping[str, ModelConfig]:
        return {"teacher": self.teacher}


Root = DistillConfig
