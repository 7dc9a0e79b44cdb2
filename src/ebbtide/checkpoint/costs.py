"""The seconds of a save, and the host memory that asynchronous saves need. Imports no torch: a plan is made before
anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ebbtide.config.root import Config
from ebbtide.config.train import Rehearsal
from ebbtide.memory.costs import HoldingBytes, PhaseCosts, PlannedRun
from ebbtide.memory.plan import HoldingName, HoldingSpec, Phase
from ebbtide.parallel.rank_model import RankModel

SAVE: Phase = "save"
"""The phase in which a checkpoint is taken."""
SAVED_HOLDINGS: tuple[HoldingName, ...] = ("weights", "master", "moments")
"""The holdings that a checkpoint has."""
SLOTS = 2  # tensors in shared memory at once: one for each thread that writes, each to its own file


def save_copies(on_device: Mapping[HoldingName, int], largest: int) -> int:
    """The host memory for copies of what a save finds on the device, and for the memory shared with the writer process
    (`largest` elements per slot)."""
    return sum(on_device.get(name, 0) for name in SAVED_HOLDINGS) + SLOTS * 4 * largest


def describe_synchronous(copies_gib: str, where: str = "") -> str:
    """The note on saves for whose copies there is no room. `where`: such as in each rank."""
    return (
        "checkpoints are written synchronously, while the loop waits: asynchronous saves need"
        f" {copies_gib} GiB of host memory for copies{where}, more than is available"
    )


class SaveCosts:
    """The checkpoints of one rank."""

    def __init__(self, rank: RankModel) -> None:
        self._rank = rank

    @staticmethod
    def holdings(config: Config, shards: int) -> Sequence[HoldingSpec]:
        return []

    def sizes(self, config: Config, rehearsal: Rehearsal | None) -> HoldingBytes:
        return HoldingBytes({})

    def add_costs(self, run: PlannedRun, phases: PhaseCosts) -> None:
        """What is on the device is copied to the host while the loop waits."""
        if SAVE in phases:
            save = phases[SAVE]
            copied = sum(save.device.get(name, 0) for name in SAVED_HOLDINGS)
            save.seconds = save.exposed = copied / self._rank.machine.rates.link_out
            save.moved += copied

    def copies(self, config: Config, phases: PhaseCosts) -> int:
        """Bytes of host memory for the copies of asynchronous saves."""
        if config.checkpoint is None or not config.checkpoint.async_save:
            return 0
        shape = self._rank.shape
        largest = shape.largest_trained_tensor if config.model.has_lasting_base else shape.largest_tensor
        return save_copies(phases[SAVE].device, largest)
