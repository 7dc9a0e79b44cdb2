"""The blocks of a frozen base that are streamed from the host (`memory.stream_base`): their bytes, moves and seconds.
Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from ebbtide.config.root import Config
from ebbtide.config.train import Rehearsal
from ebbtide.memory.costs import HoldingBytes, PhaseCosts, PlannedRun
from ebbtide.memory.plan import HoldingName, HoldingSpec, Phase, Place
from ebbtide.model.quantized_sizes import base_bytes, root_bytes
from ebbtide.parallel.rank_model import RankModel

BLOCKS: HoldingName = "base_blocks"
"""The row of the frozen weights in blocks, where these are streamed."""
STREAMED_IN: tuple[Phase, ...] = ("logprob", "train")
AT_ONCE = 2
"""Blocks on the device: the one that computes, and the next."""
FORWARD_SHARE = 0.35  # of the seconds of a forward with its backward


def block_bytes(rank: RankModel) -> int:
    """The bytes of all blocks."""
    return base_bytes(rank.shape, rank.itemsize, rank.parameters) - root_bytes(rank.shape, rank.itemsize)


class StreamCosts:
    """Streamed blocks. It is asked last: what they cost depends on how long the phases compute."""

    def __init__(self, rank: RankModel) -> None:
        self._rank = rank

    @staticmethod
    def holdings(config: Config, shards: int) -> Sequence[HoldingSpec]:
        if not config.memory.stream_base:
            return []
        needed = frozenset({"generate", "evaluate", *STREAMED_IN})
        # It is not fetched ahead beside gradients: it comes back when all else is as it was the last time.
        cells: dict[Phase, Place] = {**dict.fromkeys(STREAMED_IN, "streamed"), "step": "away", "save": "away"}
        return [HoldingSpec(BLOCKS, needed, movable=False, frozen=True, cells=cells)]

    def sizes(self, config: Config, rehearsal: Rehearsal | None) -> HoldingBytes:
        return HoldingBytes({BLOCKS: block_bytes(self._rank)} if config.memory.stream_base else {})

    def add_costs(self, run: PlannedRun, phases: PhaseCosts) -> None:
        config, train = run.config, run.config.train
        if not config.memory.stream_base:
            return
        whole, link = block_bytes(self._rank), self._rank.machine.rates.link_in
        for name in STREAMED_IN:
            phase = phases.get(name)
            if phase is None or not phase.seconds:
                continue
            phase.device[BLOCKS] = AT_ONCE * whole // self._rank.shape.layers
            has_backward = name == "train" and run.rehearsal is None
            if has_backward:
                passes = run.updates * run.work.pack(train.microbatch_tokens, train.minibatches).passes
            else:
                models = max(1, len(config.forward_passes.get(name, ())))
                passes = models * run.work.pack(train.microbatch_tokens).passes
            each, taken = phase.seconds / passes, whole / link
            shares = (FORWARD_SHARE, 1 - FORWARD_SHARE) if has_backward else (1.0,)
            waits = passes * sum(max(0.0, taken - share * each) for share in shares)
            phase.moved += len(shares) * passes * whole
            phase.exposed += waits
            phase.seconds += waits
