"""What each phase of a step takes: bytes on the device by holding, bytes on the host, bytes moved, seconds, and seconds exposed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ebbtide.memory.plan import Phase
from ebbtide.planner.ranks import Sharing
from ebbtide.planner.saved import Choice

CYCLE: tuple[Phase, ...] = ("generate", "score", "logprob", "train", "step")


class Spent(NamedTuple):
    """Seconds, as those of `Foretold`."""

    seconds: float
    exposed: float
    talk: float
    waited: float


@dataclass
class Foretold:
    """Of one phase. Bytes."""

    device: dict[str, int] = field(default_factory=dict)
    """By holding, and `gathered` (of several ranks: what others have of the weights, while it is here, and gradients on their way to them), `activations`, `logits`, `workspace`."""
    host: int = 0
    """Of one rank."""
    moved: int = 0
    seconds: float = 0.0
    exposed: float = 0.0
    """Of those, compute waits for moves."""
    talk: float = 0.0
    """Seconds of collectives, hidden or not."""
    waited: float = 0.0
    """Of those, compute waits for; they are a part of `seconds`, and not of `exposed`."""

    @property
    def peak(self) -> int:
        return sum(self.device.values())

    def takes(self, times: int, spent: Spent) -> None:
        self.seconds += times * spent.seconds
        self.exposed += times * spent.exposed
        self.talk += times * spent.talk
        self.waited += times * spent.waited


@dataclass(frozen=True)
class Generation:
    """What a phase that generates has."""

    blocks: int | None
    """Of the paged cache."""
    block: int
    """Tokens of each."""
    least: int
    """Blocks without which not even one sample can be finished."""
    roomy: bool
    at_once: int
    """Sequences that decode at once, each as long as it may be."""
    least_peak: float
    beside: int = 0
    """Bytes of a rank that only generates, where there are such."""


@dataclass(frozen=True)
class Prediction:
    phases: Mapping[Phase, Foretold]
    generation: Generation
    activations: Choice
    sharing: Sharing
    loading: int
    """Bytes on the host of a node before the run: where ranks have parts of the model, each loads the whole there to take its own."""
    waits_for: int = 0
    """Where saves cannot be asynchronous: bytes of a rank that the host lacks room for. Else they are among `host`."""

    @property
    def blocks(self) -> int | None:
        """Of the paged cache; None for other engines, which say nothing of theirs."""
        return self.generation.blocks

    @property
    def least_blocks(self) -> int:
        return self.generation.least

    @property
    def roomy(self) -> bool:
        """The cache has all blocks that are of use."""
        return self.generation.roomy

    @property
    def least_peak(self) -> float:
        """Bytes with which it would do: those of the other phases, or of generate with a cache for one sample."""
        adapts = ("generate", "evaluate") if self.blocks is not None else ()  # other engines take what they take
        others = max(phase.peak for name, phase in self.phases.items() if name not in adapts)
        return max(others, self.generation.least_peak)

    @property
    def generates(self) -> bool:
        """There is a cache for one sample."""
        return self.blocks is None or self.blocks >= self.least_blocks

    @property
    def peak(self) -> int:
        return max(phase.peak for phase in self.phases.values())

    @property
    def tightest(self) -> Phase:
        return max(self.phases, key=lambda phase: self.phases[phase].peak)

    @property
    def host(self) -> int:
        """Of all ranks of a node."""
        return self.sharing.here * max(phase.host for phase in self.phases.values())

    @property
    def seconds(self) -> float:
        """Of a whole step, without evaluation and saving."""
        return sum(self.phases[phase].seconds for phase in CYCLE)
