"""The settings that every algorithm has: one strict tree, documented field by field. Imports no torch.

Each algorithm adds its own in config/algorithms/. The text under a field is its documentation everywhere: in `ebbtide
config`, in docs/config.md and in error messages. A section that is `null` is off; a section that is present is on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field, model_validator

from ebbtide.config.base import Section
from ebbtide.config.checkpoint import CheckpointConfig
from ebbtide.config.data import DataConfig
from ebbtide.config.evaluate import EvaluateConfig
from ebbtide.config.memory import MemoryConfig
from ebbtide.config.model import ModelConfig
from ebbtide.config.optimizer import OptimizerConfig
from ebbtide.config.parallel import ParallelConfig, RolloutWeightsMode
from ebbtide.config.report import ReportConfig
from ebbtide.config.rewards import RewardModelConfig
from ebbtide.config.rollout import RolloutConfig
from ebbtide.config.run import RunConfig
from ebbtide.config.task import TaskConfig, reward_key
from ebbtide.config.train import TrainConfig
from ebbtide.errors import UserError


class StepSize(NamedTuple):
    """The most sequences that a step trains on, and their lengths."""

    groups: int
    samples: int
    """Sequences per group: completions of a prompt, or the two sides of a pair."""
    prompt_tokens: int
    new_tokens: int
    """Tokens of a sequence that carry loss."""

    def describe(self) -> str:
        if self.prompt_tokens == 1:  # examples of a file, any token of which may carry loss
            return f"{self.groups * self.samples} sequences of at most {self.prompt_tokens + self.new_tokens} tokens"
        return f"{self.groups} x {self.samples} samples of at most {self.prompt_tokens} + {self.new_tokens} tokens"


class Config(Section):
    """All settings of one run."""

    length_keys: ClassVar[str] = "`rollout.max_prompt_tokens` + `rollout.max_new_tokens`"
    """The settings that limit the length of a sequence, for error messages."""

    packed_together: ClassVar[int] = 1
    """Sequences that are computed in one micro-batch because the loss compares them, such as those of a pair."""

    single_update: ClassVar[bool] = False
    """Whether a step is always one update."""

    algorithm: str
    """What is trained and how: `grpo`, `sft`, `dpo` or `distill`."""

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

    task: TaskConfig | None = None
    """The problems, and how completions are scored."""

    rollout: RolloutConfig = RolloutConfig()
    """How completions are sampled."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its schedule."""

    train: TrainConfig = TrainConfig()
    """How the data of a step become updates."""

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
        rollout, longest = self.rollout, self.max_sequence_tokens
        if (least := self.min_microbatch_tokens) > self.train.microbatch_tokens:
            several = self.packed_together > 1
            what = f"{self.packed_together} sequences are computed together, and" if several else "a sequence"
            times = f"{self.packed_together} x " if several else ""
            raise ValueError(
                f"{what} may have {times}{self.length_keys} = {least} tokens, which do not fit into"
                f" `train.microbatch_tokens` = {self.train.microbatch_tokens}: raise it to {least} or more"
            )
        if self.model.scratch is not None and longest > self.model.scratch.context:
            raise ValueError(
                f"{self.length_keys} = {longest} tokens exceed the model's context of `model.scratch.context` ="
                f" {self.model.scratch.context}: lower {self._lower}, or raise the context"
            )
        if rollout.engine == "vllm" and self.has_temperature and (rollout.top_p < 1 or rollout.top_k or rollout.min_p):
            raise ValueError(
                "`rollout.engine: vllm` with a temperature other than 1 gives log-probs only over the tokens that"
                " `rollout.top_p`, `top_k` and `min_p` keep, while the trainer's are over the whole vocabulary: remove"
                " those three, set every temperature to 1 (`evaluate.temperature` may be 0), or use another engine"
            )
        if self.model.base is not None and self.model.lora is None:
            raise ValueError(
                f"`model.base: {self.model.base}` quantizes weights that are not trained: set `model.lora.rank=32` to"
                " train adapters beside them, or remove `model.base`. A run that goes on from another has its own"
            )
        if self.model.base_embeddings and self.model.base is None:
            raise ValueError(
                "`model.base_embeddings` quantizes what `model.base` leaves: set `model.base=int4` or `float8`, or"
                " remove it"
            )
        if self.memory.stream_base and not self.can_stream_base:
            raise ValueError(
                "`memory.stream_base` is for the frozen weights beside adapters: set `model.lora.rank=32`, or remove it"
                if self.model.lora is None
                else "`memory.stream_base` with `model.scratch` needs `checkpoint=null`: a checkpoint has its base"
            )
        if self.model.base is not None and rollout.engine == "vllm":
            raise ValueError(
                f"`rollout.engine: vllm` cannot compute with `model.base: {self.model.base}`: set"
                " `rollout.engine: paged`, or remove `model.base`"
            )
        if self.parallel is not None and self.parallel.rollout_gpus and rollout.replay is not None:
            raise ValueError(
                "`rollout.replay` generates nothing, but `parallel.rollout_gpus` are only for generation: remove one of"
                " the two"
            )
        if self.parallel is not None and self.single_rank_only is not None:
            raise ValueError(f"`parallel` and `{self.single_rank_only}` cannot be combined yet: remove one of the two")
        return self

    @model_validator(mode="after")
    def _one_update_per_step(self) -> Config:
        for key in ("minibatches", "epochs") if self.single_update else ():
            if (value := getattr(self.train, key)) != 1:
                raise ValueError(
                    f"`train.{key}: {value}` cuts a step of RL into updates, and a step of {self.algorithm.upper()} is"
                    " one: remove it. `data.batch_size` is the size of an update, and `train.steps` their number"
                )
        return self

    @model_validator(mode="after")
    def _scores_have_answers(self) -> Config:
        if self.task is None or self.task.is_scored:
            return self
        missing = "`task.file.answer_field: null` leaves no answers to score completions by"
        if "score" in self.cycle:
            raise ValueError(f"{missing}, which {self.algorithm.upper()} trains on: name the field of the answers")
        if self.evaluate is not None:
            raise ValueError(
                f"{missing}, which `evaluate` does: name the field of the answers, or set `evaluate: null`"
            )
        return self

    @model_validator(mode="after")
    def _ranks_wait_for_judges(self) -> Config:
        judges = self.task.rewards_with("judge") if self.task is not None and self.parallel is not None else {}
        for place, reward in judges.items():
            minutes = self.run.distributed_timeout_minutes
            if reward.judge is not None and reward.judge.step_timeout_s >= 60 * minutes:
                raise ValueError(
                    f"`{reward_key(*place)}.judge.step_timeout_s: {reward.judge.step_timeout_s:g}` is no less than"
                    f" `run.distributed_timeout_minutes: {minutes:g}`, for which ranks wait for each other's scores:"
                    " lower it, or raise that"
                )
        return self

    @model_validator(mode="after")
    def _environments_are_possible(self) -> Config:
        if self.task is None or self.task.environment is None:
            return self
        rollout, parallel = self.rollout, self.parallel
        found = {
            f"algorithm: {self.algorithm}": "generate" in self.cycle and self.algorithm != "grpo",
            "rollout.partial.extra_prompts": rollout.partial.extra_prompts,
            "rollout.save_to": rollout.save_to,
            "rollout.replay": rollout.replay,
            "rollout.engine: vllm": rollout.engine == "vllm",
            "parallel.rollout_gpus": parallel is not None and parallel.rollout_gpus,
        }
        if other := next((name for name, value in found.items() if value), None):
            raise ValueError(f"`task.environment` and `{other}` cannot be combined yet: remove one of the two")
        return self

    @model_validator(mode="after")
    def _evaluation_has_problems(self) -> Config:
        if self.evaluate is None or self.task is None or (aside := self.task.held_out_problems) is None:
            return self
        key = "task.held_out" if self.task.mix is None else "task.mix.*.held_out"
        if aside == 0:
            raise ValueError(
                f"`evaluate` needs held-out problems, but `{key}: 0` sets none aside: raise it, or set `evaluate: null`"
            )
        final = self.evaluate.final.problems if self.evaluate.final is not None else None
        for name, problems in (("evaluate.problems", self.evaluate.problems), ("evaluate.final.problems", final or 0)):
            if problems > aside:
                raise ValueError(
                    f"`{name}: {problems}` exceeds the `{key}: {aside}` problems set aside: lower it, or raise `{key}`"
                    f" to {problems}"
                )
        return self

    @property
    def single_rank_only(self) -> str | None:
        """The first setting of this config that does not work with several ranks yet."""
        found = {
            "rollout.partial.extra_prompts": self.rollout.partial.extra_prompts,
            "rollout.serve_port": self.rollout.serve_port is not None,
            "rollout.engine: vllm": self.rollout.engine == "vllm",
            "model.base": self.model.base is not None,
            "memory.stream_base": self.memory.stream_base,
        }
        return next((name for name, value in found.items() if value), None)

    @property
    def can_stream_base(self) -> bool:
        """Whether there are frozen weights that nothing but the GPU reads."""
        return self.model.has_lasting_base or (self.model.lora is not None and self.checkpoint is None)

    def check_context(self, context: int | None) -> None:
        """Checks that the longest sequence fits the model's context, if that is known."""
        if context is not None and self.max_sequence_tokens > context:
            raise UserError(
                f"{self.length_keys} = {self.max_sequence_tokens} tokens exceed the model's context of {context}:"
                f" lower {self._lower}"
            )

    @property
    def _lower(self) -> str:
        """What to lower where sequences are too long, for error messages."""
        return "one of them" if " + " in self.length_keys else "it"

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

    def is_eval_due(self, step: int) -> bool:
        """Whether an evaluation is due after this step."""
        return self.evaluate is not None and (step % self.evaluate.every == 0 or step == self.train.steps)

    @property
    def has_temperature(self) -> bool:
        """Whether anything is sampled at a temperature other than 1; greedy decoding counts as 1."""
        return self.rollout.temperature != 1 or (self.evaluate is not None and self.evaluate.temperature not in (0, 1))

    @property
    def pass_reward(self) -> float:
        """The reward from which on a completion passes."""
        return self.evaluate.pass_reward if self.evaluate is not None else EvaluateConfig().pass_reward

    # What the parts of the system ask of an algorithm.

    @property
    def cycle(self) -> tuple[str, ...]:
        """The phases of a step, in their order. Saving and evaluation come after it."""
        raise NotImplementedError

    @property
    def trained_file(self) -> DataConfig | None:
        """The examples that are trained on, where the algorithm has a section `data`; None: what is trained on is
        sampled."""
        found: DataConfig | None = getattr(self, "data", None)
        return found

    @property
    def max_sequence_tokens(self) -> int:
        """Tokens of the longest sequence that is trained on or sampled."""
        sampled = self.rollout.max_prompt_tokens + self.rollout.max_new_tokens
        if self.trained_file is None:
            return sampled
        return max(self.trained_file.max_tokens, sampled if self.generates else 0)

    @property
    def min_microbatch_tokens(self) -> int:
        """The least `train.microbatch_tokens` into which all sequences fit that are computed together."""
        return self.max_sequence_tokens

    @property
    def step_size(self) -> StepSize:
        """The size of the largest step."""
        file, rollout = self.trained_file, self.rollout
        if file is not None:
            return StepSize(file.batch_size, self.packed_together, 1, file.max_tokens - 1)
        return StepSize(rollout.prompts_per_step, rollout.group_size, rollout.max_prompt_tokens, rollout.max_new_tokens)

    @property
    def held_out_examples(self) -> int:
        """Examples of a file on which an evaluation computes the loss."""
        return 0

    @property
    def logprob_temperature(self) -> float:
        """The temperature of the log-probs that are trained on: that of the samples."""
        return self.rollout.temperature if self.trained_file is None else 1.0

    @property
    def forward_passes(self) -> Mapping[str, tuple[str, ...]]:
        """Phase -> the models that compute log-probs of a step's sequences in it, without gradient: `policy`, or the
        name of a frozen model."""
        return {}

    @property
    def has_reference(self) -> bool:
        """Whether the run computes log-probs with its initial weights."""
        return any("reference" in models for models in self.forward_passes.values())

    @property
    def reference_is_base(self) -> bool:
        """Whether the initial policy is the frozen model beside new adapters, which add nothing at first: then the
        reference is no copy of anything."""
        return self.model.lora is not None and self.model.lora.adapter is None

    @property
    def needs_initial_weights(self) -> bool:
        """Whether a run that resumes still computes with the weights that it started from."""
        return self.has_reference

    @property
    def frozen_models(self) -> Mapping[str, ModelConfig]:
        """Holding -> a frozen model with an architecture of its own, such as a teacher."""
        return {}

    @property
    def frozen_heads_in(self) -> tuple[str, ...]:
        """The phases in which the loss computes with the output heads of `frozen_models`."""
        return ()

    @property
    def scored_in(self) -> tuple[str, ...]:
        """The phases in which completions of `task` are scored."""
        evaluated = self.evaluate is not None and self.task is not None
        return (*(phase for phase in self.cycle if phase == "score"), *(("evaluate",) if evaluated else ()))

    @property
    def reward_models(self) -> Sequence[RewardModelConfig]:
        """The reward models that score completions, each once."""
        return self.task.reward_models if self.task is not None and self.scored_in else []

    @property
    def generates(self) -> bool:
        """Whether the run samples completions, in its steps or to evaluate."""
        return "generate" in self.cycle or (self.evaluate is not None and self.task is not None)
