"""The plan: the table of which holding lives where in each phase, and the rules it must keep. This file imports no
torch."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from ebbtide.config.memory import MemoryConfig, MovableName
from ebbtide.config.optimizer import OptimizerConfig
from ebbtide.config.parallel import RolloutWeightsMode
from ebbtide.errors import UserError

Phase = Literal["generate", "score", "logprob", "train", "step", "save", "evaluate"]
HoldingName = Literal["weights", "grads", "master", "moments", "reference", "kv_cache", "activations"]
Place = Literal["device", "away", "stays", "host", "gathered", "layerwise"]
"""Where a plan puts a holding: `device` (must be there), `away` (offloaded), `stays` (wherever it is), or `host` (lives
there in every phase).

`gathered` and `layerwise` are for sharded weights: each rank has its shard on the device, and all-gathers all weights
for the phase, or layer by layer in every pass."""

PHASES: tuple[Phase, ...] = get_args(Phase)
HOLDINGS: tuple[HoldingName, ...] = tuple(name for name in get_args(HoldingName) if name != "activations")
"""The holdings that a plan places. Activations come and go inside the train phase: see `memory.activations`."""
MOVABLE: tuple[MovableName, ...] = get_args(MovableName)

PHASE_NEEDS: Mapping[Phase, frozenset[HoldingName]] = {
    "generate": frozenset({"weights", "kv_cache"}),
    "score": frozenset(),
    "logprob": frozenset({"weights", "reference"}),
    "train": frozenset({"weights", "grads"}),
    "step": frozenset({"weights", "grads", "master", "moments"}),
    "save": frozenset({"weights"}),
    "evaluate": frozenset({"weights"}),
}
"""What each phase uses on the device. A save reads what is offloaded where it is."""

GENERATING_PHASES: tuple[Phase, ...] = ("generate", "evaluate")
"""The phases in which every rank samples on its own, and so needs all the weights."""

HOST_SHARE = 0.8  # the share of the host's free memory that a run may use where `memory.host_budget_gib` is not set


def check_device_budget(budget_gib: float | None, device_gib: float) -> None:
    """Raises an error if the budget exceeds the device's memory."""
    if budget_gib is not None and budget_gib > device_gib:
        raise UserError(
            f"`memory.budget_gib: {budget_gib:g}` is more than the {device_gib:.1f} GiB that the device has:"
            " lower it, or remove it"
        )


NEXT_PHASE: Mapping[Phase, Phase] = {
    "generate": "score",
    "score": "logprob",
    "logprob": "train",
    "train": "step",
    "step": "generate",
    "save": "generate",
    "evaluate": "generate",
}
"""The phase that usually follows: its needs are prefetched while the phase before it computes."""


@dataclass(frozen=True)
class Plan:
    """The table phase x holding -> place."""

    table: Mapping[Phase, Mapping[HoldingName, Place]]

    def place(self, phase: Phase, holding: HoldingName) -> Place:
        return self.table[phase][holding]

    def offloaded_in(self, phase: Phase) -> list[HoldingName]:
        return [holding for holding in HOLDINGS if self.table[phase][holding] == "away"]

    def to_fetch(self, phase: Phase) -> list[HoldingName]:
        """The holdings that a phase fetches when it begins: its own needs first, then those of the next phase that may
        be prefetched."""
        ahead = [
            holding
            for holding in HOLDINGS
            if holding in PHASE_NEEDS[NEXT_PHASE[phase]] and self.table[phase][holding] != "away"
        ]
        return [
            *(holding for holding in HOLDINGS if holding in PHASE_NEEDS[phase]),
            *(holding for holding in ahead if holding not in PHASE_NEEDS[phase]),
        ]

    def is_ever_offloaded(self, holding: HoldingName) -> bool:
        return any(self.table[phase].get(holding) == "away" for phase in PHASES)

    @property
    def moves_anything(self) -> bool:
        return any(self.is_ever_offloaded(holding) for holding in HOLDINGS)

    @property
    def gathers_weights(self) -> bool:
        """Whether the weights are sharded, and all-gathered to generate."""
        return self.table["generate"]["weights"] != "device"

    def table_rows(self, existing: Container[HoldingName] = HOLDINGS) -> list[list[str]]:
        """The table as text, with the holdings that exist: a heading, then one row per phase."""
        shown = [holding for holding in HOLDINGS if holding in existing]
        lines: list[list[str]] = [["phase", *shown]]
        for phase in PHASES:
            lines.append([phase, *(self.table[phase][holding] for holding in shown)])
        return lines


def build_plan(
    config: MemoryConfig, optimizer: OptimizerConfig | None = None, rollout_weights: RolloutWeightsMode | None = None
) -> Plan:
    """Builds the preset's table with the config's own rows in it, and checks it: what a phase needs cannot be
    offloaded in it. `rollout_weights` is for sharded weights."""
    optimizer = optimizer or OptimizerConfig()
    on_host: frozenset[HoldingName] = frozenset({"master", "moments"}) if optimizer.is_state_on_host else frozenset()
    table: dict[Phase, dict[HoldingName, Place]] = {}
    for phase in PHASES:
        row: list[MovableName] | None = getattr(config.offload, phase)
        if row is None:
            # Scoring uses no device memory: what was offloaded before may be prefetched in it, for the next phase.
            lean = config.preset == "lean" and phase != "score"
            away = {holding for holding in MOVABLE if lean and holding not in PHASE_NEEDS[phase]}
        else:
            away = set(row)
            for kept in sorted(away & on_host):
                raise UserError(
                    f"`memory.offload.{phase}` names `{kept}`, but with {_place_setting(optimizer)} it lives on the"
                    " host in every phase: remove it from that row"
                )
            for needed in sorted(away & PHASE_NEEDS[phase]):
                raise UserError(
                    f"`memory.offload.{phase}` names `{needed}`, but the {phase} phase needs it on the device:"
                    " remove it from that row. This phase can offload:"
                    f" {', '.join(holding for holding in MOVABLE if holding not in PHASE_NEEDS[phase])}"
                )
        places: dict[HoldingName, Place] = {}
        for holding in HOLDINGS:
            if holding in on_host:
                places[holding] = "host"
            elif holding in PHASE_NEEDS[phase]:
                places[holding] = "device"
            else:
                places[holding] = "away" if holding in away else "stays"
        if rollout_weights is not None and phase in GENERATING_PHASES:
            places["weights"] = rollout_weights
        table[phase] = places
    return Plan(table)


def _place_setting(optimizer: OptimizerConfig) -> str:
    """The setting that keeps optimizer state on the host, as it is written in a config."""
    return (
        f"`optimizer.place: {optimizer.place}`"
        if optimizer.place != "device"
        else f"`optimizer.cpu_fraction: {optimizer.cpu_fraction}`"
    )
