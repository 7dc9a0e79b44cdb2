"""What a block saves for its backward, by module and by what is done with it: bytes a token, from the model's shape alone.

The same names and the same choices as `memory.activations`; tests hold these figures against what autograd saves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import get_args

from ebbtide.config.activation_lists import check_names, check_sense, within_link
from ebbtide.config.tree import Activation
from ebbtide.config.tree import Activations as ActivationsConfig
from ebbtide.planner.shape import Shape

_NAMES: tuple[Activation, ...] = get_args(Activation)
_OF_EXPERTS: frozenset[Activation] = frozenset({"expert_fc1", "moe_act", "moe_router"})
_OF_DENSE: frozenset[Activation] = frozenset({"mlp_fc1", "mlp_act", "mlp_fc2"})
ON_THE_WAY = 2  # blocks of which what is offloaded is still on the device
CARRIED = 0.9  # of what the link carries beside a forward is planned for


@dataclass(frozen=True)
class Choice:
    """What is not named is kept."""

    offload: frozenset[Activation] = frozenset()
    recompute: frozenset[Activation] = frozenset()

    def words(self) -> str:
        parts = [
            f"{word} {', '.join(sorted(names))}" for word, names in (("offload", self.offload), ("recompute", self.recompute)) if names
        ]
        return "; ".join(parts) or "keep all"


@cache
def names_of(shape: Shape) -> tuple[Activation, ...]:
    absent = _OF_DENSE if shape.experts else _OF_EXPERTS
    return tuple(name for name in _NAMES if name not in absent)


@cache
def local_names(shape: Shape) -> frozenset[Activation]:
    """Those that one module makes again by itself."""
    found: set[Activation] = {"attn_norm", "mlp_norm"}
    if shape.normed_heads:
        found.add("qkv_linear")
    if not shape.experts:
        found.add("mlp_fc2")
    return frozenset(found)


def whole_block(shape: Shape, choice: Choice) -> bool:
    """More is made again than single modules can: the block runs twice."""
    return bool(choice.recompute - local_names(shape))


def _norm(shape: Shape, width: int, rows: int, each: int) -> int:
    """What a norm saves: its input in fp32, a root for each row, and the normed input, which Gemma has in fp32 as well."""
    return 4 * width + 4 * rows + (4 if shape.family == "gemma" else each) * width


def saved(shape: Shape, each: int, choice: Choice | None = None) -> dict[Activation, int]:
    """Name -> bytes that one block saves of a token, with numbers of `each` bytes."""
    choice = choice or Choice()
    if whole_block(shape, choice):
        return _stored(shape, each, choice)
    hidden, queries, keys, heads, rows = shape.hidden, shape.queries, shape.keys, shape.heads, shape.heads + shape.kv_heads
    again = choice.recompute
    found: dict[Activation, int] = {
        "attn_norm": _norm(shape, hidden, 1, each),
        "qkv_linear": each * hidden + (_norm(shape, queries + keys, rows, each) if shape.normed_heads else 0),
        "core_attn": each * (2 * queries + 2 * keys) + 4 * heads,
        "mlp_norm": _norm(shape, hidden, 1, each),
        **_mlp(shape, each),
    }
    if "attn_norm" in again:
        found |= {"attn_norm": 4, "block_input": each * hidden}
    if "mlp_norm" in again:
        found["mlp_norm"] = each * hidden + 4
    if "qkv_linear" in again and shape.normed_heads:
        found["qkv_linear"] = each * (hidden + queries + keys) + 4 * rows
    if "mlp_fc2" in again and not shape.experts:
        found |= {"mlp_act": 2 * each * shape.mlp, "mlp_fc2": 0}
    return found


def _mlp(shape: Shape, each: int) -> dict[Activation, int]:
    hidden, mlp, visited = shape.hidden, shape.mlp, shape.experts_per_token
    if not shape.experts:
        return {"mlp_fc1": each * hidden, "mlp_act": 3 * each * mlp, "mlp_fc2": each * mlp}
    return {
        "moe_router": each * hidden + 4 * shape.experts + 8 * visited,
        "expert_fc1": visited * (2 * each * hidden + 24),
        "moe_act": visited * (4 * each * mlp + 3),
    }


def _stored(shape: Shape, each: int, choice: Choice) -> dict[Activation, int]:
    """Of a block that runs twice: its input, and the results of products that feed what is not made again."""
    found: dict[Activation, int] = {"block_input": each * shape.hidden}
    retained = [name for name in names_of(shape) if name not in choice.recompute]
    mixed = each * shape.queries + 4 * shape.heads
    if "core_attn" in retained:
        found["core_attn"] = each * (shape.queries + 2 * shape.keys) + mixed
    if "attn_proj" in retained:
        found["attn_proj"] = each * shape.hidden + (0 if "core_attn" in retained else mixed)
    if "mlp_act" in retained:
        found["mlp_act"] = 2 * each * shape.mlp
    if "mlp_fc2" in retained:
        found["mlp_fc2"] = each * shape.mlp
    if "moe_act" in retained:
        found["moe_act"] = shape.experts_per_token * 2 * each * shape.mlp
    if "moe_router" in retained:
        found["moe_router"] = each * shape.experts
    return found


@dataclass(frozen=True)
class Held:
    """Bytes a token on the device, of a forward's activations."""

    blocks: int
    """Of all blocks, when the forward is over."""
    one: int
    """Of the first block alone: what is left of them when the backward comes to it."""
    running: int
    """More, while the backward is in one block: what it makes again, and gradients on their way."""
    normed: int
    """More, while the backward is in the norm after the last block."""
    parked: int
    """On the host meanwhile."""


@cache
def held(shape: Shape, each: int, choice: Choice, keep_last: int) -> Held:
    per_block = saved(shape, each, choice)
    whole = sum(per_block.values())
    offloaded = sum(per_block.get(name, 0) for name in choice.offload)
    stay = min(shape.layers, keep_last + ON_THE_WAY) if offloaded else shape.layers
    made = sum(saved(shape, each).values()) - whole + each * shape.hidden if whole_block(shape, choice) else 0
    # Gradients where they are widest. In a dense MLP, of its two halves and of their product: which itself, saved for the last matrix, is gone by then.
    wide = shape.experts_per_token * (3 * shape.mlp + 2 * shape.hidden) if shape.experts else 2 * shape.mlp
    return Held(
        blocks=shape.layers * (whole - offloaded) + stay * offloaded,
        one=whole,
        running=max(0, made) + each * wide,
        normed=_norm(shape, shape.hidden, 1, each) + (16 + 2 * each) * shape.hidden,  # what it saved, and its gradients in fp32
        parked=(shape.layers - min(shape.layers, keep_last)) * offloaded,
    )


def chosen(config: ActivationsConfig, shape: Shape, each: int, carried: float, *, gated: bool = True) -> Choice:
    """What `memory.activations` comes to, where the link carries so many bytes of a token and block beside the forward. `gated`: lists are held against that, as the config says."""
    names, local = names_of(shape), local_names(shape)
    check_names(config, names, f"a block of {shape.family}")
    listed = {name: place for place in ("keep", "offload", "recompute") for name in getattr(config, place) or []}
    if config.preset == "balanced":
        places = {name: listed.get(name, "recompute" if name in local else "keep") for name in names}
        now = saved(shape, each, _choice(places))
        fixed = sum(now.get(name, 0) for name, place in places.items() if place == "offload")
        free = [name for name in names if name not in listed and places[name] == "keep" and name != "attn_proj"]
        parked = most_within(free, now, carried - fixed)
        places |= dict.fromkeys(parked, "offload")
    else:
        whole = {name: "keep" if name == "block_input" else "recompute" for name in names}
        base = {"keep": dict.fromkeys(names, "keep"), "recompute": whole, "offload": whole | {"block_input": "offload"}}
        places = base[config.preset] | listed
    check_sense(places, local)
    choice = _choice(places)
    sizes = saved(shape, each, choice)
    if not gated or config.gate != "downgrade" or sum(sizes.get(name, 0) for name in choice.offload) <= carried:
        return choice
    return Choice(*within_link(choice.offload, choice.recompute, local, sizes, carried))


def most_within(names: Iterable[Activation], sizes: dict[Activation, int], room: float) -> tuple[Activation, ...]:
    """The names that together come nearest to the room, from below."""
    names = list(names)
    sets = [some for count in range(len(names) + 1) for some in combinations(names, count)]
    weights = [(sum(sizes.get(name, 0) for name in some), some) for some in sets]
    return max(((weight, some) for weight, some in weights if weight <= room), default=(0, ()), key=lambda found: found[0])[1]


def _choice(places: dict[Activation, str]) -> Choice:
    offload, recompute = (frozenset(name for name, place in places.items() if place == wanted) for wanted in ("offload", "recompute"))
    return Choice(offload, recompute)
