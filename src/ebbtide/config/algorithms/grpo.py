"""The settings of `algorithm: grpo`: RL on sampled completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import model_validator

from ebbtide.config.loss import AdvantageConfig, LossConfig
from ebbtide.config.root import Config
from ebbtide.config.task import TaskConfig


class GrpoConfig(Config):
    """All settings of a run that trains on sampled and scored completions (GRPO and its kin)."""

    algorithm: Literal["grpo"] = "grpo"
    """What is trained and how."""

    task: TaskConfig
    """The problems to train on, and how completions are scored."""

    advantage: AdvantageConfig = AdvantageConfig()
    """How rewards become advantages."""

    loss: LossConfig = LossConfig()
    """The policy loss."""

    @model_validator(mode="after")
    def _groups_fit_the_algorithm(self) -> GrpoConfig:
        rollout, train = self.rollout, self.train
        if rollout.group_size == 1 and self.advantage.kind != "reinforce_pp":
            raise ValueError(
                f"`advantage.kind: {self.advantage.kind}` compares the samples of a group, and `rollout.group_size: 1`"
                " makes groups of one: set `rollout.group_size` to 2 or more, or `advantage.kind: reinforce_pp`"
            )
        if train.minibatches > rollout.prompts_per_step * rollout.group_size:
            raise ValueError(
                f"`train.minibatches: {train.minibatches}` exceeds the {rollout.prompts_per_step * rollout.group_size}"
                " sequences of a step (`rollout.prompts_per_step` x `rollout.group_size`): lower it to at most that"
            )
        return self

    @model_validator(mode="after")
    def _turns_need_an_environment(self) -> GrpoConfig:
        if self.advantage.turns != "episode" and self.task.environment is None:
            raise ValueError(
                f"`advantage.turns: {self.advantage.turns}` is for episodes of several turns, and there is no"
                " `task.environment`: set one, or remove it"
            )
        return self

    @model_validator(mode="after")
    def _advantages_agree(self) -> GrpoConfig:
        advantage, kl = self.advantage, self.loss.kl
        if advantage.whiten == "token" and not advantage.kind.startswith("reinforce_pp"):
            raise ValueError(
                f"`advantage.whiten: token` is for `advantage.kind: reinforce_pp` and `reinforce_pp_baseline`, and"
                f" `{advantage.kind}` does not whiten: remove it, or change the kind"
            )
        if advantage.turns == "to_go" and (advantage.whiten == "token" or advantage.kind == "reinforce_pp_baseline"):
            key = "whiten: token" if advantage.whiten == "token" else "kind: reinforce_pp_baseline"
            raise ValueError(f"`advantage.turns: to_go` and `advantage.{key}` cannot be combined yet: remove one")
        buffer = advantage.overlong_buffer
        if buffer is not None and buffer.length > self.rollout.max_new_tokens:
            raise ValueError(
                f"`advantage.overlong_buffer.length: {buffer.length}` exceeds `rollout.max_new_tokens:"
                f" {self.rollout.max_new_tokens}`, of which it is the last part: lower it"
            )
        if kl is None or not kl.in_reward:
            return self
        if self.task.environment is not None:
            raise ValueError("`loss.kl.in_reward` and `task.environment` cannot be combined yet: remove one of the two")
        if self.loss.mask_overlong:
            raise ValueError(
                "`loss.mask_overlong` leaves completions out whose rewards still count, and `loss.kl.in_reward` needs"
                " the log-probs of all of them: remove one of the two"
            )
        if advantage.drop_zero_std_groups:
            raise ValueError(
                "`advantage.drop_zero_std_groups: true` skips groups of equal rewards, which `loss.kl.in_reward` makes"
                " unequal: remove one of the two"
            )
        return self

    @model_validator(mode="after")
    def _dynamic_sampling_is_possible(self) -> GrpoConfig:
        if self.advantage.dynamic_sampling is None:
            return self
        rollout = self.rollout
        if rollout.group_size == 1:
            raise ValueError(
                "`advantage.dynamic_sampling` replaces groups of equal rewards, and every group of"
                " `rollout.group_size: 1` is one: raise it, or remove `advantage.dynamic_sampling`"
            )
        found = {
            "rollout.partial.extra_prompts": rollout.partial.extra_prompts,
            "rollout.save_to": rollout.save_to,
            "rollout.replay": rollout.replay,
        }
        if other := next((name for name, value in found.items() if value), None):
            raise ValueError(
                f"`advantage.dynamic_sampling` and `{other}` cannot be combined yet: remove one of the two"
            )
        return self

    @property
    def drops_zero_std_groups(self) -> bool:
        """Whether groups in which every advantage is 0 are skipped. The default of `null` is decided here."""
        if self.advantage.drop_zero_std_groups is not None:
            return self.advantage.drop_zero_std_groups
        return self.loss.kl is None and not self.loss.entropy

    @property
    def has_kl_in_reward(self) -> bool:
        """Whether advantages need the log-probs of the policy and of the reference."""
        return self.loss.kl is not None and self.loss.kl.in_reward

    @property
    def cycle(self) -> tuple[str, ...]:
        return ("generate", "score", "logprob", "train", "step")

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether an extra forward computes the old log-probs; with one update per batch, the log-probs of the training
        forward are the old ones, and with exact ones, those that were recorded."""
        several = self.train.minibatches > 1 or self.train.epochs > 1
        wanted = several or self.has_kl_in_reward
        return self.loss.old_logprobs == "trainer" and wanted and not self.records_old_logprobs

    @property
    def records_old_logprobs(self) -> bool:
        """Whether the sampler's log-probs are the trainer's before the first update on a batch, to the bit: tokens that
        older weights sampled have others."""
        return bool(self.rollout.exact) and not self.rollout.partial.extra_prompts

    @property
    def forward_passes(self) -> Mapping[str, tuple[str, ...]]:
        old = ("policy",) if self.needs_old_logprobs else ()
        return {"logprob": (*old, *(("reference",) if self.loss.kl is not None else ()))}


Root = GrpoConfig
