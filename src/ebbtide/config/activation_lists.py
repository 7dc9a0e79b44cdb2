"""Whether what `memory.activations` lists makes sense for a block: the same for a plan and for a run. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from ebbtide.config.tree import Activation, Activations
from ebbtide.errors import UserError

ON_THE_WAY: frozenset[Activation] = frozenset({"attn_norm", "qkv_linear", "mlp_norm", "mlp_fc1", "expert_fc1"})
"""What a block that runs again makes on the way: elementwise, from what products gave. Keeping or offloading it would spare nothing."""


def check_names(config: Activations, names: Sequence[Activation], kind: str) -> None:
    """`names`: what a block of this kind has."""
    for place in ("keep", "offload", "recompute"):
        for name in getattr(config, place) or []:
            if name not in names:
                raise UserError(f"`memory.activations.{place}` names `{name}`, which {kind} does not have: it has {', '.join(names)}")


def check_sense(places: Mapping[Activation, str], local: frozenset[Activation]) -> None:
    """`places`: of each name, where it goes. `local`: those that one module makes again by itself."""
    again = {name for name, place in places.items() if place == "recompute"}
    whole_block = again - local
    if places["block_input"] == "recompute":
        raise UserError(
            "`memory.activations.recompute` names `block_input`: that would run the block before again. A block is made again from its input: keep or offload it"
        )
    if places["block_input"] == "offload" and not whole_block and "attn_norm" not in again:
        raise UserError(
            "`memory.activations.offload` names `block_input`, which is saved only where `attn_norm` or more is made again from it: "
            "add `memory.activations.recompute: [attn_norm]`, or remove it"
        )
    if places["attn_proj"] == "offload" and places["core_attn"] == "keep":
        raise UserError(
            "`memory.activations.offload` names `attn_proj` without `core_attn`: both save the same tensor, which would stay on the device for the latter. "
            "Offload both, or neither"
        )
    if whole_block and (idle := sorted(name for name in ON_THE_WAY if places.get(name) == "offload")):
        raise UserError(
            f"`memory.activations.offload` names {', '.join(f'`{name}`' for name in idle)}, and a block that is run again for "
            f"{', '.join(f'`{name}`' for name in sorted(whole_block))} makes it on the way: offloading it would spare nothing. Remove it from the list"
        )


def within_link(
    offload: AbstractSet[Activation],
    recompute: AbstractSet[Activation],
    local: AbstractSet[Activation],
    sizes: Mapping[Activation, int],
    carried: float,
) -> tuple[frozenset[Activation], frozenset[Activation]]:
    """(what is offloaded, what is made again), where of the former only so much goes as the link carries: the largest are made again instead."""
    again: set[Activation] = set()
    for name in sorted(offload - {"block_input"}, key=lambda name: -sizes.get(name, 0)):
        if sum(sizes.get(one, 0) for one in offload - again) > carried:
            again.add(name)
    made, left = frozenset(recompute | again), frozenset(offload - again)
    return left - ON_THE_WAY if made - local else left, made
