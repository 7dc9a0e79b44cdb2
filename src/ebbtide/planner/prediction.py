"""The predicted cost of each phase of a step: bytes on the device by holding, bytes on the host, bytes moved, seconds,
and exposed seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ebbtide.memory.plan import Phase
from ebbtide.parallel.costs import MeshShape
from ebbtide.policy.activation_costs import ActivationPolicy

WORKSPACE = "workspace"
"""The row of what is no holding: buffers of kernels and libraries. The meter's `other` is nothing else."""


class Seconds(NamedTuple):
    """Seconds of a part of a phase, with the same fields as `PhaseCost`."""

    seconds: float
    exposed: float
    communication: float
    exposed_communication: float


@dataclass
class PhaseCost:
    """The bytes and seconds of one phase, on one rank."""

    device: dict[str, int] = field(default_factory=dict)
    """Bytes on the device by holding, and of `gathered` (with several ranks: all-gathered weights, and gradients until
    they are reduced), `activations`, `logits` and `workspace`."""
    host: int = 0
    """Bytes of pinned host memory."""
    moved: int = 0
    """Bytes that cross the host link."""
    seconds: float = 0.0
    exposed: float = 0.0
    """Exposed transfers: the part of `seconds` in which compute waits for moves."""
    communication: float = 0.0
    """Communication: seconds of collectives, hidden or not."""
    exposed_communication: float = 0.0
    """Exposed communication: the part of `communication` that compute waits for. It is part of `seconds`, but not of
    `exposed`."""

    @property
    def peak(self) -> int:
        """Bytes on the device."""
        return sum(self.device.values())

    def add_seconds(self, times: int, spent: Seconds) -> None:
        """Adds `spent` so many times."""
        self.seconds += times * spent.seconds
        self.exposed += times * spent.exposed
        self.communication += times * spent.communication
        self.exposed_communication += times * spent.exposed_communication


@dataclass(frozen=True)
class Generation:
    """The KV cache of a phase that generates, and how many sequences it serves."""

    blocks: int | None
    """Blocks of the paged KV cache; None for other engines."""
    block_tokens: int
    """Tokens per block."""
    min_blocks: int
    """Blocks that the longest sample needs; with fewer, nothing can be generated."""
    cache_is_full_size: bool
    """Whether the KV cache has as many blocks as the sequences can use."""
    concurrent: int
    """Sequences of the maximum length that the KV cache has room for at a time."""
    min_peak: float
    """Bytes on the device with a KV cache for one sample only."""
    max_concurrent: int = 0
    """Sequences that would decode at a time with a KV cache of full size."""
    rollout_worker_bytes: int = 0
    """Bytes on the device of a rollout worker (a rank that only generates), if there are any."""


@dataclass(frozen=True)
class Prediction:
    """The predicted cost of a step on one rank."""

    cycle: tuple[Phase, ...]
    """The phases of a step. `phases` has those of them, and of saving and evaluation."""
    phases: Mapping[Phase, PhaseCost]
    generation: Generation
    activations: ActivationPolicy
    sharing: MeshShape
    loading_bytes: int
    """Bytes of a node's host memory while the model is loaded: if the model is sharded, each rank loads all of it to
    take its shard."""
    missing_save_bytes: int = 0
    """If saves cannot be asynchronous: bytes of host memory per rank that their copies would need. Otherwise the copies
    are part of `host`."""

    @property
    def blocks(self) -> int | None:
        """Blocks of the paged KV cache; None for other engines."""
        return self.generation.blocks

    @property
    def min_blocks(self) -> int:
        """Blocks that the longest sample needs."""
        return self.generation.min_blocks

    @property
    def cache_is_full_size(self) -> bool:
        """Whether the KV cache has as many blocks as the sequences can use."""
        return self.generation.cache_is_full_size

    @property
    def min_peak(self) -> float:
        """The minimum of device memory: that of the other phases, or of generate with a KV cache for one sample."""
        adapts = ("generate", "evaluate") if self.blocks is not None else ()  # Other engines have caches of fixed size.
        others = max(phase.peak for name, phase in self.phases.items() if name not in adapts)
        return max(others, self.generation.min_peak)

    @property
    def can_generate(self) -> bool:
        """Whether the KV cache has room for at least one sample."""
        return self.blocks is None or self.blocks >= self.min_blocks

    @property
    def peak(self) -> int:
        """Bytes on the device in the phase that needs the most."""
        return max(phase.peak for phase in self.phases.values())

    @property
    def peak_phase(self) -> Phase:
        """The phase that needs the most device memory."""
        return max(self.phases, key=lambda phase: self.phases[phase].peak)

    @property
    def host(self) -> int:
        """Bytes of pinned host memory of all ranks of a node."""
        return self.sharing.ranks_per_node * max(phase.host for phase in self.phases.values())

    @property
    def seconds(self) -> float:
        """Seconds of a whole step, without evaluation and saving."""
        return sum(self.phases[phase].seconds for phase in self.cycle)
