"""The sections `advantage` and `loss`."""

from __future__ import annotations

import re
from math import inf
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from ebbtide.config.base import Count, NotNegative, Positive, Section

KINDS = ("grpo", "gspo", "cispo")


class OverlongBufferConfig(Section):
    """Overlong reward shaping (DAPO's soft overlong punishment): a completion that ends in the last tokens that it may
    have loses reward, and more the later it ends."""

    length: Count
    """Tokens of the buffer before `rollout.max_new_tokens`, in which the penalty grows from 0 to `penalty`."""

    penalty: Positive = 1.0
    """What a completion of `rollout.max_new_tokens` loses."""


class DynamicSamplingConfig(Section):
    """Dynamic sampling (DAPO): groups whose samples all have the same reward are replaced by groups of other prompts,
    until a step has `rollout.prompts_per_step` groups of different rewards."""

    max_num_gen_batches: Annotated[int, Field(ge=2)] = 10
    """Generations of a step at most. Each draws as many prompts as groups are missing. After the last one the step
    goes on with the groups that it has, filled up with some of equal rewards."""


class AdvantageConfig(Section):
    """How rewards become advantages."""

    kind: Literal["group_std", "group_mean", "rloo", "reinforce_pp", "reinforce_pp_baseline"] = "group_std"
    """`group_std`: reward minus the group's mean, divided by the group's standard deviation (GRPO); `group_mean`:
    minus the group's mean only (Dr. GRPO); `rloo`: minus the mean of the group's other samples; `reinforce_pp`: minus
    the batch's mean, divided by the batch's standard deviation (REINFORCE++); `reinforce_pp_baseline`: minus the
    group's mean, then divided by the batch's standard deviation (REINFORCE++-baseline)."""

    whiten: Literal["sequence", "token"] = "sequence"
    """Over what `reinforce_pp` and `reinforce_pp_baseline` take the mean and the standard deviation of the batch: its
    sequences, or its tokens, so that a long sequence counts for more (verl, NeMo RL, OpenRLHF)."""

    overlong_buffer: OverlongBufferConfig | None = None
    """If set, completions that are almost too long lose reward before advantages are computed. Rewards are reported
    without that, and evaluations have none of it."""

    turns: Literal["episode", "to_go"] = "episode"
    """With `task.environment`, what the tokens of a turn are rewarded for. `episode`: all that the episode gained, so
    that all of its tokens have one advantage. `to_go`: what it gained from this turn on, compared with that of the
    same turn of the others in its group that have one (in the batch, for `reinforce_pp`)."""

    drop_zero_std_groups: bool | None = None
    """Skip groups in which every advantage is 0. They still count in the normalisation, so the policy gradient is
    the same and cheaper to compute; an entropy bonus and a KL penalty then cover the other groups only. `null`: skip
    them where there is neither `loss.entropy` nor `loss.kl`, which otherwise cover all samples."""

    dynamic_sampling: DynamicSamplingConfig | None = None
    """If set, groups of equal rewards, as the task gives them, are replaced by others before a step trains."""


class KlConfig(Section):
    """A KL penalty towards a frozen copy of the initial policy."""

    coefficient: Positive = 0.001
    """Weight of the penalty in the loss."""

    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Per-token estimate, with d = log p - log p_ref: `k1` is d, `k2` is d^2 / 2 (on-policy, its gradient is that of
    the true reverse KL), `k3` is exp(-d) + d - 1. The gradient of `k1` is zero on average: it monitors the KL without
    limiting it."""

    importance_ratio: Literal["old", "current", "rollout"] | None = None
    """If set, multiply the estimate by the ratio p / q of the policy, with its gradient, which makes the gradient of
    `k1` and `k3` that of the true reverse KL. `old`: q is the denominator of the loss's own ratio (TRL's
    `use_bias_correction_kl`); `current`: q is p itself, so that the ratio is 1 and only its gradient counts (NeMo RL's
    default); `rollout`: q is the sampler's (NeMo RL's `use_on_policy_kl_approximation`)."""

    in_reward: bool = False
    """Subtract the penalty from the reward, in place of adding it to the loss: `coefficient` times the estimate, by the
    old log-probs, summed over a completion; with `advantage.kind: reinforce_pp` and `whiten: token`, from each token
    on. Costs a forward for old log-probs where none is needed otherwise."""

    @model_validator(mode="after")
    def _rewards_have_no_gradient(self) -> KlConfig:
        if self.in_reward and self.importance_ratio is not None:
            raise ValueError(
                f"`loss.kl.importance_ratio: {self.importance_ratio}` is for the gradient of a penalty in the loss, and"
                " `loss.kl.in_reward` puts it into the reward: remove one of the two"
            )
        return self


class ImportanceSamplingConfig(Section):
    """Importance sampling: the loss of each token is weighted by the ratio p_trainer / p_rollout, within a band."""

    level: Literal["token", "sequence", "geometric"] | None = None
    """What has the ratio: each `token`; its `sequence`, the product over all tokens; or the `geometric` mean over
    them. `null` is `token`, or `sequence` for `loss.kind: gspo`, whose own ratio is a sequence's."""

    mode: Literal["truncate", "clip", "mask"] = "truncate"
    """What happens to a ratio outside the band. `truncate`: above `high` it counts as `high`, and there is no lower
    bound (TIS); `clip`: it counts as the bound that it exceeds; `mask`: its tokens have no loss (IcePop for tokens, MIS
    for sequences)."""

    high: Positive | None = 2.0
    """Upper bound of the ratio; `null` is none."""

    low: Positive | None = None
    """Lower bound of the ratio, for `clip` and `mask`; `null` is 1 / `high`."""

    @model_validator(mode="after")
    def _band_is_one(self) -> ImportanceSamplingConfig:
        if self.low is not None and self.mode == "truncate":
            raise ValueError(
                "`loss.importance_sampling.low` is for `mode: clip` and `mode: mask`; `mode: truncate` has no lower"
                " bound: remove it, or set `loss.importance_sampling.mode`"
            )
        if self.mode != "truncate" and self.high is None and self.low is None:
            raise ValueError(
                f"`loss.importance_sampling.mode: {self.mode}` needs a bound, and `high: null` is none: set `low` or"
                " `high`, or `mode: truncate` for ratios without bounds"
            )
        if self.mode != "truncate" and self.lower_bound > self.upper_bound:
            raise ValueError(
                f"`loss.importance_sampling.low: {self.lower_bound:g}` is above `high: {self.upper_bound:g}`: no ratio"
                " is in that band"
            )
        return self

    @property
    def lower_bound(self) -> float:
        """The lower bound that applies to `clip` and `mask`."""
        return self.low if self.low is not None else 1 / self.upper_bound

    @property
    def upper_bound(self) -> float:
        """The upper bound that applies."""
        return self.high if self.high is not None else inf


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

    clip_ratio_c: Annotated[float, Field(gt=1.0)] | None = None
    """Dual clip, for `grpo` and `gspo`: where the advantage is negative, the ratio counts as at most this (usually 3);
    `null` has no such bound. TRL's `delta`, and NeMo RL's `ratio_clip_c`."""

    normalise: Literal["sequence", "token", "constant"] | None = None
    """Weight of a token, over all sequences of a step: 1 / (length of its sequence x sequences) (`sequence`, GRPO);
    1 / tokens (`token`, DAPO); 1 / (sequences x rollout.max_new_tokens) (`constant`, Dr. GRPO); each times
    `train.minibatches`. `null` is `token`, or `sequence` for `gspo`, which allows no other."""

    entropy: NotNegative = 0.0
    """Weight of an entropy bonus."""

    kl: KlConfig | None = None
    """If set, add a KL penalty towards a frozen copy of the initial policy."""

    importance_sampling: ImportanceSamplingConfig | None = None
    """If set, correct for the mismatch between the sampler's and the trainer's log-probs. Both are over the whole
    vocabulary, whatever `rollout.top_p`, `top_k` and `min_p` are."""

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
        if self.clip_ratio_c is not None and self.kind == "cispo":
            raise ValueError(
                f"`loss.clip_ratio_c: {self.clip_ratio_c:g}` bounds the ratio of grpo and gspo, and `loss.kind: cispo`"
                " already clips every ratio from above (`loss.clip_high`): remove one of the two"
            )
        for key in ("clip_low", "clip_high", "clip_ratio_c"):
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
