"""The rules for the lists of `memory.activations`, which a plan and a run check alike. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from ebbtide.config.memory import ActivationName, ActivationsConfig
from ebbtide.errors import UserError

RECOMPUTED_ANYWAY: frozenset[ActivationName] = frozenset(
    {"attn_norm", "qkv_linear", "mlp_norm", "mlp_fc1", "expert_fc1"}
)
"""Activations that recomputing a whole block yields anyway: elementwise results of its matmuls. Keeping or offloading
them would save nothing."""


def check_activation_names(config: ActivationsConfig, names: Sequence[ActivationName], kind: str) -> None:
    """Refuses a module that a block of this kind does not have; `names` are those that it has."""
    for place in ("keep", "offload", "recompute"):
        for name in getattr(config, place) or []:
            if name not in names:
                raise UserError(
                    f"`memory.activations.{place}` lists `{name}`, which {kind} does not have: choose from"
                    f" {', '.join(names)}"
                )


def check_activation_places(places: Mapping[ActivationName, str], local: frozenset[ActivationName]) -> None:
    """Refuses combinations that save nothing. `places`: keep, offload or recompute for each name. `local`: the names
    that one module recomputes by itself, without the whole block."""
    recomputed = {name for name, place in places.items() if place == "recompute"}
    whole_block = recomputed - local
    if places["block_input"] == "recompute":
        raise UserError(
            "`memory.activations.recompute` lists `block_input`, but blocks are recomputed from their inputs: move"
            " `block_input` to `keep` or `offload`"
        )
    first = "attn_norm" if "attn_norm" in places else "core_attn"  # Some families have no norm there.
    if places["block_input"] == "offload" and not whole_block and first not in recomputed:
        raise UserError(
            f"`memory.activations.offload` lists `block_input`, which is saved only when `{first}` or more is"
            f" recomputed from it: add `memory.activations.recompute: [{first}]`, or remove `block_input`"
        )
    if places["attn_proj"] == "offload" and places["core_attn"] == "keep":
        raise UserError(
            "`memory.activations.offload` lists `attn_proj` without `core_attn`: both save the same tensor, and"
            " `core_attn` would keep it on the device. Offload both, or neither"
        )
    if whole_block and (idle := sorted(name for name in RECOMPUTED_ANYWAY if places.get(name) == "offload")):
        raise UserError(
            f"`memory.activations.offload` lists {', '.join(f'`{name}`' for name in idle)}, but the whole block is"
            f" recomputed for {', '.join(f'`{name}`' for name in sorted(whole_block))}, which yields it anyway:"
            " offloading it would save nothing. Remove it from the list"
        )


def fit_host_link(
    offload: AbstractSet[ActivationName],
    recompute: AbstractSet[ActivationName],
    local: AbstractSet[ActivationName],
    sizes: Mapping[ActivationName, int],
    carried: float,
) -> tuple[frozenset[ActivationName], frozenset[ActivationName]]:
    """(what is offloaded, what is recomputed) when the host link carries only `carried` bytes: the largest of
    `offload` are recomputed instead."""
    downgraded: set[ActivationName] = set()
    for name in sorted(offload - {"block_input"}, key=lambda name: -sizes.get(name, 0)):
        if sum(sizes.get(one, 0) for one in offload - downgraded) > carried:
            downgraded.add(name)
    recomputed, offloaded = frozenset(recompute | downgraded), frozenset(offload - downgraded)
    return offloaded - RECOMPUTED_ANYWAY if recomputed - local else offloaded, recomputed
