"""The predicted cost of a run: of each phase of a step, of generation, and of loading the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ebbtide.memory.costs import PhaseCost
from ebbtide.memory.plan import Phase
from ebbtide.parallel.costs import MeshShape
from ebbtide.policy.activation_costs import ActivationPolicy
from ebbtide.policy.model_costs import SAMPLING_PHASES
from ebbtide.rollout.generation_costs import Generation


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
    """Bytes of a node's host memory while the models are loaded, one after the other: each rank loads all of a model
    that is sharded, to take its shard, and all of a frozen model."""
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
        adapts = SAMPLING_PHASES if self.blocks is not None else ()  # Other engines have caches of fixed size.
        others = max((phase.peak for name, phase in self.phases.items() if name not in adapts), default=0)
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
