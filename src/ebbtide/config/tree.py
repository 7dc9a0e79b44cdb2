"""Every setting of Ebbtide: one strict tree, documented field by field. Imports no torch.

The text under a field is its documentation everywhere: in `ebbtide config`, in docs/config.md and in error messages.
A section that is `null` is off; a section that is present is on.
"""

from __future__ import annotations

from datetime import date
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ebbtide.errors import UserError
from ebbtide.printable import has_controls

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
NotNegative = Annotated[float, Field(ge=0.0)]
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Port = Annotated[int, Field(ge=0, le=65535)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


class Run(Section):
    """Where the run writes."""

    name: str = "run"
    """Short name; without `run.folder` the run goes to `runs/NAME-001`, `runs/NAME-002`, ..."""

    folder: str | None = None
    """Exact folder to write to. It must be new or empty, unless `run.overwrite` is on or the run resumes in it."""

    overwrite: bool = False
    """Replace the run that already lies in `run.folder`. With `resume`, never its checkpoints."""

    logging_level: Literal["debug", "info", "warning", "error"] = "warning"
    """How much is written to `log.txt` in the run folder: Ebbtide's own log and that of torch.distributed."""

    distributed_timeout_minutes: Positive = 10.0
    """How long ranks wait for each other: in training, when they save or load together, and for those that only generate to get any further."""

    @model_validator(mode="after")
    def _names(self) -> Run:
        for key, name in (("name", self.name), ("folder", self.folder)):
            if name is not None and has_controls(name):
                raise ValueError(f"`run.{key}` is {name!r}, which has control characters or half ones: remove them")
        if not self.name.strip(". ") or "/" in self.name:
            raise ValueError(f"`run.name` is {self.name!r}, and names a folder in `runs`: write a name, or set `run.folder` to a path")
        if self.folder == "":
            raise ValueError("`run.folder` is empty: write a path, or `null` for a numbered folder in `runs`")
        return self

    @model_validator(mode="after")
    def _overwrite_what(self) -> Run:
        if self.overwrite and self.folder is None:
            raise ValueError("`run.overwrite` replaces the run in `run.folder`, which is not set: set both, or neither")
        return self


class Scratch(Section):
    """A model built from nothing, with random weights."""

    architecture: Literal["llama", "qwen2", "qwen3", "mistral", "gemma", "qwen3_moe"] = "qwen3"
    """Model family, as transformers names it."""

    layers: Annotated[int, Field(ge=1, le=10_000)] = 2
    """Number of blocks."""

    hidden: Count = 128
    """Width of the residual stream."""

    heads: Count = 4
    """Query heads; each has `hidden / heads` channels unless `head_dim` is set."""

    kv_heads: Count = 4
    """Key and value heads (grouped-query attention when fewer than `heads`)."""

    head_dim: Count | None = None
    """Channels per head; `null` is `hidden / heads`."""

    mlp: Count = 384
    """Width of the MLP, or of each expert."""

    experts: Count | None = None
    """Number of experts; `qwen3_moe` needs it, the others have none."""

    experts_per_token: Count | None = None
    """Experts that each token visits; `qwen3_moe` needs it, the others have none."""

    context: Count = 256
    """Longest sequence that the model accepts, in tokens."""

    tied: bool = True
    """Input and output embeddings share one matrix."""

    alphabet: str | None = None
    """One token per character of this text; `null` is one token per byte, which reads any text."""

    vocabulary: Count | None = None
    """Rows of the embedding; `null` is the tokenizer's own size. More than that is for measuring with a real model's shape."""

    @model_validator(mode="after")
    def _heads_fit(self) -> Scratch:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads = {self.heads} must be a multiple of kv_heads = {self.kv_heads}")
        if self.head_dim is None and self.hidden % self.heads:
            raise ValueError(f"hidden = {self.hidden} must be a multiple of heads = {self.heads}, or set head_dim")
        if (self.head_dim or self.hidden // self.heads) % 2:
            raise ValueError(f"a head has {self.head_dim or self.hidden // self.heads} channels, and rotary positions need an even number")
        if self.architecture != "qwen3_moe":
            if (self.experts, self.experts_per_token) != (None, None):
                raise ValueError(f"`architecture: {self.architecture}` has no `experts` and no `experts_per_token`: remove them")
        elif self.experts is None or self.experts_per_token is None or self.experts_per_token > self.experts:
            raise ValueError("`architecture: qwen3_moe` needs `experts`, and `experts_per_token` of at most that many")
        return self


class Model(Section):
    """The policy: exactly one of `path` and `scratch`."""

    path: str | None = None
    """A local Hugging Face folder, a hub id such as `Qwen/Qwen3-0.6B`, a `.gguf` file, or `package:NAME/FILE` for a file that an installed Python package carries. Python code that it brings is never run."""

    scratch: Scratch | None = None
    """Build a model from nothing instead of loading one."""

    tokenizer: str | None = None
    """Folder or hub id of another tokenizer; `null` is the model's own."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights; `auto` is bfloat16 on a GPU and float32 on a CPU."""

    chat_template: bool = True
    """Render problems with the tokenizer's chat template if it has one; off, or without one, the messages' texts are joined as they are. Only a template makes control tokens."""

    chat_date: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")] | None = None
    """The day for chat templates that say the date, as Llama 3's do, such as `"2026-11-16"`; `null` is the day on which the run began, which its config.yaml then names, so that a resumed run has the same prompts."""

    @model_validator(mode="after")
    def _a_day(self) -> Model:
        try:
            date.fromisoformat(self.chat_date or "2000-01-01")
        except ValueError as error:
            raise ValueError(f"`model.chat_date` is {self.chat_date!r}, which is no day: {error}") from None
        return self

    @model_validator(mode="after")
    def _one_source(self) -> Model:
        if (self.path is None) == (self.scratch is None):
            off = "both are set: switch one off with `model.path=null` or `model.scratch=null`"
            both = off if self.path is not None else "neither is set"
            raise ValueError(f"exactly one of `model.path` and `model.scratch` says which model to train; {both}")
        if self.tokenizer is not None and self.scratch is not None and self.scratch.alphabet is not None:
            raise ValueError("`model.tokenizer` and `model.scratch.alphabet` both say how text becomes tokens: remove one of the two")
        return self


class BuiltinTask(Section):
    """A task that ships with Ebbtide."""

    name: str
    """`copy`, `reverse` or `add`."""

    options: dict[str, Any] = {}
    """The task's own options, such as `{digits: 4}`."""


class GymTask(Section):
    """A dataset of the package `reasoning-gym`."""

    dataset: str
    """Name of the dataset, such as `leg_counting`."""

    options: dict[str, Any] = {}
    """Passed to the dataset as they are, such as `{min_animals: 2}`."""


class FileTask(Section):
    """Problems from a JSONL or Parquet file."""

    train: str
    """Path of a `.jsonl` or `.parquet` file, or `hf://datasets/OWNER/NAME/FILE` for one of a dataset on the hub."""

    held_out: str | None = None
    """The same of the held-out problems; `null` sets the last `task.held_out` rows of `train` aside."""

    prompt_field: str = "prompt"
    """Field with the prompt: a text, or a list of messages with `role` and `content`."""

    answer_field: str = "answer"
    """Field with the expected answer."""

    scorer: Literal["exact", "numeric", "gsm8k", "regex", "math_verify"] = "exact"
    """How an answer is judged: `exact`, the same text; `numeric`, the same number; `gsm8k`, the same number after `####`, or at the end where there is no such mark, in a worked answer; `regex`, the answer is a pattern the completion must match; `math_verify`, equal as mathematics (package `math-verify`)."""


class PythonTask(Section):
    """A task of your own, as a Python object."""

    object: str
    """`module:name` of a Task, or of a class or function that returns one."""

    options: dict[str, Any] = {}
    """Keyword arguments, where `object` is called to get the task."""


class Scoring(Section):
    """Completions are scored in worker processes; one that hangs or dies costs its sample, never the run."""

    workers: Count = 2
    """Number of processes."""

    seconds: Positive = 10.0
    """Time limit for one completion; beyond it the sample gets reward 0 and is counted."""


class Task(Section):
    """What the model practises: exactly one of `builtin`, `gym`, `file` and `python`."""

    builtin: BuiltinTask | None = None
    """A task that ships with Ebbtide."""

    gym: GymTask | None = None
    """A dataset of `reasoning-gym`."""

    file: FileTask | None = None
    """Problems from a JSONL or Parquet file."""

    python: PythonTask | None = None
    """A task of your own."""

    system: str | None = None
    """System message put before every problem."""

    extract: str | None = None
    """Regular expression with one group: only its last match in a completion is scored, and no match scores 0. `null` scores the whole completion."""

    unmatched_steps: Count | None = 3
    """The run ends after this many steps (and 256 completions) if none ever matched `extract`; `null`: it goes on."""

    size: Count | None = None
    """Training problems: how many to make (`builtin`, `gym`; `null` is 1000), or to use of those there are (`file`, `python`; `null` is all)."""

    held_out: Natural = 64
    """Problems kept away from training, where `evaluate` is on. A file of its own (`task.file.held_out`) and a `python` task say themselves which."""

    overlong_prompts: Literal["error", "drop"] = "error"
    """What to do with a prompt of more than `rollout.max_prompt_tokens`."""

    scoring: Scoring = Scoring()
    """The scorer's processes and limits."""

    @model_validator(mode="after")
    def _one_source(self) -> Task:
        named = [name for name in ("builtin", "gym", "file", "python") if getattr(self, name) is not None]
        if len(named) != 1:
            found = " and ".join(f"`task.{name}`" for name in named) or "none"
            off = f": switch off what is not meant, with {' or '.join(f'`task.{name}=null`' for name in named)}" if named else ""
            raise ValueError(
                f"exactly one of `task.builtin`, `task.gym`, `task.file` and `task.python` says what to practise; set: {found}{off}"
            )
        return self


class Vllm(Section):
    """vLLM in this process, on the policy's device. Its weights are the policy's, handed over before every generation."""

    memory_share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """Share of the device's memory that vLLM takes for its weights and cache while it generates (`gpu_memory_utilization`)."""

    sleep_level: Literal[0, 1, 2] = 2
    """What vLLM frees between generations: 0 nothing, 1 the cache, with its weights kept in host memory, 2 cache and weights. They are replaced anyway: 1 only costs more. On a CPU vLLM frees nothing."""

    bucket_mib: Count = 512
    """Weights that vLLM wants cut otherwise than the policy has them, such as experts, are copied for it so many MiB at a time; all others are not copied on the way."""

    args: dict[str, Any] = {}
    """More of vLLM's engine arguments, as they are: `{enforce_eager: true}`."""


class Rollout(Section):
    """How completions are sampled."""

    prompts: Count = 32
    """Problems per step."""

    samples: Count = 8
    """Completions per problem: the size of a group."""

    max_prompt_tokens: Count = 512
    """Longest prompt, in tokens."""

    max_new_tokens: Count = 256
    """Longest completion, in tokens."""

    temperature: Annotated[float, Field(ge=1e-6)] = 1.0
    """Divides the logits, in sampling and in training alike; at least 1e-6, below which they are no numbers any more."""

    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample from the smallest set of tokens with this much probability; 1 is all."""

    top_k: Natural = 0
    """Sample from this many likeliest tokens; 0 is all."""

    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Sample from tokens with at least this share of the likeliest one's probability; 0 is all."""

    stop: list[Annotated[str, Field(min_length=1)]] = []
    """Texts that end a completion. What stands before the text is scored; the tokens up to and with it are trained on."""

    batch: Count = 512
    """Sequences that are generated at once."""

    engine: Literal["paged", "huggingface", "vllm"] = "paged"
    """`paged`: continuous batching over a paged cache, a group's prompt computed and read once; on a GPU with kernels of its own and CUDA graphs. `huggingface`: transformers' own `generate`, slow and plain. Both use the policy's own weights and sample the same tokens, but for float noise. `vllm`: vLLM in this process, with a copy of the weights; samples by its own random numbers."""

    vllm: Vllm | None = None
    """Settings of `engine: vllm`; `null` is their defaults."""

    ahead: Natural = 0
    """Prompts begun beyond those that a step needs. A step's generation then ends when `prompts` of the groups under way have ended, oldest first; the others go on in the next step, with the weights of then. Short completions come sooner that way, and `loss.correction` weighs what older weights sampled. Needs `rollout.engine: paged`."""

    cache: Literal["dropped", "kept"] = "dropped"
    """Keys and values of completions that go on in the next step: `dropped` computes them again with the weights of then; `kept` goes on with those there are, on the device or, in the phases of `memory.away` that name `kv_cache`, on the host."""

    save_to: str | None = None
    """Present: a file that every completion is written to, with tokens and log-probs, for `rollout.replay`. One that is not empty is refused, unless the run resumes or has `run.overwrite`."""

    replay: str | None = None
    """Present: completions are taken from this file, step by step, and none are generated but for evaluation."""

    serve_port: Port | None = None
    """Present: the policy that trains is served at this port of 127.0.0.1 with an OpenAI-compatible API; 0 is any free one. What is asked waits until the loop has generated or evaluated its own samples; docs/serve.md. Needs `rollout.engine: paged`."""

    @model_validator(mode="after")
    def _vllm_is_used(self) -> Rollout:
        if self.vllm is not None and self.engine != "vllm":
            raise ValueError(
                f"`rollout.vllm` is set and `rollout.engine: {self.engine}` does not read it: set `rollout.engine: vllm`, or remove it"
            )
        return self

    @model_validator(mode="after")
    def _replayed_or_not(self) -> Rollout:
        others = {"rollout.ahead": self.ahead, "rollout.save_to": self.save_to, "rollout.serve_port": self.serve_port is not None}
        if self.replay is not None and (other := next((name for name, value in others.items() if value), None)):
            raise ValueError(f"`rollout.replay` generates nothing, and `{other}` is set: remove one of the two")
        return self

    @model_validator(mode="after")
    def _goes_on(self) -> Rollout:
        if self.ahead and self.engine != "paged":
            raise ValueError(
                f"`rollout.ahead: {self.ahead}` needs `rollout.engine: paged`, and it is `{self.engine}`: set that, or `rollout.ahead: 0`"
            )
        if self.cache == "kept" and not self.ahead:
            raise ValueError(
                "`rollout.cache: kept` keeps what goes on in the next step, and with `rollout.ahead: 0` nothing does: raise that, or remove it"
            )
        return self

    @model_validator(mode="after")
    def _served_by_whom(self) -> Rollout:
        if self.serve_port is not None and self.engine != "paged":
            raise ValueError(
                f"`rollout.serve_port: {self.serve_port}` needs `rollout.engine: paged`, and it is `{self.engine}`: set that, or remove the port"
            )
        return self


class Advantage(Section):
    """How rewards become advantages."""

    kind: Literal["group_std", "group_mean", "rloo", "reinforce_pp"] = "group_std"
    """`group_std`: minus the group's mean, over its standard deviation (GRPO); `group_mean`: minus the mean only (Dr. GRPO); `rloo`: minus the mean of the other samples; `reinforce_pp`: minus the batch's mean, over its standard deviation (REINFORCE++)."""

    drop_flat_groups: bool = True
    """Leave out groups in which every advantage is 0. They still count in the normalisation, so the policy's gradient is the same and costs less; an entropy bonus and a KL are then of the other groups only."""


class Kl(Section):
    """A penalty for leaving the reference policy."""

    coefficient: Positive = 0.001
    """Weight of the penalty in the loss."""

    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Per-token estimate, with d = log p - log p_ref: `k1` is d, `k2` is d^2 / 2 (on-policy, its gradient is that of the true reverse KL), `k3` is exp(-d) + d - 1. The gradient of `k1` is zero on average: use it to watch, not to hold."""


class Correction(Section):
    """Truncated importance sampling: weighs each token by p_trainer / p_rollout, cut at `cap`."""

    cap: Positive = 2.0
    """Largest weight."""


class Loss(Section):
    """The policy loss."""

    kind: Literal["grpo", "gspo", "cispo"] = "grpo"
    """`grpo`: clipped ratio per token; `gspo`: clipped ratio per sequence; `cispo`: REINFORCE with a clipped, detached ratio as weight."""

    clip_low: Positive | None = None
    """The ratio counts down to 1 - clip_low; `null` is the usual one of the kind: 0.2 (grpo), 3e-4 (gspo), 1.0 (cispo)."""

    clip_high: Positive | None = None
    """The ratio counts up to 1 + clip_high; `null` is the usual one of the kind: 0.2 (grpo), 4e-4 (gspo), 0.28 (cispo). Larger than clip_low is the asymmetric clip."""

    normalise: Literal["sequence", "token", "constant"] | None = None
    """Weight of a token, over all sequences of a step: 1 / (length of its sequence x sequences) (`sequence`, GRPO); 1 / tokens (`token`, DAPO); 1 / (sequences x rollout.max_new_tokens) (`constant`, Dr. GRPO); each times `train.minibatches`. `null` is `token`, and `sequence` for `gspo`, which has no other."""

    entropy: NotNegative = 0.0
    """Weight of an entropy bonus."""

    kl: Kl | None = None
    """Present: a frozen copy of the starting policy holds the trained one back."""

    correction: Correction | None = None
    """Present: correct for the difference between the sampler's and the trainer's log-probs, which are over the whole vocabulary whatever `rollout.top_p`, `top_k` and `min_p` are."""

    old_logprobs: Literal["trainer", "rollout"] = "trainer"
    """What the ratio is against. `trainer`: the trainer's log-probs before the first update on a batch, by a forward in the logprob phase where a batch has several updates. `rollout`: those that the sampler saw, without that forward; the ratio then covers the difference between sampler and trainer as well, but not what `rollout.top_p`, `top_k` or `min_p` cut off: those log-probs are over the whole vocabulary."""

    mask_overlong: bool = False
    """Leave completions out of the loss that hit `rollout.max_new_tokens`; they still count in their group's baseline."""

    @model_validator(mode="after")
    def _corrected_once(self) -> Loss:
        if self.correction is not None and self.old_logprobs == "rollout":
            raise ValueError(
                "`loss.correction` weighs the trainer's old log-probs against the sampler's, and `loss.old_logprobs: rollout` takes the sampler's for both: remove one of the two"
            )
        return self

    @model_validator(mode="after")
    def _gspo_by_sequence(self) -> Loss:
        if self.kind == "gspo" and self.normalise not in (None, "sequence"):
            raise ValueError(
                f"`loss.kind: gspo` is normalised by sequence; `loss.normalise: {self.normalise}` contradicts it: remove one of the two"
            )
        return self

    @property
    def normalisation(self) -> Literal["sequence", "token", "constant"]:
        """The normalisation in force."""
        return self.normalise or ("sequence" if self.kind == "gspo" else "token")


class Optimizer(Section):
    """AdamW, with fp32 master weights where the weights are 16-bit."""

    lr: Positive = 1e-6
    """Peak learning rate."""

    betas: Annotated[list[Annotated[float, Field(ge=0.0, lt=1.0)]], Field(min_length=2, max_length=2)] = [0.9, 0.999]
    """Decay of the two moments."""

    eps: Positive = 1e-8
    """Added to the denominator."""

    weight_decay: NotNegative = 0.0
    """Decoupled weight decay; on matrices only, never on norms and biases."""

    clip_norm: Positive | None = 1.0
    """Largest norm of the whole gradient; `null` never clips."""

    warmup_steps: Natural = 0
    """Optimizer steps in which the learning rate rises from 0 in a line."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after the warm-up."""

    final_lr_fraction: Fraction = 0.0
    """Where `linear` and `cosine` end, as a fraction of `lr`."""

    place: Literal["device", "streamed", "cpu"] = "device"
    """Where the state lives and who computes: `device` is the GPU for both; `streamed` keeps the state in pinned host memory and sends it through the GPU chunk by chunk at each step, to the same bits; `cpu` keeps it in host memory and steps on the CPU."""

    cpu_fraction: Fraction | None = None
    """Share of the parameters that is stepped on the CPU while the GPU steps the rest, which is in `place`; `null` is none of them, or all with `place: cpu`."""

    overlap: bool = True
    """Copies run beside the backward and beside the other chunks' steps. Off, everything happens in plain order, to the same bits: for debugging."""

    state_dtype: Literal["float32", "bfloat16", "bfloat16_stochastic"] = "float32"
    """Type of the two moments. The bfloat16 ones halve them and are NOT exact: `bfloat16` rounds to the nearest, which freezes a second moment that changes by less than 0.4% a step; `bfloat16_stochastic` rounds up or down at random, right on average."""

    grad_dtype: Literal["auto", "float32"] = "auto"
    """Type in which gradients add up over micro-batches; `auto` is the weights' own."""

    check_for_nan_in_grad: Literal["skip", "stop", "ignore"] = "skip"
    """What a NaN or Inf in a gradient does: `skip` takes no step and counts it; `stop` ends the run; both name the first parameter affected and leave weights and state untouched. `ignore` steps all the same."""

    @model_validator(mode="after")
    def _an_end_needs_a_slope(self) -> Optimizer:
        if self.schedule == "constant" and self.final_lr_fraction:
            raise ValueError(f"`optimizer.final_lr_fraction: {self.final_lr_fraction}` needs `optimizer.schedule: linear` or `cosine`")
        return self

    @model_validator(mode="after")
    def _the_rest_has_a_place(self) -> Optimizer:
        if self.place == "cpu" and self.cpu_fraction not in (None, 1.0):
            raise ValueError(
                f"`optimizer.place: cpu` steps all parameters on the CPU, and `optimizer.cpu_fraction: {self.cpu_fraction:g}` only some: "
                "say with `optimizer.place: device` or `streamed` where the rest is, or remove the fraction"
            )
        return self

    @property
    def on_cpu(self) -> float:
        """The share of the parameters that is stepped on the CPU."""
        return 1.0 if self.place == "cpu" else self.cpu_fraction or 0.0

    @property
    def state_on_host(self) -> bool:
        """All of the state lives in host memory, in every phase."""
        return self.place != "device" or self.on_cpu == 1.0


class Train(Section):
    """How a batch of rollouts becomes updates."""

    steps: Count = 100
    """RL steps: generate, score, train."""

    minibatches: Count = 1
    """Optimizer steps per pass over the rollouts of one RL step."""

    epochs: Count = 1
    """Passes over the rollouts of one RL step."""

    microbatch_tokens: Count = 16384
    """Tokens per forward and backward; sequences are packed into it without padding."""

    head_chunk_tokens: Count = 2048
    """Tokens whose logits exist at once. [head_chunk_tokens, vocabulary] is the largest tensor of the output head."""


Rehearsal = Literal["built", "none"]
"""Whether a rehearsal has an optimizer."""

Movable = Literal["grads", "master", "moments", "reference", "kv_cache"]


class Away(Section):
    """What leaves the device in each phase; a row given here replaces the preset's."""

    generate: list[Movable] | None = None
    """While completions are sampled."""

    score: list[Movable] | None = None
    """While completions are scored."""

    logprob: list[Movable] | None = None
    """While old and reference log-probs are computed. Moving the optimizer (`[moments, master]`) here pays only where this phase lacks the room."""

    train: list[Movable] | None = None
    """During forward and backward."""

    step: list[Movable] | None = None
    """During the optimizer's step."""

    save: list[Movable] | None = None
    """While a checkpoint is written."""

    evaluate: list[Movable] | None = None
    """While held-out problems are tried."""


Activation = Literal[
    "block_input",
    "attn_norm",
    "qkv_linear",
    "core_attn",
    "attn_proj",
    "mlp_norm",
    "mlp_fc1",
    "mlp_act",
    "mlp_fc2",
    "expert_fc1",
    "moe_act",
    "moe_router",
]


class Activations(Section):
    """What a training step's forward saves for its backward: kept on the device, parked in pinned host memory, or dropped and made again, by module."""

    preset: Literal["keep", "recompute", "offload", "balanced"] = "keep"
    """For modules in none of the lists: `keep` all; `recompute` whole blocks from their inputs; `offload` the same with the inputs on the host; `balanced` makes again what is cheap and parks what the link carries beside the forward."""

    keep: list[Activation] | None = None
    """Modules whose saved tensors stay on the device."""

    offload: list[Activation] | None = None
    """Modules whose saved tensors wait in pinned host memory."""

    recompute: list[Activation] | None = None
    """Modules whose saved tensors are made again in the backward."""

    gate: Literal["downgrade", "refuse", "ignore"] = "downgrade"
    """What happens where the link cannot carry the offloaded bytes beside the forward: `downgrade` makes some of them again instead, `refuse` is an error, `ignore` lets compute wait. All say the figures."""

    keep_last: Natural = 1
    """Last blocks of which nothing is offloaded: their backward comes at once."""

    minimum_kib: Natural = 64
    """Smaller tensors are never offloaded."""

    @model_validator(mode="after")
    def _one_list_each(self) -> Activations:
        lists = {name: getattr(self, name) for name in ("keep", "offload", "recompute")}
        seen: dict[str, str] = {}
        for name, modules in lists.items():
            if modules is not None and not modules:
                raise ValueError(f"`memory.activations.{name}: []` names no module: name some, or remove the key")
            for module in modules or []:
                if module in seen:
                    raise ValueError(
                        f"`{module}` is in `memory.activations.{seen[module]}` and in `memory.activations.{name}`: remove one of the two"
                    )
                seen[module] = name
        return self


class Memory(Section):
    """What lives on the device in each phase; the rest waits in pinned host memory."""

    plan: Literal["auto", "manual"] = "auto"
    """`auto`: before the run, what is not set by hand of `optimizer.place`, `optimizer.cpu_fraction`, `memory.preset`, `memory.away`, `memory.activations`, `train.microbatch_tokens` and `train.head_chunk_tokens` is chosen for the fastest step that fits the budget, and the reasons are said; where all fits anyway, nothing is changed. `manual`: all is as it is set, or the default. docs/plan.md."""

    budget_gib: Positive | None = None
    """Most device memory that the run may take, enforced on a GPU; `null` is all that the device has. The one dial of `memory.plan: auto`."""

    preset: Literal["keep", "lean"] = "keep"
    """`keep` moves nothing; `lean` sends away, in every phase that uses the device, all that the phase does not need."""

    away: Away = Away()
    """Holdings that leave in a phase: `grads`, `master`, `moments` (the optimizer's state), `reference`, `kv_cache` (where `rollout.cache: kept`). One that does not exist in a run is passed over."""

    activations: Activations = Activations()
    """What the forward saves for the backward, by module."""

    host_budget_gib: Positive | None = None
    """Most host memory to pin, checked before the model loads; `null` is 80% of what is free."""


Gathering = Literal["whole", "layers"]


class Cluster(Section):
    """Several processes (ranks), one for each GPU, that train one policy. On a CPU a rank is a process as well."""

    gpus: Count | None = None
    """Ranks that train: so many are started on this machine, or over nodes with `cluster.ray`. `null` is `data` x `tensor`; under `torchrun`, which starts them itself, its number, less `rollout_gpus`."""

    data: Count | None = None
    """Ranks that share out the samples, and the weights, gradients and optimizer state among them (FSDP2). `null` is all that `tensor` leaves."""

    tensor: Count = 1
    """Ranks that share out each matrix and work on the same samples (tensor parallelism), by the plan that the model's own config declares. On a GPU keep them within one node."""

    replicate: Count = 1
    """Copies of the weights: each is shared out among `data / replicate` ranks. More than 1 spares traffic between nodes, and costs memory."""

    generate: Gathering | None = None
    """How each rank gathers the weights to generate and to evaluate: `whole`, once for the phase, where there is room for all of them; or `layers`, each layer anew in every pass, just before it computes: in the room of three layers, without CUDA graphs, and slower the slower the link between ranks. `null` is `whole`, unless a plan finds no room for it (`memory.plan`)."""

    rollout_gpus: Natural = 0
    """Ranks beside those of `gpus`, `data` and `tensor` that only generate, each with the whole model: weights are sent to them when they have changed, and those that train have no second set of them and no cache. 0 is none: those that train generate as well. `torchrun` starts them all."""

    ray: str | None = None
    """Present: ranks are placed by Ray (package `ray`) over the nodes of its cluster: `auto` is the one that runs on this machine, or one that is started for the run; or the ADDRESS of one. All nodes need the run folder at the same path."""

    tries: Natural = 3
    """With `ray`: how often the ranks are started again when one of them, or its node, is lost; from the last checkpoint, or anew where there is none."""

    @model_validator(mode="after")
    def _ranks_add_up(self) -> Cluster:
        if self.gpus is not None and self.data is not None and self.gpus != self.data * self.tensor:
            raise ValueError(
                f"`cluster.gpus: {self.gpus}` is not `cluster.data: {self.data}` x `cluster.tensor: {self.tensor}`: set it to {self.data * self.tensor}, or leave one of them out"
            )
        if self.generate is not None and self.rollout_gpus:
            raise ValueError(
                f"`cluster.generate: {self.generate}` is for ranks that train and generate, and with `cluster.rollout_gpus: {self.rollout_gpus}` others generate: remove one of the two"
            )
        if self.ray is not None and self.ranks is None:
            raise ValueError(f"`cluster.ray: {self.ray}` places ranks and is not told how many: set `cluster.gpus`")
        if self.ranks is not None and self.ranks % self.tensor:
            raise ValueError(f"`cluster.gpus: {self.gpus}` is not a multiple of `cluster.tensor: {self.tensor}`: change one of the two")
        if self.ranks is not None and (self.ranks // self.tensor) % self.replicate:
            raise ValueError(
                f"`cluster.replicate: {self.replicate}` copies cannot be shared out among {self.ranks // self.tensor} data-parallel ranks: set a divisor of that"
            )
        return self

    @property
    def ranks(self) -> int | None:
        """How many train; None where whoever starts them says so."""
        if self.gpus is not None or self.data is None:
            return self.gpus
        return self.data * self.tensor


class FinalEvaluation(Section):
    """After the last step: more held-out problems than along the way, once greedily and once by several samples of each."""

    problems: Count | None = None
    """Held-out problems to try; `null` is all there are."""

    samples: Count = 8
    """Completions per problem, beside the greedy one."""

    temperature: Positive = 1.0
    """Of those samples."""

    k: list[Count] = [1, 8]
    """Values of k for which pass@k is reported, each at most `samples`."""

    @model_validator(mode="after")
    def _k_within_samples(self) -> FinalEvaluation:
        if not self.k or max(self.k) > self.samples:
            raise ValueError(f"`evaluate.final.k: {self.k}` must name values from 1 to `evaluate.final.samples` = {self.samples}")
        return self


class Evaluate(Section):
    """Held-out problems, as a phase of the loop."""

    every: Count = 20
    """Steps between evaluations; there is one before the first step and one after the last."""

    problems: Count = 64
    """Held-out problems to try, at most `task.held_out`."""

    samples: Count = 1
    """Completions per problem."""

    temperature: NotNegative = 0.0
    """0 is greedy."""

    k: list[Count] = [1]
    """Values of k for which pass@k is reported, each at most `samples`."""

    pass_reward: float = 1.0
    """A completion with at least this reward passes."""

    final: FinalEvaluation | None = None
    """Present: after the last step, more held-out problems are tried, greedily and sampled."""

    @model_validator(mode="after")
    def _k_within_samples(self) -> Evaluate:
        if not self.k or max(self.k) > self.samples:
            raise ValueError(f"`evaluate.k: {self.k}` must name values from 1 to `evaluate.samples` = {self.samples}")
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(
                f"greedy evaluation (`evaluate.temperature: 0`) gives {self.samples} equal completions: set a temperature, or `evaluate.samples: 1`"
            )
        return self

    @property
    def most_problems(self) -> int | None:
        """The held-out problems that any evaluation of the run tries; None is all there are."""
        if self.final is None:
            return self.problems
        return None if self.final.problems is None else max(self.problems, self.final.problems)


class Checkpoint(Section):
    """What is needed to go on after a stop, and the weights to use elsewhere (`ebbtide export`)."""

    every: Count | None = 50
    """Steps between checkpoints; `null` is none along the way. There is one after the last step, and one when the run is stopped by Ctrl-C or SIGTERM."""

    minutes: Positive | None = None
    """Also when the last one is this old."""

    deadline_minutes: Positive | None = None
    """Stop with a checkpoint while another step would still end before the run is this old: for queues that kill."""

    keep: Count = 1
    """Newest checkpoints to keep."""

    keep_best: Natural = 1
    """Checkpoints to keep that have the largest `metric`."""

    metric: str = "reward"
    """Key of metrics.jsonl that says which are best, such as `evaluate/reward`."""

    async_save: bool = True
    """The loop waits only until what is on the device is copied to host memory; another process writes it while training goes on. Off: it waits until all is written, and no host memory is taken."""

    fully_parallel_save: bool = True
    """Of what several ranks have alike, each writes a part. Off: the first writes it, for storage that dislikes parallel writers. Parts of the model that one rank alone has are written by it in any case."""

    fully_parallel_load: bool = True
    """Of what several ranks have alike, each reads a part and tells the others. Off: the first reads it. Parts of the model that one rank alone has are read by it in any case."""

    load_rng: bool = True
    """A resumed run takes up the random states as well, and goes on to the bit as if it had never stopped."""


class Wandb(Section):
    """Weights & Biases (package `wandb`)."""

    project: str
    """Name of the project."""

    mode: Literal["online", "offline"] = "online"
    """`offline` writes to the run folder only."""


class Report(Section):
    """What is shown and written beside metrics.jsonl."""

    samples_every: Natural = 20
    """Steps between looks at a few completions in the terminal; 0 shows them at the end only."""

    rollouts: bool = True
    """Write every completion to rollouts.jsonl."""

    token_logprobs: Natural = 65_536
    """Tokens of a step whose log-probs rollouts.jsonl holds as well: whole completions, from the step's first on; 0 for none."""

    wandb: Wandb | None = None
    """Present: log to Weights & Biases as well."""


class Config(Section):
    """One run, whole."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Fixes the run: problems, order, samples, initial weights."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` is the GPU if there is one."""

    deterministic: bool = False
    """Same seed, same bits on a GPU as well, by deterministic kernels only: somewhat slower. On a CPU it is so anyway."""

    run: Run = Run()
    """Where the run writes."""

    model: Model
    """The policy."""

    task: Task
    """What it practises."""

    rollout: Rollout = Rollout()
    """How completions are sampled."""

    advantage: Advantage = Advantage()
    """How rewards become advantages."""

    loss: Loss = Loss()
    """The policy loss."""

    optimizer: Optimizer = Optimizer()
    """AdamW and its schedule."""

    train: Train = Train()
    """How a batch of rollouts becomes updates."""

    memory: Memory = Memory()
    """What lives on the device in each phase."""

    cluster: Cluster | None = None
    """Present: several ranks train together."""

    evaluate: Evaluate | None = None
    """Present: held-out problems are tried along the way."""

    checkpoint: Checkpoint | None = Checkpoint()
    """Present: checkpoints are written to `checkpoints/` in the run folder."""

    resume: str | None = None
    """Go on from a checkpoint: `auto` is the newest of `run.folder`, or of the newest run of this name, which begins anew in place where it has none; or the path of a run folder or of one checkpoint."""

    report: Report = Report()
    """What is shown and written."""

    @model_validator(mode="after")
    def _parts_agree(self) -> Config:
        rollout, train = self.rollout, self.train
        if rollout.samples == 1 and self.advantage.kind != "reinforce_pp":
            raise ValueError(
                f"`advantage.kind: {self.advantage.kind}` compares the samples of a group, and `rollout.samples: 1` makes groups of one: "
                "set `rollout.samples` to 2 or more, or `advantage.kind: reinforce_pp`"
            )
        longest = rollout.max_prompt_tokens + rollout.max_new_tokens
        if longest > train.microbatch_tokens:
            raise ValueError(
                f"a sequence may have `rollout.max_prompt_tokens` + `rollout.max_new_tokens` = {longest} tokens, which does not fit into "
                f"`train.microbatch_tokens` = {train.microbatch_tokens}: raise it to {longest} or more"
            )
        if train.minibatches > rollout.prompts * rollout.samples:
            raise ValueError(
                f"`train.minibatches: {train.minibatches}` exceeds the {rollout.prompts * rollout.samples} sequences of a step (`rollout.prompts` x `rollout.samples`)"
            )
        if self.model.scratch is not None and longest > self.model.scratch.context:
            raise ValueError(
                f"`rollout.max_prompt_tokens` + `rollout.max_new_tokens` = {longest} tokens exceed the model's context of "
                f"`model.scratch.context` = {self.model.scratch.context}: lower one of them, or raise the context"
            )
        if rollout.engine == "vllm" and self.tempered and (rollout.top_p < 1 or rollout.top_k or rollout.min_p):
            raise ValueError(
                "`rollout.engine: vllm` gives log-probs at a temperature other than 1 only over the tokens that `rollout.top_p`, `top_k` and `min_p` "
                "keep, and the trainer's are over all: leave those out, set every temperature to 1 (`evaluate.temperature`: or 0), or use another engine"
            )
        if self.cluster is not None and self.cluster.rollout_gpus and rollout.replay is not None:
            raise ValueError("`rollout.replay` generates nothing, and `cluster.rollout_gpus` are there for that: remove one of the two")
        if self.cluster is not None and self.alone is not None:
            raise ValueError(f"`cluster` and `{self.alone}` do not go together yet: remove one of the two")
        brings_its_own = self.task.python is not None or (self.task.file is not None and self.task.file.held_out is not None)
        if self.evaluate is not None and self.task.held_out == 0 and not brings_its_own:
            raise ValueError("`evaluate` needs held-out problems and `task.held_out: 0` sets none aside: raise it, or set `evaluate: null`")
        if self.evaluate is not None and not brings_its_own:
            final = self.evaluate.final.problems if self.evaluate.final is not None else None
            for key, problems in (("evaluate.problems", self.evaluate.problems), ("evaluate.final.problems", final or 0)):
                if problems > self.task.held_out:
                    raise ValueError(
                        f"`{key}: {problems}` exceeds the `task.held_out: {self.task.held_out}` problems set aside: lower it, or raise those"
                    )
        return self

    @property
    def alone(self) -> str | None:
        """The first setting that several ranks cannot have yet."""
        found = {
            "rollout.ahead": self.rollout.ahead,
            "rollout.serve_port": self.rollout.serve_port is not None,
            "rollout.engine: vllm": self.rollout.engine == "vllm",
        }
        return next((name for name, value in found.items() if value), None)

    def check_context(self, context: int | None) -> None:
        """That of the model, where it is known."""
        longest = self.rollout.max_prompt_tokens + self.rollout.max_new_tokens
        if context is not None and longest > context:
            raise UserError(
                f"`rollout.max_prompt_tokens` + `rollout.max_new_tokens` = {longest} tokens exceed the model's context of {context}: lower one of them"
            )

    def gathering(self, parts: int) -> Gathering | None:
        """How weights of which each rank has one part in so many come together to generate; None where there is nothing to gather. What `cluster.generate` leaves open is decided here."""
        if parts == 1 or (self.cluster is not None and self.cluster.rollout_gpus):
            return None
        return self.cluster.generate if self.cluster is not None and self.cluster.generate is not None else "whole"

    @property
    def tempered(self) -> bool:
        """Whether anything is sampled at a temperature other than 1: greedy counts as 1."""
        return self.rollout.temperature != 1 or (self.evaluate is not None and self.evaluate.temperature not in (0, 1))

    @property
    def pass_reward(self) -> float:
        """A completion with at least this reward passes."""
        return self.evaluate.pass_reward if self.evaluate is not None else Evaluate().pass_reward

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether an extra forward computes them: with one update per batch the trainer's own log-probs are the old ones."""
        return self.loss.old_logprobs == "trainer" and (self.train.minibatches > 1 or self.train.epochs > 1)
