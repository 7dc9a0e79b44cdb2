"""The section `rollout`: how completions are sampled."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ebbtide.config.base import Count, Natural, Port, Section


class VllmConfig(Section):
    """vLLM in this process, on the policy's device. The policy's weights are copied to it before every generation
    (weight sync)."""

    memory_share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """Fraction of the device's memory that vLLM uses for its weights and KV cache while it generates
    (`gpu_memory_utilization`)."""

    sleep_level: Literal[0, 1, 2] = 2
    """What vLLM frees between generations: 0 nothing; 1 the KV cache, with its weights offloaded to host memory; 2 the
    KV cache and the weights. The weights are replaced anyway, so 1 only costs more. On a CPU vLLM frees nothing."""

    bucket_mib: Count = 512
    """Weights that vLLM lays out differently from the policy, such as experts, are copied in buckets of this many MiB;
    all others are passed without an intermediate copy."""

    args: dict[str, Any] = {}
    """Further engine arguments for vLLM, passed as they are, such as `{enforce_eager: true}`."""


class PartialRolloutConfig(Section):
    """Partial rollouts: a step ends when `rollout.prompts_per_step` groups are complete, and unfinished ones
    continue in the next step under the updated weights. Short completions are therefore trained on sooner."""

    extra_prompts: Natural = 0
    """Extra prompts started per step; 0 is off: every step waits for its longest completion. Tokens sampled under
    older weights are off-policy: `loss.importance_sampling` corrects for them. Needs `rollout.engine: paged`."""

    kv_cache: Literal["recompute", "keep"] = "recompute"
    """KV cache of the completions that continue: `recompute` prefills them again with the updated weights; `keep`
    reuses the existing KV cache, which is on the device or, during phases that list `kv_cache` under `memory.offload`,
    on the host."""


class RolloutConfig(Section):
    """How completions are sampled."""

    prompts_per_step: Count = 32
    """Prompts (problems) per step."""

    group_size: Count = 8
    """Completions per prompt."""

    max_prompt_tokens: Count = 512
    """Longest prompt, in tokens."""

    max_new_tokens: Count = 256
    """Longest completion, in tokens."""

    temperature: Annotated[float, Field(ge=1e-6)] = 1.0
    """Divides the logits, both in sampling and in training. At least 1e-6; smaller values overflow."""

    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample from the smallest set of tokens with this total probability (nucleus sampling); 1 is all tokens."""

    top_k: Natural = 0
    """Sample from this many most likely tokens; 0 is all tokens."""

    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Sample from tokens with at least this fraction of the most likely token's probability; 0 is all tokens."""

    stop: list[Annotated[str, Field(min_length=1)]] = []
    """Stop strings, which end a completion. Text before the stop string is scored; training includes the stop string's
    tokens."""

    max_num_seqs: Count = 512
    """Maximum number of sequences that are decoded at the same time."""

    engine: Literal["paged", "huggingface", "vllm"] = "paged"
    """`paged`: continuous batching over a paged KV cache, a group's prompt prefilled and read once; on a GPU with its
    own kernels and CUDA graphs. `huggingface`: transformers' own `generate`, slow and simple. Both use the policy's
    own weights and sample the same tokens up to float noise. `vllm`: vLLM in this process, with a copy of the weights
    and its own random numbers."""

    exact: bool | None = None
    """Exact on-policy log-probs (bitwise consistency, batch invariance): what the sampler records for a token equals,
    to the bit, what the trainer computes for it under the same weights, whatever else is in a batch. Then `mismatch`
    is 0, and the recorded log-probs are the old ones, without a forward for them; every token of a step's first update
    is compared. (Partial rollouts have tokens of older weights, and none of that.) Needs GRPO, `rollout.engine: paged`,
    fused blocks in bfloat16, and one GPU of the Hopper generation; `null`: on where that is so."""

    vllm: VllmConfig | None = None
    """Settings of `engine: vllm`; `null` is the defaults."""

    partial: PartialRolloutConfig = PartialRolloutConfig()
    """Partial rollouts: completions that are unfinished when a step has enough groups continue in the next step."""

    save_to: str | None = None
    """If set, write every completion to this file, with tokens and log-probs, for `rollout.replay`. A file that is not
    empty is refused, unless the run resumes or has `run.overwrite`."""

    replay: str | None = None
    """If set, completions are read from this file, step by step; only evaluation generates."""

    serve_port: Port | None = None
    """If set, serve the policy during training at this port of 127.0.0.1 with an OpenAI-compatible API; 0 is any free
    port. Requests wait while the loop generates or evaluates its own samples; see docs/serve.md. Needs
    `rollout.engine: paged`."""

    @model_validator(mode="after")
    def _vllm_needs_its_engine(self) -> RolloutConfig:
        if self.vllm is not None and self.engine != "vllm":
            raise ValueError(
                f"`rollout.vllm` is set, but `rollout.engine: {self.engine}` does not use it: set `rollout.engine:"
                " vllm`, or remove `rollout.vllm`"
            )
        return self

    @model_validator(mode="after")
    def _replay_excludes_generation(self) -> RolloutConfig:
        others = {
            "rollout.partial.extra_prompts": self.partial.extra_prompts,
            "rollout.save_to": self.save_to,
            "rollout.serve_port": self.serve_port is not None,
        }
        if self.replay is not None and (other := next((name for name, value in others.items() if value), None)):
            raise ValueError(f"`rollout.replay` generates nothing, but `{other}` is set: remove one of the two")
        return self

    @model_validator(mode="after")
    def _partial_needs_paged(self) -> RolloutConfig:
        if self.partial.extra_prompts and self.engine != "paged":
            raise ValueError(
                f"`rollout.partial.extra_prompts: {self.partial.extra_prompts}` needs `rollout.engine: paged`, but the"
                f" engine is `{self.engine}`: set that engine, or `rollout.partial.extra_prompts: 0`"
            )
        if self.partial.kv_cache == "keep" and not self.partial.extra_prompts:
            raise ValueError(
                "`rollout.partial.kv_cache: keep` is for completions that continue in the next step, and with"
                " `rollout.partial.extra_prompts: 0` none does: raise `extra_prompts`, or remove `kv_cache`"
            )
        return self

    @model_validator(mode="after")
    def _serve_port_needs_paged(self) -> RolloutConfig:
        if self.serve_port is not None and self.engine != "paged":
            raise ValueError(
                f"`rollout.serve_port: {self.serve_port}` needs `rollout.engine: paged`, but the engine is"
                f" `{self.engine}`: set that engine, or remove the port"
            )
        return self
