"""Decides which activations are kept, offloaded or recomputed (gradient checkpointing): resolves `memory.activations`
to a choice for the loaded model, checked, measured, and compared with what the host link carries."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import nn

from ebbtide.config.activation_rules import check_activation_names, fit_host_link
from ebbtide.config.memory import ActivationName, ActivationsConfig
from ebbtide.errors import UserError
from ebbtide.memory.activations import ActivationOffloader
from ebbtide.memory.device_budget import free_bytes
from ebbtide.memory.residency import Residency
from ebbtide.policy import fused_costs, whole_blocks
from ebbtide.policy.activation_costs import (
    LINK_SHARE,
    PROBE_TOKENS,
    ActivationPolicy,
    choose_places,
    offload_bytes,
    split_places,
)
from ebbtide.policy.activations import ActivationHooks
from ebbtide.policy.block_activations import (
    ActivationChoice,
    activation_names,
    have_named_modules,
    locally_recomputable,
)
from ebbtide.policy.fuse import FusedBlocks, saved_names
from ebbtide.policy.fused_activations import FusedActivations
from ebbtide.system.units import gib

PROBE = 512  # Tokens of a forward whose saved bytes are counted: they grow linearly with the tokens.


class TrainingProbe(Protocol):
    """A forward (and backward) as in training, to measure."""

    def __call__(self, tokens: int, *, backward: bool = True) -> int:
        """Runs a forward and its backward on about so many tokens, and leaves no gradients; returns the exact
        number."""


@dataclass(frozen=True)
class PlacedBlocks:
    """A model's blocks, and what carries out a choice in them."""

    modules: Sequence[nn.Module]
    fused: FusedBlocks | None = None

    @cached_property
    def are_whole(self) -> bool:
        """Whether their modules have no names, so that each is kept, offloaded or recomputed as a whole."""
        return self.fused is None and not have_named_modules(self.modules)

    def __len__(self) -> int:
        return len(self.modules)

    def hooks(
        self, choice: ActivationChoice, offloader: ActivationOffloader | None, *, keep_last: int, minimum: int
    ) -> ActivationHooks | FusedActivations:
        if self.fused is not None:
            return FusedActivations(self.fused, choice, offloader, keep_last=keep_last, minimum=minimum)
        return ActivationHooks(self.modules, choice, offloader, keep_last=keep_last, minimum=minimum)


@dataclass(frozen=True)
class ActivationFigures:
    """Measurements of this model on this machine."""

    saved: dict[ActivationName, int]
    """Bytes that one block saves per token, by name."""
    forward: float
    """Seconds of a forward per token (a third of forward and backward); 0 on a CPU, where no copies overlap with it."""
    link: float
    """Bytes per second from the device to the host."""
    blocks: int
    """Number of blocks that may offload."""
    timed: int = 0
    """Tokens of the timed forward and backward."""

    def link_bytes(self) -> int:
        """Bytes per token and block that the host link carries during the forward."""
        return int(LINK_SHARE * self.link * self.forward / max(1, self.blocks))


Weigh = Callable[[ActivationChoice], dict[ActivationName, int]]
"""Bytes that a block saves per token under a choice, by name."""


def choose_activations(
    config: ActivationsConfig,
    blocks: PlacedBlocks,
    figures: ActivationFigures,
    weigh: Weigh,
    note: Callable[[str], None],
) -> ActivationChoice:
    """The choice for the blocks; what was measured to make it is noted."""
    block = blocks.modules[0]
    if blocks.are_whole:
        kind = f"a model with blocks that are not alike ({type(block).__name__})"
        choice = _from_policy(whole_blocks.choose(config, figures.saved, figures.link_bytes(), len(blocks), kind))
    elif blocks.fused is not None:
        check_activation_names(
            config, [*dict.fromkeys((*activation_names(block), *saved_names(block)))], type(block).__name__
        )
        choice = _from_policy(fused_costs.choose(config, weigh(ActivationChoice()), figures.link_bytes(), len(blocks)))
    else:
        names, local = activation_names(block), locally_recomputable(block)
        check_activation_names(config, names, type(block).__name__)
        places = choose_places(
            config, names, local, lambda some: weigh(ActivationChoice(*split_places(some), local)), figures.link_bytes()
        )
        choice = ActivationChoice(*split_places(places), local, config.recompute_blocks)
    if config.preset == "balanced":
        _note_balanced(choice, figures, weigh(choice), note)
    if figures.forward and choice.offload:
        choice = _gate(config, choice, figures, weigh(choice), note, blocks)
    return choice


def _from_policy(found: ActivationPolicy) -> ActivationChoice:
    return ActivationChoice(found.offload, found.recompute, recompute_blocks=found.recompute_blocks)


def _bytes(names: Iterable[ActivationName], saved: dict[ActivationName, int]) -> int:
    return sum(saved.get(name, 0) for name in names)


def _note_balanced(
    choice: ActivationChoice,
    figures: ActivationFigures,
    saved: dict[ActivationName, int],
    note: Callable[[str], None],
) -> None:
    """Notes what `preset: balanced` chose."""
    carries = (
        f"the host link carries {figures.link_bytes() / 1024:.0f} KiB during the forward ({LINK_SHARE:.0%} of"
        f" {figures.link / 1e9:.1f} GB/s for {figures.forward * 1e6:.1f} us per token)"
        if figures.forward
        else "on a CPU copies do not overlap with the forward"
    )
    note(
        f"activations: a block saves {sum(figures.saved.values()) / 1024:.0f} KiB per token; {carries}. Offloaded:"
        f" {', '.join(sorted(choice.offload)) or 'nothing'} ({_bytes(choice.offload, saved) / 1024:.0f} KiB);"
        f" recomputed: {', '.join(sorted(choice.recompute)) or 'nothing'}"
    )


def _gate(
    config: ActivationsConfig,
    choice: ActivationChoice,
    figures: ActivationFigures,
    saved: dict[ActivationName, int],
    note: Callable[[str], None],
    blocks: PlacedBlocks,
) -> ActivationChoice:
    """The choice after the check of `on_slow_link`: offloading more than the host link carries would make compute
    wait."""
    wanted = _bytes(choice.offload, saved)
    if wanted <= figures.link_bytes():
        return choice
    excess = (
        f"a block offloads {wanted / 1024:.0f} KiB per token ({', '.join(sorted(choice.offload))}), but the host link"
        f" carries only {figures.link_bytes() / 1024:.0f} KiB during the forward ({LINK_SHARE:.0%} of"
        f" {figures.link / 1e9:.1f} GB/s for {figures.forward * 1e6:.1f} us per token)"
    )
    if config.on_slow_link == "ignore":
        note(f"activations: {excess}: compute will wait")
        return choice
    if config.on_slow_link == "refuse":
        raise UserError(f"{excess}: offload less, or set `memory.activations.on_slow_link` to `downgrade` or `ignore`")
    if blocks.fused is not None or blocks.are_whole:
        fit_link = whole_blocks.fit_link if blocks.are_whole else fused_costs.fit_link
        policy = ActivationPolicy(choice.offload, choice.recompute, choice.recompute_blocks)
        fitting = _from_policy(fit_link(policy, saved, figures.link_bytes()))
    else:
        split = fit_host_link(choice.offload, choice.recompute, choice.local, saved, figures.link_bytes())
        fitting = ActivationChoice(*split, choice.local)
    downgraded = fitting.recompute - choice.recompute
    everywhere = "" if choice.recompute_blocks is None else ", in all blocks"
    note(f"activations: {excess}; recomputed instead{everywhere}: {', '.join(sorted(downgraded))}")
    return fitting


def measure_saved_bytes(
    blocks: PlacedBlocks, choice: ActivationChoice, run: TrainingProbe
) -> dict[ActivationName, int]:
    """Bytes that a block saves per token under a choice, by name, on average."""
    counting = blocks.hooks(choice, None, keep_last=0, minimum=1)
    counting.counted = Counter()
    with counting:
        tokens = run(PROBE, backward=False)
    return {name: size // (tokens * len(blocks)) for name, size in counting.counted.items()}


def measure_figures(
    config: ActivationsConfig, blocks: PlacedBlocks, run: TrainingProbe, residency: Residency, tokens: int
) -> ActivationFigures:
    """Measures the model; `tokens`: those of a micro-batch."""
    if config.preset in ("keep", "recompute") and not config.offload:
        return ActivationFigures({}, 0.0, 0.0, 0)  # Nothing is offloaded, so nothing is compared with the host link.
    saved, forward, link, timed = measure_saved_bytes(blocks, ActivationChoice(), run), 0.0, 0.0, 0
    if residency.device.type == "cuda" and (timed := _timed_tokens(saved, blocks, tokens, residency)):
        forward = _seconds(run, timed) / 3  # A backward takes twice as long as a forward.
        link = residency.mover.measure_rate_out()
    return ActivationFigures(saved, forward, link, max(0, len(blocks) - config.keep_last), timed)


def _timed_tokens(saved: dict[ActivationName, int], blocks: PlacedBlocks, tokens: int, residency: Residency) -> int:
    """Tokens of the timed forward and backward, which keeps all activations; 0 if memory is too tight for a meaningful
    number."""
    weights = sum(parameter.nbytes for block in blocks.modules for parameter in block.parameters())
    room = free_bytes(residency.device) - 4 * weights  # Leaves room for gradients, and as much again for the head.
    fits = (count for count in (PROBE_TOKENS, PROBE_TOKENS // 2) if count * sum(saved.values()) * len(blocks) < room)
    return min(tokens, next(fits, 0))


def _seconds(run: TrainingProbe, tokens: int) -> float:
    """Seconds of a forward and backward on the device, per token."""
    for _ in range(2):  # The first one warms up.
        torch.cuda.synchronize()
        start = time.perf_counter()
        done = run(tokens)
        torch.cuda.synchronize()
        taken = (time.perf_counter() - start) / done
    return taken


def measure_slowdown(
    activations: ActivationHooks | FusedActivations,
    figures: ActivationFigures,
    run: TrainingProbe,
    note: Callable[[str], None],
) -> None:
    """Notes what a choice costs on this machine, if the same was timed without it; with few tokens the host's work
    would dominate."""
    if not figures.forward:
        return
    with activations:
        over = _seconds(run, figures.timed) / (3 * figures.forward) - 1
    note(
        f"activations: on a trial of {figures.timed:,} tokens, a forward and backward takes {over:.0%} longer than with"
        " all activations kept"
    )


def offload_capacity(
    config: ActivationsConfig, blocks: PlacedBlocks, choice: ActivationChoice, run: TrainingProbe, tokens: int
) -> int:
    """Bytes of host memory for all activations that one micro-batch offloads."""
    if not choice.offload:
        return 0
    saved = measure_saved_bytes(blocks, choice, run)
    per_token = sum(saved.get(name, 0) for name in choice.offload)
    # The last blocks may save less than the average where blocks are not alike.
    offloading = len(blocks) if blocks.are_whole else max(0, len(blocks) - config.keep_last)
    return int(offload_bytes(per_token * tokens * offloading)) + 2**20


def describe_choice(choice: ActivationChoice, reserved: int) -> str:
    """The choice as a note, with the bytes of host memory reserved for it."""
    said = ActivationPolicy(choice.offload, choice.recompute, choice.recompute_blocks).describe()
    return f"activations: {said if choice.offload or choice.recompute else 'all kept'}" + (
        f"; {gib(reserved):.2f} GiB of host memory reserved for offloading" if reserved else ""
    )
