"""The sections `advantage` and `loss`."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import field_validator, model_validator
from pydantic_core import PydanticCustomError

from ebbtide.config.base import NotNegative, Positive, Section

KINDS = ("grpo", "gspo", "cispo")


class AdvantageConfig(Section):
    """How rewards become advantages."""

    kind: Literal["group_std", "group_mean", "rloo", "reinforce_pp"] = "group_std"
    """`group_std`: reward minus the group's mean, divided by the group's standard deviation (GRPO); `group_mean`:
    minus the group's mean only (Dr. GRPO); `rloo`: minus the mean of the group's other samples; `reinforce_pp`: minus
    the batch's mean, divided by the batch's standard deviation (REINFORCE++)."""

    drop_zero_std_groups: bool = True
    """Skip groups in which every advantage is 0. They still count in the normalisation, so the policy gradient is
    the same and cheaper to compute; an entropy bonus and a KL penalty then cover the other groups only."""


class KlConfig(Section):
    """A KL penalty towards a frozen copy of the initial policy."""

    coefficient: Positive = 0.001
    """Weight of the penalty in the loss."""

    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Per-token estimate, with d = log p - log p_ref: `k1` is d, `k2` is d^2 / 2 (on-policy, its gradient is that of
    the true reverse KL), `k3` is exp(-d) + d - 1. The gradient of `k1` is zero on average: it monitors the KL without
    limiting it."""


class ImportanceSamplingConfig(Section):
    """Truncated importance sampling: each token is weighted by p_trainer / p_rollout, at most `cap`."""

    cap: Positive = 2.0
    """Maximum weight of a token."""


class LossConfig(Section):
    """The policy loss."""

    kind: str = "grpo"
    """`grpo`: clipped ratio per token; `gspo`: clipped ratio per sequence; `cispo`: REINFORCE with a clipped,
    detached ratio as weight; or `module:function`, a function of your own that returns the loss of each token (see
    docs/api.md)."""

    clip_low: Positive | None = None
    """Lower clipping bound of the ratio: 1 - clip_low; `null` is the kind's usual value: 0.2 (grpo), 3e-4 (gspo), 1.0
    (cispo)."""

    clip_high: Positive | None = None
    """Upper clipping bound of the ratio: 1 + clip_high; `null` is the kind's usual value: 0.2 (grpo), 4e-4 (gspo),
    0.28 (cispo). A value larger than clip_low clips asymmetrically (clip-higher)."""

    normalise: Literal["sequence", "token", "constant"] | None = None
    """Weight of a token, over all sequences of a step: 1 / (length of its sequence x sequences) (`sequence`, GRPO);
    1 / tokens (`token`, DAPO); 1 / (sequences x rollout.max_new_tokens) (`constant`, Dr. GRPO); each times
    `train.minibatches`. `null` is `token`, or `sequence` for `gspo`, which allows no other."""

    entropy: NotNegative = 0.0
    """Weight of an entropy bonus."""

    kl: KlConfig | None = None
    """If set, add a KL penalty towards a frozen copy of the initial policy."""

    importance_sampling: ImportanceSamplingConfig | None = None
    """If set, correct for the mismatch between the sampler's and the trainer's log-probs (truncated importance
    sampling). Both are over the whole vocabulary, whatever `rollout.top_p`, `top_k` and `min_p` are."""

    old_logprobs: Literal["trainer", "rollout"] = "trainer"
    """Denominator of the ratio. `trainer`: the trainer's log-probs before the first update on a batch, computed by an
    extra forward in the logprob phase if a batch has several updates. `rollout`: the sampler's log-probs, without that
    forward; the ratio then also covers the mismatch between sampler and trainer, but not what `rollout.top_p`, `top_k`
    or `min_p` cut off, because log-probs are over the whole vocabulary."""

    mask_overlong: bool = False
    """Exclude completions that hit `rollout.max_new_tokens` from the loss; they still count in their group's
    baseline."""

    @field_validator("kind")
    @classmethod
    def _kind_is_known(cls, kind: str) -> str:
        if kind.lower() in KINDS:
            return kind.lower()
        if not re.fullmatch(r"[\w.]+:\w+", kind):
            raise PydanticCustomError("loss_kind", "'grpo', 'gspo' or 'cispo', or the `module:function` of your own")
        return kind

    @model_validator(mode="after")
    def _importance_sampling_needs_trainer_logprobs(self) -> LossConfig:
        if self.importance_sampling is not None and self.old_logprobs == "rollout":
            raise ValueError(
                "`loss.importance_sampling` weights tokens by the trainer's old log-probs over the sampler's, and"
                " `loss.old_logprobs: rollout` uses the sampler's for both: remove one of the two"
            )
        return self

    @model_validator(mode="after")
    def _gspo_normalises_by_sequence(self) -> LossConfig:
        if self.kind == "gspo" and self.normalise not in (None, "sequence"):
            raise ValueError(
                f"`loss.kind: gspo` is always normalised by sequence, and `loss.normalise: {self.normalise}`"
                " contradicts it: remove one of the two"
            )
        return self

    @model_validator(mode="after")
    def _clip_needs_a_ratio(self) -> LossConfig:
        for key in ("clip_low", "clip_high"):
            if ":" in self.kind and getattr(self, key) is not None:
                raise ValueError(
                    f"`loss.{key}` clips the ratio of grpo, gspo and cispo, and `loss.kind: {self.kind}` is a function"
                    " of your own: remove one of the two"
                )
        return self

    @property
    def normalisation(self) -> Literal["sequence", "token", "constant"]:
        """The normalisation that applies."""
        return self.normalise or ("sequence" if self.kind == "gspo" else "token")
