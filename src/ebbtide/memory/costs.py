"""What a part of the system costs: bytes on the device by row, bytes on the host, bytes moved, seconds and exposed
seconds of each phase. Each part states its costs in a file beside its code; the planner adds them up. Imports no
torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from ebbtide.config.root import Config
from ebbtide.config.train import Rehearsal
from ebbtide.memory.plan import HoldingName, HoldingSpec, Phase
from ebbtide.model.workload import Workload

WORKSPACE = "workspace"
"""The row of what is no holding: buffers of kernels and libraries. The meter's `other` is nothing else."""
GROUPS_IN_FLIGHT = 2  # groups of offloaded activations that still have device memory: one is saved, one is copied out


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
    """Bytes on the device by row: of the holdings that the plan places, and of what comes and goes in the phase."""
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

    def then(self, later: PhaseCost) -> None:
        """Adds a later part of the phase: seconds and moves add up, memory is that of the larger peak."""
        if later.peak > self.peak:
            self.device = later.device
        self.host, self.moved = max(self.host, later.host), self.moved + later.moved
        self.add_seconds(1, Seconds(later.seconds, later.exposed, later.communication, later.exposed_communication))


PhaseCosts = Mapping[Phase, PhaseCost]


class PlannedRun(NamedTuple):
    """What the costs of a part depend on, besides the model and the machine."""

    config: Config
    work: Workload
    """The sequences of a step."""
    budget: int
    """Bytes that the device's allocator may use."""
    rehearsal: Rehearsal | None = None

    @property
    def updates(self) -> int:
        """Optimizer steps in a step of the loop."""
        return self.config.train.minibatches * self.config.train.epochs

    @property
    def evaluated(self) -> Workload:
        """The completions of an evaluation. Algorithms that sample only to evaluate train on sequences of other
        lengths: completions then have the maximum length."""
        evaluate, rollout = self.config.evaluate, self.config.rollout
        assert evaluate is not None
        longest = Workload(1, 1, rollout.max_prompt_tokens, *[rollout.max_new_tokens] * 3)
        work = self.work if "generate" in self.config.cycle else longest
        return replace(work, prompts=evaluate.problems, samples=evaluate.samples)


class HoldingBytes(NamedTuple):
    """The sizes of a part's holdings."""

    device: dict[HoldingName, int]
    """On the device, unless the plan offloads them."""
    host: dict[HoldingName, int] = {}
    """On the host in every phase."""


class Part(Protocol):
    """A part of the system that takes memory or time, as the planner sees it."""

    @staticmethod
    def holdings(config: Config, shards: int) -> Sequence[HoldingSpec]:
        """Its rows of the table, where the model is in so many shards."""

    def sizes(self, config: Config, rehearsal: Rehearsal | None) -> HoldingBytes:
        """The bytes of those that the plan places."""

    def add_costs(self, run: PlannedRun, phases: PhaseCosts) -> None:
        """Adds its seconds, and the bytes of what comes and goes, to the phases of the run. `phases` has the bytes of
        all placed holdings already, and the costs of the parts before this one."""
