"""From `memory.activations` to a choice for this very model: checked, measured, and held against what the link carries."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Protocol

import torch
from torch import nn

from ebbtide.config.activation_lists import check_names, check_sense, within_link
from ebbtide.config.tree import Activation
from ebbtide.config.tree import Activations as ActivationsConfig
from ebbtide.errors import UserError
from ebbtide.memory.limit import free_bytes
from ebbtide.memory.meter import GIB
from ebbtide.memory.residency import Residency
from ebbtide.policy.activations import Activations, Choice, local_names, names_of

SHARE = 0.9  # of what the link carries during a forward is planned for
LONG_PROBE = 8192  # tokens to time
PROBE = 512  # tokens: what a forward saves grows with them in a line


class Probe(Protocol):
    def __call__(self, tokens: int, *, backward: bool = True) -> int:
        """A forward like those of training, and its backward, that leave no gradient, on about so many tokens: gives how many it were."""


@dataclass(frozen=True)
class Figures:
    """What was measured of this model on this machine."""

    saved: dict[Activation, int]
    """Bytes that one block saves per token, by name."""
    forward: float
    """Seconds of a forward per token: a third of forward and backward; 0 on a CPU, where no copy runs beside it."""
    link: float
    """Bytes a second from the device to the host."""
    blocks: int
    """Blocks that may offload."""
    timed: int = 0
    """Tokens that it was timed on."""

    def carried(self) -> int:
        """Bytes per token and block that the link carries beside the forward."""
        return int(SHARE * self.link * self.forward / max(1, self.blocks))


Weigh = Callable[[Choice], dict[Activation, int]]
"""Bytes that a block saves per token under a choice, by name."""


def choose(config: ActivationsConfig, block: nn.Module, figures: Figures, weigh: Weigh) -> tuple[Choice, list[str]]:
    """The choice, and what a person should know of it."""
    names, local = names_of(block), local_names(block)
    check_names(config, names, type(block).__name__)
    listed = {name: place for place in ("keep", "offload", "recompute") for name in getattr(config, place) or []}
    notes: list[str] = []
    base = {
        "keep": dict.fromkeys(names, "keep"),
        "recompute": {name: "keep" if name == "block_input" else "recompute" for name in names},
        "offload": {name: "offload" if name == "block_input" else "recompute" for name in names},
    }
    if config.preset == "balanced":
        places, notes = _balanced(listed, names, local, figures, weigh)
    else:
        places = base[config.preset] | listed
    check_sense(places, local)
    choice = _choice(places, local)
    if figures.forward and choice.offload:
        choice, gated = _gate(config, choice, figures, weigh(choice))
        notes += gated
    return choice, notes


def _choice(places: dict[Activation, str], local: frozenset[Activation]) -> Choice:
    offload, recompute = (frozenset(name for name, place in places.items() if place == wanted) for wanted in ("offload", "recompute"))
    return Choice(offload, recompute, local)


def _bytes(names: Iterable[Activation], saved: dict[Activation, int]) -> int:
    return sum(saved.get(name, 0) for name in names)


def _balanced(
    listed: dict[Activation, str], names: Sequence[Activation], local: frozenset[Activation], figures: Figures, weigh: Weigh
) -> tuple[dict[Activation, str], list[str]]:
    """Makes again what one module can, and parks the names that come nearest to what the link carries."""
    places = {name: listed.get(name, "recompute" if name in local else "keep") for name in names}
    saved = weigh(_choice(places, local))  # what is made again elsewhere is not saved here
    fixed = frozenset(name for name, place in places.items() if place == "offload")
    free = [name for name in names if name not in listed and places[name] == "keep" and name != "attn_proj"]
    room = figures.carried() - _bytes(fixed, saved)
    sets = [some for count in range(len(free) + 1) for some in combinations(free, count) if _bytes(some, saved) <= room]
    best = max(sets, key=lambda some: _bytes(some, saved), default=())
    places |= dict.fromkeys(best, "offload")
    whole, parked = sum(figures.saved.values()), _bytes(frozenset(best) | fixed, saved)
    again = [name for name, place in places.items() if place == "recompute"]
    carries = (
        f"the link carries {figures.carried() / 1024:.0f} beside the forward ({SHARE:.0%} of {figures.link / 1e9:.1f} GB/s for {figures.forward * 1e6:.1f} us a token)"
        if figures.forward
        else "on a CPU no copy runs beside the forward"
    )
    notes = [
        f"activations: a block saves {whole / 1024:.0f} KiB a token; {carries}. "
        f"Offloaded: {', '.join([*best, *sorted(fixed)]) or 'nothing'} ({parked / 1024:.0f} KiB); made again: {', '.join(again) or 'nothing'}"
    ]
    return places, notes


def _gate(config: ActivationsConfig, choice: Choice, figures: Figures, saved: dict[Activation, int]) -> tuple[Choice, list[str]]:
    """Offloading more than the link carries would make compute wait."""
    wanted = _bytes(choice.offload, saved)
    if wanted <= figures.carried():
        return choice, []
    said = (
        f"a block offloads {wanted / 1024:.0f} KiB a token ({', '.join(sorted(choice.offload))}), and the link carries {figures.carried() / 1024:.0f} beside the forward "
        f"({SHARE:.0%} of {figures.link / 1e9:.1f} GB/s for {figures.forward * 1e6:.1f} us a token)"
    )
    if config.gate == "ignore":
        return choice, [f"activations: {said}: compute will wait"]
    if config.gate == "refuse":
        raise UserError(f"{said}: offload less, or set `memory.activations.gate` to `downgrade` or `ignore`")
    offload, recompute = within_link(choice.offload, choice.recompute, choice.local, saved, figures.carried())
    again = recompute - choice.recompute
    return Choice(offload, recompute, choice.local), [f"activations: {said}; made again instead: {', '.join(sorted(again))}"]


def measure(blocks: Sequence[nn.Module], choice: Choice, run: Probe) -> dict[Activation, int]:
    """Bytes that a block saves per token under a choice, by name."""
    counting = Activations(blocks, choice, None, keep_last=0, minimum=1)
    counting.counted = Counter()
    with counting:
        tokens = run(PROBE, backward=False)
    return {name: size // (tokens * len(blocks)) for name, size in counting.counted.items()}


def figures_for(config: ActivationsConfig, blocks: Sequence[nn.Module], run: Probe, residency: Residency, tokens: int) -> Figures:
    if config.preset in ("keep", "recompute") and not config.offload:
        return Figures({}, 0.0, 0.0, 0)  # nothing will be held against the link
    saved, forward, link, timed = measure(blocks, Choice(), run), 0.0, 0.0, 0
    if residency.device.type == "cuda" and (timed := _timed_tokens(saved, blocks, tokens, residency)):
        forward = _seconds(run, timed) / 3  # a backward takes twice as long
        link = residency.mover.rate_out()
    return Figures(saved, forward, link, max(0, len(blocks) - config.keep_last), timed)


def _timed_tokens(saved: dict[Activation, int], blocks: Sequence[nn.Module], tokens: int, residency: Residency) -> int:
    """How many to time a forward and backward with all kept on: 0 where memory is too tight for any that tell something."""
    weights = sum(parameter.nbytes for block in blocks for parameter in block.parameters())
    room = free_bytes(residency.device) - 4 * weights  # gradients, and as much again for the head
    fits = (count for count in (LONG_PROBE, LONG_PROBE // 2) if count * sum(saved.values()) * len(blocks) < room)
    return min(tokens, next(fits, 0))


def _seconds(run: Probe, tokens: int) -> float:
    """Of a forward and backward on the device, per token."""
    for _ in range(2):  # the first one warms up
        torch.cuda.synchronize()
        start = time.perf_counter()
        done = run(tokens)
        torch.cuda.synchronize()
        taken = (time.perf_counter() - start) / done
    return taken


def tried(held: Activations, figures: Figures, run: Probe) -> list[str]:
    """What a choice costs on this machine, where that was measured without it too: with few tokens the host's own work is more than the device's."""
    if not figures.forward:
        return []
    with held:
        over = _seconds(run, figures.timed) / (3 * figures.forward) - 1
    return [f"activations: tried on {figures.timed:,} tokens, a forward and backward takes {over:.0%} longer than with all kept"]


def capacity(config: ActivationsConfig, blocks: Sequence[nn.Module], choice: Choice, run: Probe, tokens: int) -> int:
    """Host memory for all that one micro-batch offloads."""
    if not choice.offload:
        return 0
    saved = measure(blocks, choice, run)
    per_token = sum(saved.get(name, 0) for name in choice.offload)
    return int(1.02 * per_token * tokens * max(0, len(blocks) - config.keep_last)) + 2**20  # tensors start on round places


def described(choice: Choice, reserved: int) -> str:
    parts = [
        f"{place} {', '.join(sorted(names))}" for place, names in (("offload", choice.offload), ("recompute", choice.recompute)) if names
    ]
    return f"activations: {'; '.join(parts) or 'all kept'}" + (f"; {reserved / GIB:.2f} GiB of host memory for them" if reserved else "")
