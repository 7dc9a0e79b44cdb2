"""Every setting of Ebbtide: one strict tree, documented field by field. Imports no torch.

The text under a field is its documentation everywhere: in `ebbtide config`, in docs/config.md and in error messages.
A section that is `null` is off; a section that is present is on.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ebbtide.config.base import Section
from ebbtide.config.checkpoint import CheckpointConfig
from ebbtide.config.evaluate import EvaluateConfig
from ebbtide.config.loss import AdvantageConfig, LossConfig
from ebbtide.config.memory import MemoryConfig
from ebbtide.config.model import ModelConfig
from ebbtide.config.optimizer import OptimizerConfig
from ebbtide.config.parallel import ParallelConfig, RolloutWeightsMode
from ebbtide.config.report import ReportConfig
from ebbtide.config.rollout import RolloutConfig
from ebbtide.config.run import RunConfig
from ebbtide.config.task import TaskConfig
from ebbtide.config.train import TrainConfig
from ebbtide.errors import UserError


class Config(Section):
    """All settings of one run."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of everything random: problems, their order, samples, initial weights."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` is the GPU if there is one."""

    deterministic: bool = False
    """Use only deterministic kernels, so that the same seed gives the same bits on a GPU as well; somewhat slower. Runs
    on a CPU are always deterministic."""

    run: RunConfig = RunConfig()
    """Where the run writes."""

    model: ModelConfig
    """The policy."""

    task: TaskConfig
    """The problems to train on, and how completions are scored."""

    rollout: RolloutConfig = RolloutConfig()
    """How completions are sampled."""

    advantage: AdvantageConfig = AdvantageConfig()
    """How rewards become advantages."""

    loss: LossConfig = LossConfig()
    """The policy loss."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its schedule."""

    train: TrainConfig = TrainConfig()
    """How a batch of rollouts becomes updates."""

    memory: MemoryConfig = MemoryConfig()
    """Which tensors are on the device in each phase."""

    parallel: ParallelConfig | None = None
    """If set, several ranks train together."""

    evaluate: EvaluateConfig | None = None
    """If set, evaluate on held-out problems along the way."""

    checkpoint: CheckpointConfig | None = CheckpointConfig()
    """If set, write checkpoints to `checkpoints/` in the run folder."""

    resume: str | None = None
    """Resume from a checkpoint: the path of a run folder or of one checkpoint; or `auto`, the newest checkpoint of
    `run.folder`, or else of the newest run of this name. A run without a checkpoint then starts over in its
    folder."""

    report: ReportConfig = ReportConfig()
    """What is printed and logged."""

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        rollout, train = self.rollout, self.train
        if rollout.group_size == 1 and self.advantage.kind != "reinforce_pp":
            raise ValueError(
                f"`advantage.kind: {self.advantage.kind}` compares the samples of a group, and `rollout.group_size: 1`"
                " makes groups of one: set `rollout.group_size` to 2 or more, or `advantage.kind: reinforce_pp`"
            )
        longest = rollout.max_prompt_tokens + rollout.max_new_tokens
        if longest > train.microbatch_tokens:
            raise ValueError(
                f"a sequence may have `rollout.max_prompt_tokens` + `rollout.max_new_tokens` = {longest} tokens, which"
                f" does not fit into `train.microbatch_tokens` = {train.microbatch_tokens}: raise it to {longest} or"
                " more"
            )
        if train.minibatches > rollout.prompts_per_step * rollout.group_size:
            raise ValueError(
                f"`train.minibatches: {train.minibatches}` exceeds the {rollout.prompts_per_step * rollout.group_size}"
                " sequences of a step (`rollout.prompts_per_step` x `rollout.group_size`): lower it to at most that"
            )
        if self.model.scratch is not None and longest > self.model.scratch.context:
            raise ValueError(
                f"`rollout.max_prompt_tokens` + `rollout.max_new_tokens` = {longest} tokens exceed the model's context"
                f" of `model.scratch.context` = {self.model.scratch.context}: lower one of them, or raise the context"
            )
        if rollout.engine == "vllm" and self.has_temperature and (rollout.top_p < 1 or rollout.top_k or rollout.min_p):
            raise ValueError(
                "`rollout.engine: vllm` with a temperature other than 1 gives log-probs only over the tokens that"
                " `rollout.top_p`, `top_k` and `min_p` keep, while the trainer's are over the whole vocabulary: remove"
                " those three, set every temperature to 1 (`evaluate.temperature` may be 0), or use another engine"
            )
        if self.parallel is not None and self.parallel.rollout_gpus and rollout.replay is not None:
            raise ValueError(
                "`rollout.replay` generates nothing, but `parallel.rollout_gpus` are only for generation: remove one of"
                " the two"
            )
        if self.parallel is not None and self.single_rank_only is not None:
            raise ValueError(f"`parallel` and `{self.single_rank_only}` cannot be combined yet: remove one of the two")
        has_own_held_out = self.task.python is not None or (
            self.task.file is not None and self.task.file.held_out is not None
        )
        if self.evaluate is not None and self.task.held_out == 0 and not has_own_held_out:
            raise ValueError(
                "`evaluate` needs held-out problems, but `task.held_out: 0` sets none aside: raise it, or set"
                " `evaluate: null`"
            )
        if self.evaluate is not None and not has_own_held_out:
            final = self.evaluate.final.problems if self.evaluate.final is not None else None
            for key, problems in (
                ("evaluate.problems", self.evaluate.problems),
                ("evaluate.final.problems", final or 0),
            ):
                if problems > self.task.held_out:
                    raise ValueError(
                        f"`{key}: {problems}` exceeds the `task.held_out: {self.task.held_out}` problems set aside:"
                        f" lower it, or raise `task.held_out` to {problems}"
                    )
        return self

    @property
    def single_rank_only(self) -> str | None:
        """The first setting of this config that does not work with several ranks yet."""
        found = {
            "rollout.partial.extra_prompts": self.rollout.partial.extra_prompts,
            "rollout.serve_port": self.rollout.serve_port is not None,
            "rollout.engine: vllm": self.rollout.engine == "vllm",
        }
        return next((name for name, value in found.items() if value), None)

    def check_context(self, context: int | None) -> None:
        """Checks that the longest sequence fits the model's context, if that is known."""
        longest = self.rollout.max_prompt_tokens + self.rollout.max_new_tokens
        if context is not None and longest > context:
            raise UserError(
                f"`rollout.max_prompt_tokens` + `rollout.max_new_tokens` = {longest} tokens exceed the model's context"
                f" of {context}: lower one of them"
            )

    def rollout_weights(self, parts: int) -> RolloutWeightsMode | None:
        """How weights that are sharded into `parts` are gathered to generate; None if there is nothing to gather. The
        default of `parallel.rollout_weights: null` is decided here."""
        if parts == 1 or (self.parallel is not None and self.parallel.rollout_gpus):
            return None
        return (
            self.parallel.rollout_weights
            if self.parallel is not None and self.parallel.rollout_weights is not None
            else "gathered"
        )

    @property
    def has_temperature(self) -> bool:
        """Whether anything is sampled at a temperature other than 1; greedy decoding counts as 1."""
        return self.rollout.temperature != 1 or (self.evaluate is not None and self.evaluate.temperature not in (0, 1))

    @property
    def pass_reward(self) -> float:
        """The reward from which on a completion passes."""
        return self.evaluate.pass_reward if self.evaluate is not None else EvaluateConfig().pass_reward

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether an extra forward computes the old log-probs; with one update per batch, the log-probs of the training
        forward are the old ones."""
        return self.loss.old_logprobs == "trainer" and (self.train.minibatches > 1 or self.train.epochs > 1)
