"""What reward models cost (rollout/reward_models.py): a frozen holding, and its forwards. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ebbtide.config.root import Config
from ebbtide.config.train import Rehearsal
from ebbtide.memory.costs import WORKSPACE, HoldingBytes, PhaseCost, PhaseCosts, PlannedRun
from ebbtide.memory.plan import HoldingName, HoldingSpec, Phase
from ebbtide.model.workload import Workload
from ebbtide.parallel.rank_model import RankModel
from ebbtide.policy.compute_costs import OPS
from ebbtide.system.units import ceil_div

REWARD_MODEL: HoldingName = "reward_model"
"""All reward models of a run, which live and move as one."""
# Tensors of a block that exist at once, of the width of the residual stream and of the MLP; and what small kernels
# take, as a multiple of the matmuls. Neither is fitted.
HIDDEN_TENSORS, MLP_TENSORS, SMALL = 10, 3, 1.5


class RewardModelSize(NamedTuple):
    """What the costs of a reward model depend on."""

    parameters: int
    embedding: int
    """Those of them that are looked up, not multiplied with."""
    itemsize: int
    """Bytes of a weight."""
    layers: int
    hidden: int
    mlp: int
    batch_tokens: int
    """Most tokens of a forward."""

    @property
    def bytes(self) -> int:
        return self.itemsize * self.parameters

    def forward_bytes(self, tokens: float, length: float) -> float:
        """Bytes that a forward of so many tokens, in sequences of this length, has beside the weights."""
        each = self.itemsize * (HIDDEN_TENSORS * self.hidden + MLP_TENSORS * self.mlp)
        return tokens * (each + length)  # the mask of padded attention has a byte for each pair of tokens


class RewardCosts:
    """The reward models of a run: each rank has all of them, and scores its share of the completions."""

    def __init__(self, rank: RankModel, models: Sequence[RewardModelSize] = ()) -> None:
        self._rank, self._models = rank, models

    @staticmethod
    def holdings(config: Config, shards: int) -> Sequence[HoldingSpec]:
        if not config.reward_models:
            return []
        lower = "lower `task.rewards.NAME.reward_model.batch_tokens`"
        advice: dict[Phase | None, str] = dict.fromkeys(config.scored_in, lower)
        return [HoldingSpec(REWARD_MODEL, frozenset(config.scored_in), frozen=True, advice=advice)]

    def sizes(self, config: Config, rehearsal: Rehearsal | None) -> HoldingBytes:
        return HoldingBytes({REWARD_MODEL: sum(model.bytes for model in self._models)} if self._models else {})

    def add_costs(self, run: PlannedRun, phases: PhaseCosts) -> None:
        """Adds the forwards of a step."""
        if "score" in run.config.cycle:
            self._add_forwards(run.work, phases["score"])

    def add_evaluation(self, run: PlannedRun, phase: PhaseCost) -> None:
        """Adds the forwards of an evaluation."""
        self._add_forwards(run.evaluated, phase)

    def _add_forwards(self, work: Workload, phase: PhaseCost) -> None:
        length = work.prompt_tokens + work.longest
        sequences = ceil_div(work.sequences, self._rank.mesh.size)
        tokens, rates, largest = sequences * (work.prompt_tokens + work.new_tokens), self._rank.machine.rates, 0.0
        for model in self._models:
            # Shorter sequences than the longest fill a forward up.
            at_once = max(length, min(float(model.batch_tokens), sequences * length))
            largest = max(largest, model.forward_bytes(at_once, length))
            matmuls = 2 * (model.parameters - model.embedding) * tokens / rates.matmul
            host = ceil_div(round(tokens), round(at_once)) * model.layers * OPS["forward"] / rates.host_op
            phase.seconds += max(SMALL * matmuls, host)
        if largest:
            phase.device[WORKSPACE] = phase.device.get(WORKSPACE, 0) + round(largest)
