"""Bytes of activations that a fused block (fused_block.py) saves, and what `memory.activations` resolves to for such
blocks: the counterpart of activation_costs.py. Imports no torch.

A fused block saves few tensors, each of which can be kept, offloaded or recomputed by itself. A name without one, such
as `attn_norm`, is elementwise work that is always recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

from ebbtide.config.activation_rules import check_activation_names
from ebbtide.config.memory import ActivationName, ActivationsConfig
from ebbtide.errors import UserError
from ebbtide.memory.costs import GROUPS_IN_FLIGHT
from ebbtide.model.families import FAMILIES, family_named
from ebbtide.model.shape import Shape
from ebbtide.policy.activation_costs import (
    ActivationBytes,
    ActivationPolicy,
    Places,
    activation_names,
    largest_fitting,
    split_places,
)

KEPT_SHARE = 0.5  # Fraction of the bytes of `preset: keep` that `preset: balanced` leaves on the device.


def can_fuse(shape: Shape, itemsize: int, device_type: str, tensor_parallel: int) -> bool:
    """Whether blocks of this shape run fused: on a GPU, in 16 bits, and not where tensor parallelism exchanges results
    in the middle of a block."""
    known = shape.family in FAMILIES and shape.head_dim <= 256 and shape.head_dim % 2 == 0 and not shape.mlp_bias
    return device_type == "cuda" and itemsize == 2 and tensor_parallel == 1 and known


@cache
def saved_bytes(shape: Shape, itemsize: int) -> dict[ActivationName, int]:
    """Name -> bytes that one block saves per token, with `itemsize` bytes per number."""
    found: dict[ActivationName, int] = {
        "block_input": itemsize * shape.hidden,
        "core_attn": itemsize * (shape.queries + 2 * shape.keys),
        "attn_proj": itemsize * shape.queries + 4 * shape.heads,
        # With norms after attention and MLP also their outputs.
        "mlp_norm": itemsize * shape.hidden * (3 if shape.has_post_norms else 1),
    }
    if not shape.experts:
        return found | {"mlp_act": 2 * itemsize * shape.mlp}
    visited = shape.experts_per_token
    return found | {"moe_router": itemsize * shape.experts, "moe_act": 2 * itemsize * visited * shape.mlp}


@cache
def activation_bytes(shape: Shape, itemsize: int, choice: ActivationPolicy, keep_last: int) -> ActivationBytes:
    """The activations of a model under a choice, with `itemsize` bytes per number."""
    sizes = saved_bytes(shape, itemsize)
    whole = sum(sizes.values())
    offloaded = sum(sizes.get(name, 0) for name in choice.offload)
    recomputed = sum(sizes.get(name, 0) for name in choice.recompute)
    recomputing = min(shape.layers, shape.layers if choice.recompute_blocks is None else choice.recompute_blocks)
    stay = min(shape.layers, keep_last + GROUPS_IN_FLIGHT) if offloaded else 0
    hidden = itemsize * shape.hidden
    # At the widest point of a block's backward there are the gradient of the output, the norm of the residual stream,
    # and in the MLP the gradient of the product, which takes the product's place in turn.
    in_mlp = (3 if shape.has_post_norms else 2) * hidden + itemsize * shape.mlp
    if rows := shape.experts_per_token if shape.experts else 0:
        # With experts: the gradients of each token's rows, and of their products; or, in the norm's backward, the rows.
        in_mlp = max(hidden + rows * (hidden + itemsize * shape.mlp), (4 + rows) * hidden)
    # In attention's, what the MLP saved is gone; there are queries, keys and values of all heads, their gradients, that
    # of the output, and a sum in float32.
    in_attention = (7 * itemsize + 4) * shape.queries - sizes["moe_act" if shape.experts else "mlp_act"]
    family = family_named(shape.family)
    if family.qk_norm_over_heads or family.partial_rotary:  # And these as the kernel that rotates takes them.
        in_attention += itemsize * (shape.queries + 2 * shape.keys)
    return ActivationBytes(
        blocks=shape.layers * (whole - offloaded) + stay * offloaded - recomputing * recomputed,
        first_block=whole - (recomputed if recomputing == shape.layers else 0),
        in_backward=(recomputed if recomputing == shape.layers else 0) + max(in_mlp, in_attention),
        norm_saved=2 * hidden,
        in_final_norm=4 * hidden,  # its input, its output, and their gradients
        offloaded=(shape.layers - min(shape.layers, keep_last)) * offloaded,
    )


def resolve_policy(
    config: ActivationsConfig, shape: Shape, itemsize: int, carried: float, *, gated: bool = True
) -> ActivationPolicy:
    """What `memory.activations` resolves to if the host link carries `carried` bytes per token and block during the
    forward. `gated`: whether the lists are checked against that, as `on_slow_link` says."""
    sizes = saved_bytes(shape, itemsize)
    check_activation_names(config, [*dict.fromkeys((*activation_names(shape), *sizes))], f"a block of {shape.family}")
    choice = choose(config, sizes, carried, shape.layers)
    if not gated or config.on_slow_link != "downgrade":
        return choice
    return fit_link(choice, sizes, carried)


def activation_options(shape: Shape, balanced: ActivationPolicy) -> list[dict[str, Any]]:
    """The settings of `memory.activations` that a plan tries: recompute the widest in some blocks; offload what the
    host link carries and recompute for the rest; recompute the widest two, and everything; and that with the blocks'
    inputs offloaded."""
    widest: ActivationName = "moe_act" if shape.experts else "mlp_act"
    parts = [math.ceil(shape.layers * share) for share in (0.25, 0.5, 0.75)]
    found: list[dict[str, Any]] = [{"recompute": [widest], "recompute_blocks": count} for count in parts]
    found += [{"recompute": [widest]}, {"recompute": sorted([widest, "core_attn"])}]
    if balanced.offload:
        # The plan has checked the host link already: the run does not check it again.
        both: dict[str, Any] = {"offload": sorted(balanced.offload), "on_slow_link": "ignore"}
        if balanced.recompute:
            both |= {"recompute": sorted(balanced.recompute), "recompute_blocks": balanced.recompute_blocks}
        more = {*balanced.recompute, widest} - balanced.offload
        found += [both, *([{**both, "recompute": sorted(more), "recompute_blocks": None}] if more else [])]
    return [*found, {"preset": "recompute"}, {"preset": "offload"}]


def choose(
    config: ActivationsConfig, sizes: Mapping[ActivationName, int], carried: float, layers: int
) -> ActivationPolicy:
    """What the preset and the lists say. `sizes`: bytes that a block saves per token, by name; `carried`: bytes per
    token and block that the host link carries during the forward."""
    listed = {name: place for place in ("keep", "offload", "recompute") for name in getattr(config, place) or []}
    if "block_input" in (config.recompute or ()):
        raise UserError(
            "`memory.activations.recompute` lists `block_input`, but blocks are recomputed from their inputs: move"
            " `block_input` to `keep` or `offload`"
        )
    if idle := [name for name in config.offload or () if name not in sizes]:
        raise UserError(
            f"`memory.activations.offload` lists {', '.join(f'`{name}`' for name in idle)}, which a fused block never"
            " saves: it is recomputed from its input. Remove it from the list"
        )
    blocks = config.recompute_blocks
    whole = config.preset in ("recompute", "offload")
    places: Places = dict.fromkeys(sizes, "recompute" if whole else "keep")
    places["block_input"] = "offload" if config.preset == "offload" else "keep"
    places |= {name: place for name, place in listed.items() if name in sizes}
    if config.preset == "balanced":
        free = [name for name in sizes if name not in listed]
        room = carried - sum(sizes[name] for name, place in places.items() if place == "offload")
        places |= dict.fromkeys(largest_fitting(free, dict(sizes), room), "offload")
        left = {name: sizes[name] for name in free if places[name] == "keep" and name != "block_input"}
        excess = sum(sizes[name] for name, place in places.items() if place == "keep") - KEPT_SHARE * sum(
            sizes.values()
        )
        if left and excess > 0:
            largest = max(left, key=lambda name: left[name])
            if blocks is None and not config.recompute:  # What is listed is recomputed in all blocks.
                blocks = min(layers, math.ceil(layers * excess / left[largest]))
            places[largest] = "recompute"
    offload, recompute = split_places(places)
    return ActivationPolicy(offload, recompute, blocks if recompute else None)


def fit_link(choice: ActivationPolicy, sizes: Mapping[ActivationName, int], carried: float) -> ActivationPolicy:
    """The choice when the host link carries only `carried` bytes per token and block: the largest of what is offloaded
    are recomputed instead, in all blocks."""
    offload = set(choice.offload)
    for name in sorted(offload - {"block_input"}, key=lambda name: -sizes.get(name, 0)):
        if sum(sizes.get(one, 0) for one in offload) > carried:
            offload.remove(name)
    if offload == choice.offload:
        return choice
    return ActivationPolicy(frozenset(offload), choice.recompute | (choice.offload - offload))
