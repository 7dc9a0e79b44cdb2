"""Bytes of activations that a block saves for its backward, per token and module, from the model's shape alone.

Names and choices are those of `memory.activations`; tests compare these figures with what autograd saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import Any, get_args

from ebbtide.config.activation_rules import check_activation_names, check_activation_places, fit_host_link
from ebbtide.config.memory import ActivationName, ActivationsConfig
from ebbtide.memory.costs import GROUPS_IN_FLIGHT
from ebbtide.memory.plan import HoldingSpec
from ebbtide.model.families import family_named
from ebbtide.model.shape import Shape

ACTIVATIONS = HoldingSpec(
    "activations",
    transient=True,
    takes_rest_in=frozenset({"generate", "evaluate", "logprob", "train"}),
    advice={
        "logprob": "lower `train.microbatch_tokens` or `train.head_chunk_tokens`",
        "train": (
            "lower `train.microbatch_tokens`, or set `memory.activations.preset` to balanced, recompute or offload"
        ),
    },
)
"""What a forward saves for its backward, and what either has in use at a time: all that they allocate and that is no
other row."""

_NAMES: tuple[ActivationName, ...] = get_args(ActivationName)
_OF_EXPERTS: frozenset[ActivationName] = frozenset({"expert_fc1", "moe_act", "moe_router"})
_OF_DENSE: frozenset[ActivationName] = frozenset({"mlp_fc1", "mlp_act", "mlp_fc2"})
LINK_SHARE = 0.9  # Fraction of what the host link carries during a forward that is planned for.
PROBE_TOKENS = 8192  # Tokens of the forward by which `memory.activations` is checked against the host link.


def probe_length(tokens: int, longest: int) -> int:
    """Tokens of each sequence of a trial on so many tokens, where a run's longest sequence has `longest`."""
    return min(1024, tokens, longest)


def offload_bytes(size: float) -> float:
    """Bytes of host memory for so many bytes of activations: 2% more, because tensors are aligned."""
    return 1.02 * size


Places = dict[ActivationName, str]
"""Name -> `keep`, `offload` or `recompute`."""


@dataclass(frozen=True)
class ActivationPolicy:
    """Which activations are offloaded and which are recomputed; all others are kept."""

    offload: frozenset[ActivationName] = frozenset()
    recompute: frozenset[ActivationName] = frozenset()
    recompute_blocks: int | None = None
    """How many of the first blocks recompute; None is all."""

    def describe(self) -> str:
        """The choice as a text for people."""
        some = "" if self.recompute_blocks is None else f" in {self.recompute_blocks} blocks"
        parts = [
            f"{word} {', '.join(sorted(names))}{where}"
            for word, names, where in (("offload", self.offload, ""), ("recompute", self.recompute, some))
            if names
        ]
        return "; ".join(parts) or "keep all"


@cache
def activation_names(shape: Shape) -> tuple[ActivationName, ...]:
    """The activations that a block of this shape has."""
    absent = {"block", *(_OF_DENSE if shape.experts else _OF_EXPERTS)}
    norms: set[ActivationName] = set() if shape.has_pre_norms else {"attn_norm", "mlp_norm"}
    return tuple(name for name in _NAMES if name not in absent | norms)


@cache
def locally_recomputable(shape: Shape) -> frozenset[ActivationName]:
    """The activations that one module recomputes by itself."""
    found: set[ActivationName] = {"attn_norm", "mlp_norm"} if shape.has_pre_norms else set()
    if shape.has_qk_norm:
        found.add("qkv_linear")
    if not shape.experts and not family_named(shape.family).has_packed_mlp:
        found.add("mlp_fc2")
    return frozenset(found)


def recomputes_whole_block(shape: Shape, choice: ActivationPolicy) -> bool:
    """Whether the whole block is recomputed, because more is to be recomputed than single modules can."""
    return bool(choice.recompute - locally_recomputable(shape))


def _norm(shape: Shape, width: int, rows: int, itemsize: int) -> int:
    """Bytes that a norm saves: its input in fp32, a reciprocal root for each row, and, for the gradient of its weight,
    the normalized input, which some families also have in fp32."""
    normalized = 4 if family_named(shape.family).norm_in_float32 else itemsize
    return 4 * width + 4 * rows + (normalized * width if shape.lora is None else 0)


def _adapters(shape: Shape, itemsize: int) -> dict[ActivationName, int]:
    """Name -> how many more bytes linear layers save than in a model whose weights are all trained: what an adapter has
    of `rank` channels, less the inputs of layers without one, for whose weights there is no gradient."""
    if shape.lora is None:
        return {}
    family, adapters = family_named(shape.family), shape.adapters
    layers: list[tuple[ActivationName, int, tuple[str, ...]]] = [
        ("qkv_linear", shape.hidden, tuple({family.query, family.key, family.value})),
        ("attn_proj", 0, (family.output,)),  # Attention saves what it returns anyway.
    ]
    if visited := shape.experts_per_token:
        layers += [
            ("moe_router", shape.hidden, ()),
            ("expert_fc1", visited * shape.hidden, ()),
            ("moe_act", visited * shape.mlp, ()),
        ]
    else:
        layers += [
            ("mlp_fc1", shape.hidden, tuple({family.gate, family.up})),
            ("mlp_fc2", shape.mlp, (family.down,)),
        ]
    found: dict[ActivationName, int] = {}
    for name, width, paths in layers:
        count = sum(path in adapters for path in paths)
        found[name] = itemsize * (shape.lora.rank * count - (0 if count else width))
    return found


def saved_bytes(shape: Shape, itemsize: int, choice: ActivationPolicy | None = None) -> dict[ActivationName, int]:
    """Name -> bytes that one block saves per token, with `itemsize` bytes per number."""
    choice = choice or ActivationPolicy()
    if recomputes_whole_block(shape, choice):
        return _stored(shape, itemsize, choice)
    hidden, queries, keys, heads = shape.hidden, shape.queries, shape.keys, shape.heads
    rows = 2 if family_named(shape.family).qk_norm_over_heads else heads + shape.kv_heads  # of norms, per token
    recompute = choice.recompute
    before: dict[ActivationName, int] = dict.fromkeys(("attn_norm", "mlp_norm"), _norm(shape, hidden, 1, itemsize))
    found: dict[ActivationName, int] = {
        **(before if shape.has_pre_norms else {}),
        "qkv_linear": itemsize * hidden + (_norm(shape, queries + keys, rows, itemsize) if shape.has_qk_norm else 0),
        "core_attn": itemsize * (2 * queries + 2 * keys) + 4 * heads,
        **_mlp(shape, itemsize),
    }
    if shape.has_post_norms:
        found["attn_proj"] = _norm(shape, hidden, 1, itemsize)
    for name, more in _adapters(shape, itemsize).items():
        found[name] = found.get(name, 0) + more
    if "attn_norm" in recompute:
        found |= {"attn_norm": 4, "block_input": itemsize * hidden}
    if "mlp_norm" in recompute:
        found["mlp_norm"] = itemsize * hidden + 4
    if "qkv_linear" in recompute and shape.has_qk_norm:
        found["qkv_linear"] = itemsize * (hidden + queries + keys) + 4 * rows
    if "mlp_fc2" in recompute and not shape.experts:
        found |= {"mlp_act": 2 * itemsize * shape.mlp, "mlp_fc2": 0}
    if shape.has_post_norms:
        found["mlp_fc2"] += _norm(shape, hidden, 1, itemsize)
    return found


def _mlp(shape: Shape, itemsize: int) -> dict[ActivationName, int]:
    hidden, mlp, visited = shape.hidden, shape.mlp, shape.experts_per_token
    if not shape.experts:
        return {"mlp_fc1": itemsize * hidden, "mlp_act": 3 * itemsize * mlp, "mlp_fc2": itemsize * mlp}
    return {
        "moe_router": itemsize * hidden + 4 * shape.experts + 8 * visited,
        "expert_fc1": visited * (2 * itemsize * hidden + 24),
        "moe_act": visited * (4 * itemsize * mlp + 3),
    }


def _stored(shape: Shape, itemsize: int, choice: ActivationPolicy) -> dict[ActivationName, int]:
    """What is saved of a block that is recomputed: its input, and the results of matmuls and attention that feed
    activations which are not recomputed."""
    found: dict[ActivationName, int] = {"block_input": itemsize * shape.hidden}
    retained = [name for name in activation_names(shape) if name not in choice.recompute]
    mixed = itemsize * shape.queries + 4 * shape.heads
    if "core_attn" in retained:
        found["core_attn"] = itemsize * (shape.queries + 2 * shape.keys) + mixed
    if "attn_proj" in retained:
        found["attn_proj"] = itemsize * shape.hidden + (0 if "core_attn" in retained else mixed)
    if "mlp_act" in retained:
        found["mlp_act"] = 2 * itemsize * shape.mlp
    if "mlp_fc2" in retained:
        found["mlp_fc2"] = itemsize * shape.mlp
    if "moe_act" in retained:
        found["moe_act"] = shape.experts_per_token * 2 * itemsize * shape.mlp
    if "moe_router" in retained:
        found["moe_router"] = itemsize * shape.experts
    return found


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes of activations per token."""

    blocks: int
    """On the device, of all blocks, at the end of the forward."""
    first_block: int
    """On the device, of the first block alone: what is left when the backward reaches it."""
    in_backward: int
    """Additional bytes on the device while the backward is in a block: what it recomputes, and its gradients."""
    norm_saved: int
    """Of the norm after the last block: what it saves, and its output."""
    in_final_norm: int
    """Additional bytes on the device while the backward is in the norm after the last block."""
    offloaded: int
    """Offloaded to the host."""


@cache
def activation_bytes(shape: Shape, itemsize: int, choice: ActivationPolicy, keep_last: int) -> ActivationBytes:
    """The activations of a model under a choice, with `itemsize` bytes per number."""
    if choice.recompute_blocks is not None and choice.recompute:
        return _mixed_bytes(shape, itemsize, choice, keep_last)
    per_block = saved_bytes(shape, itemsize, choice)
    whole = sum(per_block.values())
    offloaded = sum(per_block.get(name, 0) for name in choice.offload)
    stay = min(shape.layers, keep_last + GROUPS_IN_FLIGHT) if offloaded else shape.layers
    recomputed = (
        sum(saved_bytes(shape, itemsize).values()) - whole + itemsize * shape.hidden
        if recomputes_whole_block(shape, choice)
        else 0
    )
    # Gradients at their widest point: in a dense MLP, those of its two halves and of their product, less the product
    # itself, which was saved for the last matrix and is freed by then.
    wide = shape.experts_per_token * (3 * shape.mlp + 2 * shape.hidden) if shape.experts else 2 * shape.mlp
    return ActivationBytes(
        blocks=shape.layers * (whole - offloaded) + stay * offloaded,
        first_block=whole,
        in_backward=max(0, recomputed) + itemsize * wide,
        norm_saved=_norm(shape, shape.hidden, 1, itemsize) + itemsize * shape.hidden,
        # What the norm saved, and its gradients in fp32.
        in_final_norm=_norm(shape, shape.hidden, 1, itemsize) + (16 + 2 * itemsize) * shape.hidden,
        offloaded=(shape.layers - min(shape.layers, keep_last)) * offloaded,
    )


def _mixed_bytes(shape: Shape, itemsize: int, choice: ActivationPolicy, keep_last: int) -> ActivationBytes:
    """The activations of a model whose first blocks recompute, and whose others keep the same."""
    first = min(shape.layers, choice.recompute_blocks or 0)
    kept, recomputed = (
        activation_bytes(shape, itemsize, one, keep_last)
        for one in (ActivationPolicy(choice.offload), ActivationPolicy(choice.offload, choice.recompute))
    )

    def mixed(of_first: int, of_others: int) -> int:
        return (first * of_first + (shape.layers - first) * of_others) // shape.layers

    return ActivationBytes(
        blocks=mixed(recomputed.blocks, kept.blocks),
        first_block=recomputed.first_block if first else kept.first_block,
        in_backward=max(kept.in_backward, recomputed.in_backward if first == shape.layers else 0),
        norm_saved=kept.norm_saved,
        in_final_norm=kept.in_final_norm,
        offloaded=mixed(recomputed.offloaded, kept.offloaded),
    )


def activation_options(shape: Shape, balanced: ActivationPolicy) -> list[dict[str, Any]]:
    """The settings of `memory.activations` that a plan tries: recompute what is cheap; also offload as much as the host
    link carries; recompute everything; and that with the blocks' inputs offloaded."""
    # The plan has checked the host link already: the run does not check it again.
    both: dict[str, Any] = {
        "recompute": sorted(balanced.recompute),
        "offload": sorted(balanced.offload),
        "on_slow_link": "ignore",
    }
    listed = [{"recompute": sorted(locally_recomputable(shape))}, *([both] if balanced.offload else [])]
    return [*listed, {"preset": "recompute"}, {"preset": "offload"}]


def choose_places(
    config: ActivationsConfig,
    names: Sequence[ActivationName],
    local: frozenset[ActivationName],
    weigh: Callable[[Places], dict[ActivationName, int]],
    carried: float,
) -> Places:
    """`keep`, `offload` or `recompute` for each of a block's names, by the preset and the lists. `local`: the names
    that one module recomputes by itself; `weigh`: bytes that a block saves per token; `carried`: bytes per token and
    block that the host link carries during the forward."""
    listed = {name: place for place in ("keep", "offload", "recompute") for name in getattr(config, place) or []}
    if config.preset == "balanced":  # Recomputes what single modules can, and offloads what the host link carries.
        places = {name: listed.get(name, "recompute" if name in local else "keep") for name in names}
        now = weigh(places)
        fixed = sum(now.get(name, 0) for name, place in places.items() if place == "offload")
        free = [name for name in names if name not in listed and places[name] == "keep" and name != "attn_proj"]
        places |= dict.fromkeys(largest_fitting(free, now, carried - fixed), "offload")
    else:
        whole = {name: "keep" if name == "block_input" else "recompute" for name in names}
        base = {"keep": dict.fromkeys(names, "keep"), "recompute": whole, "offload": whole | {"block_input": "offload"}}
        places = base[config.preset] | listed
    check_activation_places(places, local)
    return places


def split_places(places: Places) -> tuple[frozenset[ActivationName], frozenset[ActivationName]]:
    """(what is offloaded, what is recomputed)."""
    offload, recompute = (
        frozenset(name for name, place in places.items() if place == wanted) for wanted in ("offload", "recompute")
    )
    return offload, recompute


def resolve_policy(
    config: ActivationsConfig, shape: Shape, itemsize: int, carried: float, *, gated: bool = True
) -> ActivationPolicy:
    """What `memory.activations` resolves to if the host link carries `carried` bytes per token and block during the
    forward. `gated`: whether the lists are checked against that, as `on_slow_link` says."""
    names, local = activation_names(shape), locally_recomputable(shape)
    check_activation_names(config, names, f"a block of {shape.family}")

    def weigh(places: Places) -> dict[ActivationName, int]:
        return saved_bytes(shape, itemsize, ActivationPolicy(*split_places(places)))

    places = choose_places(config, names, local, weigh, carried)
    choice, sizes = ActivationPolicy(*split_places(places), config.recompute_blocks), weigh(places)
    if not gated or config.on_slow_link != "downgrade" or sum(sizes.get(name, 0) for name in choice.offload) <= carried:
        return choice
    return ActivationPolicy(*fit_host_link(choice.offload, choice.recompute, local, sizes, carried))


def largest_fitting(
    names: Iterable[ActivationName], sizes: dict[ActivationName, int], room: float
) -> tuple[ActivationName, ...]:
    """The names whose sizes add up to the most that fits into the room."""
    names = list(names)
    sets = [some for count in range(len(names) + 1) for some in combinations(names, count)]
    weights = [(sum(sizes.get(name, 0) for name in some), some) for some in sets]
    return max(
        ((weight, some) for weight, some in weights if weight <= room), default=(0, ()), key=lambda found: found[0]
    )[1]
