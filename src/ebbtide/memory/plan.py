"""The plan: what lives where in each phase. A table, and the rules it must keep. Pure Python, no torch."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from ebbtide.config.tree import Gathering, Movable
from ebbtide.config.tree import Memory as MemoryConfig
from ebbtide.config.tree import Optimizer as OptimizerConfig
from ebbtide.errors import UserError

Phase = Literal["generate", "score", "logprob", "train", "step", "save", "evaluate"]
Name = Literal["weights", "grads", "master", "moments", "reference", "kv_cache", "activations"]
Place = Literal["device", "away", "stays", "host", "whole", "by layer"]
"""In a plan: must be on the device; must not be; stays where it is; or lives on the host in every phase.

Of weights that ranks share out: each has its part on the device, and gathers them all for the phase, or layer by layer in every pass."""

PHASES: tuple[Phase, ...] = get_args(Phase)
HOLDINGS: tuple[Name, ...] = tuple(name for name in get_args(Name) if name != "activations")
"""What a plan places. Activations come and go inside the train phase: `memory.activations` says how."""
MOVABLE: tuple[Movable, ...] = get_args(Movable)

NEEDS: Mapping[Phase, frozenset[Name]] = {
    "generate": frozenset({"weights", "kv_cache"}),
    "score": frozenset(),
    "logprob": frozenset({"weights", "reference"}),
    "train": frozenset({"weights", "grads"}),
    "step": frozenset({"weights", "grads", "master", "moments"}),
    "save": frozenset({"weights"}),
    "evaluate": frozenset({"weights"}),
}
"""What each phase uses on the device. A save takes what is away from where it is."""

GENERATES: tuple[Phase, ...] = ("generate", "evaluate")
"""Phases in which every rank samples on its own, and so needs all the weights."""

HOST_SHARE = 0.8  # of the host's free memory may be taken, where no budget for it is set


def check_budget(budget_gib: float | None, device_gib: float) -> None:
    if budget_gib is not None and budget_gib > device_gib:
        raise UserError(
            f"`memory.budget_gib: {budget_gib:g}` is more than the {device_gib:.1f} GiB that the device has: lower it, or remove it"
        )


NEXT: Mapping[Phase, Phase] = {
    "generate": "score",
    "score": "logprob",
    "logprob": "train",
    "train": "step",
    "step": "generate",
    "save": "generate",
    "evaluate": "generate",
}
"""What usually follows: its needs are fetched ahead, while the phase before it computes."""


@dataclass(frozen=True)
class Plan:
    """phase x holding -> place."""

    table: Mapping[Phase, Mapping[Name, Place]]

    def place(self, phase: Phase, holding: Name) -> Place:
        return self.table[phase][holding]

    def away(self, phase: Phase) -> list[Name]:
        return [holding for holding in HOLDINGS if self.table[phase][holding] == "away"]

    def fetched(self, phase: Phase) -> list[Name]:
        """What a phase has brought in when it begins: its own needs first, then those of the next that may already come."""
        ahead = [holding for holding in HOLDINGS if holding in NEEDS[NEXT[phase]] and self.table[phase][holding] != "away"]
        return [holding for holding in HOLDINGS if holding in NEEDS[phase]] + [h for h in ahead if h not in NEEDS[phase]]

    def ever_away(self, holding: Name) -> bool:
        return any(self.table[phase].get(holding) == "away" for phase in PHASES)

    @property
    def moves(self) -> bool:
        return any(self.ever_away(holding) for holding in HOLDINGS)

    @property
    def gathers(self) -> bool:
        """Ranks share out the weights."""
        return self.table["generate"]["weights"] != "device"

    def rows(self, held: Container[Name] = HOLDINGS) -> list[list[str]]:
        """The table of what there is as text: a heading, then one row per phase."""
        shown = [holding for holding in HOLDINGS if holding in held]
        lines: list[list[str]] = [["phase", *shown]]
        for phase in PHASES:
            lines.append([phase, *(self.table[phase][holding] for holding in shown)])
        return lines


def build_plan(config: MemoryConfig, optimizer: OptimizerConfig | None = None, gathering: Gathering | None = None) -> Plan:
    """The preset's table with the config's own rows in it, checked: what a phase needs cannot be away in it. `gathering`: of weights that ranks share out."""
    optimizer = optimizer or OptimizerConfig()
    on_host: frozenset[Name] = frozenset({"master", "moments"}) if optimizer.state_on_host else frozenset()
    table: dict[Phase, dict[Name, Place]] = {}
    for phase in PHASES:
        row: list[Movable] | None = getattr(config.away, phase)
        if row is None:
            # Scoring uses no device memory: what left before it may come back during it, ahead of the next phase.
            lean = config.preset == "lean" and phase != "score"
            away = {holding for holding in MOVABLE if lean and holding not in NEEDS[phase]}
        else:
            away = set(row)
            for kept in sorted(away & on_host):
                raise UserError(
                    f"`memory.away.{phase}` names `{kept}`, and with {_says(optimizer)} it lives on the host in every phase: remove it from that row"
                )
            for needed in sorted(away & NEEDS[phase]):
                raise UserError(
                    f"`memory.away.{phase}` names `{needed}`, and the {phase} phase needs it on the device: remove it from that row. "
                    f"{phase.capitalize()} can send away: {', '.join(h for h in MOVABLE if h not in NEEDS[phase])}"
                )
        places: dict[Name, Place] = {}
        for holding in HOLDINGS:
            if holding in on_host:
                places[holding] = "host"
            elif holding in NEEDS[phase]:
                places[holding] = "device"
            else:
                places[holding] = "away" if holding in away else "stays"
        if gathering is not None and phase in GENERATES:
            places["weights"] = "by layer" if gathering == "layers" else "whole"
        table[phase] = places
    return Plan(table)


def _says(optimizer: OptimizerConfig) -> str:
    return f"`optimizer.place: {optimizer.place}`" if optimizer.place != "device" else f"`optimizer.cpu_fraction: {optimizer.cpu_fraction}`"
