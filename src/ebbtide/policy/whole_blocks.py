"""`memory.activations` of models whose blocks are not alike, as those that mix attention and Mamba: what each block
saves is kept, offloaded or recomputed as a whole. Imports no torch.

Such a block saves `block`, all of what its modules save, or, where that is recomputed, its `block_input`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ebbtide.config.activation_rules import check_activation_names
from ebbtide.config.memory import ActivationName, ActivationsConfig
from ebbtide.errors import UserError
from ebbtide.policy.activation_costs import ActivationPolicy

WHOLE: ActivationName = "block"
NAMES: tuple[ActivationName, ...] = ("block_input", WHOLE)
RECOMPUTED_SHARE = 0.5  # of the blocks, with `preset: balanced`, where the host link does not carry what they save


def choose(
    config: ActivationsConfig, sizes: Mapping[ActivationName, int], carried: float, layers: int, kind: str
) -> ActivationPolicy:
    """What the preset and the lists say, for blocks of this `kind`. `sizes`: bytes that a block saves per token;
    `carried`: bytes per token and block that the host link carries during the forward."""
    check_activation_names(config, NAMES, kind)
    places = {name: place for place in ("keep", "offload", "recompute") for name in getattr(config, place) or []}
    if places.get("block_input") == "recompute":
        raise UserError(
            "`memory.activations.recompute` lists `block_input`, but blocks are recomputed from their inputs: move"
            " `block_input` to `keep` or `offload`"
        )
    blocks = config.recompute_blocks
    if WHOLE not in places and config.preset == "balanced":
        if sizes.get(WHOLE, 0) <= carried:
            places[WHOLE] = "offload"
        else:
            places[WHOLE] = "recompute"
            blocks = math.ceil(RECOMPUTED_SHARE * layers) if blocks is None else blocks
    elif WHOLE not in places and config.preset in ("recompute", "offload"):
        places[WHOLE] = "recompute"
    recomputes = places.get(WHOLE) == "recompute"
    if config.preset == "offload" and recomputes:
        places.setdefault("block_input", "offload")
    if places.get("block_input") == "offload" and not recomputes:
        raise UserError(
            "`memory.activations.offload` lists `block_input`, which is saved only when blocks are recomputed from it:"
            " add `memory.activations.recompute: [block]`, or remove `block_input`"
        )
    offload = frozenset(name for name in NAMES if places.get(name) == "offload")
    return ActivationPolicy(offload, frozenset({WHOLE} if recomputes else ()), blocks if recomputes else None)


def fit_link(choice: ActivationPolicy, sizes: Mapping[ActivationName, int], carried: float) -> ActivationPolicy:
    """The choice when the host link carries only `carried` bytes per token and block: blocks are recomputed instead."""
    if WHOLE in choice.offload and sizes.get(WHOLE, 0) > carried:
        return ActivationPolicy(recompute=frozenset({WHOLE}))
    return choice
