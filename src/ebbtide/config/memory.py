"""The section `memory`: which tensors are on the device in each phase."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator, model_validator

from ebbtide.config.base import Natural, Positive, Section


class OffloadConfig(Section):
    """Holdings that are offloaded to host memory in each phase; a list given here replaces the preset's. Only phases
    that the algorithm has can be set."""

    generate: list[str] | None = None
    """While completions are sampled."""

    score: list[str] | None = None
    """While completions are scored."""

    logprob: list[str] | None = None
    """While old and reference log-probs are computed. Offloading the optimizer state (`[moments, master]`) here pays
    only if this phase lacks memory."""

    train: list[str] | None = None
    """During forward and backward."""

    step: list[str] | None = None
    """During the optimizer step."""

    save: list[str] | None = None
    """While a checkpoint is written."""

    evaluate: list[str] | None = None
    """During evaluation on held-out problems."""

    @field_validator("*")
    @classmethod
    def _spelled_alike(cls, names: list[str] | None) -> list[str] | None:
        """Which holdings there are depends on the parts of a run: the plan checks the names."""
        return names if names is None else [name.lower().replace("-", "_") for name in names]


ActivationName = Literal[
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
    "block",
]
"""What a block saves, by module; `block` is all of it, in models whose blocks are not alike."""


class ActivationsConfig(Section):
    """Activations that the forward saves for the backward: per module they are kept on the device, offloaded to pinned
    host memory, or dropped and recomputed (activation/gradient checkpointing)."""

    preset: Literal["keep", "recompute", "offload", "balanced"] = "keep"
    """For modules in none of the lists: `keep` keeps everything; `recompute` recomputes whole blocks from their inputs
    (gradient checkpointing); `offload` does the same with the inputs on the host; `balanced` recomputes what is cheap
    and offloads what the host link carries during the forward. A model whose blocks are not alike has no names of
    modules: `block` is all that each of its blocks saves."""

    keep: list[ActivationName] | None = None
    """Modules whose saved tensors stay on the device."""

    offload: list[ActivationName] | None = None
    """Modules whose saved tensors are offloaded to pinned host memory until the backward."""

    recompute: list[ActivationName] | None = None
    """Modules whose saved tensors are recomputed in the backward."""

    recompute_blocks: Natural | None = None
    """Number of first blocks that recompute what is to be recomputed; the others keep it. `null` is all, and with
    `balanced` as many as are needed."""

    on_slow_link: Literal["downgrade", "refuse", "ignore"] = "downgrade"
    """What happens if the host link cannot carry the offloaded bytes during the forward: `downgrade` recomputes some
    of them instead, `refuse` is an error, `ignore` lets compute wait. All three report the figures."""

    keep_last: Natural = 1
    """Number of last blocks whose activations are never offloaded, because their backward follows at once."""

    minimum_kib: Natural = 64
    """Tensors smaller than this are never offloaded."""

    @model_validator(mode="after")
    def _module_in_one_list(self) -> ActivationsConfig:
        lists = {name: getattr(self, name) for name in ("keep", "offload", "recompute")}
        seen: dict[str, str] = {}
        for name, modules in lists.items():
            if modules is not None and not modules:
                raise ValueError(f"`memory.activations.{name}: []` names no module: name some, or remove the key")
            for module in modules or []:
                if module in seen:
                    raise ValueError(
                        f"`{module}` is in `memory.activations.{seen[module]}` and in `memory.activations.{name}`:"
                        " remove one of the two"
                    )
                seen[module] = name
        return self


class MemoryConfig(Section):
    """Which tensors are on the device in each phase; the others wait in pinned host memory."""

    plan: Literal["auto", "manual"] = "auto"
    """`auto`: before the run, those of `optimizer.place`, `optimizer.cpu_fraction`, `memory.preset`, `memory.offload`,
    `memory.activations`, `parallel.rollout_weights`, `train.microbatch_tokens` and `train.head_chunk_tokens` that you
    did not set are chosen for the fastest step that fits the budget, and the reasons are printed; if everything fits
    anyway, nothing is changed but the micro-batches of small models, which may become larger. `manual`: every setting
    is as you wrote it, or its default. See docs/plan.md."""

    budget_gib: Positive | None = None
    """Maximum device memory of the run, enforced on a GPU; `null` is all that the device has. The one dial of
    `memory.plan: auto`."""

    preset: Literal["keep", "lean"] = "keep"
    """`keep` offloads nothing; `lean` offloads, in every phase that uses the device, all that the phase does not
    need."""

    offload: OffloadConfig = OffloadConfig()
    """Holdings (groups of tensors) to offload in each phase: `grads`, `master`, `moments` (the optimizer state),
    `reference` and other frozen models, `kv_cache` and `sequence_states` (with `rollout.partial.kv_cache: keep`). Names
    not used in a run are ignored."""

    activations: ActivationsConfig = ActivationsConfig()
    """Whether activations are kept, offloaded or recomputed, per module."""

    stream_base: bool = False
    """With `model.lora`, on one GPU with fused blocks: while log-probs are computed and adapters are trained, keep the
    frozen blocks on the host, and copy each to the device ahead of its use."""

    host_budget_gib: Positive | None = None
    """Maximum host memory to pin, checked before the model loads; `null` is 80% of what is free."""
