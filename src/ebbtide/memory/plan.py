"""The plan: the table of which holding lives where in each phase, and the rules it must keep. Its rows are the phases
of an algorithm, its columns the holdings that the parts of a run describe. This file imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from ebbtide.config.memory import MemoryConfig, OffloadConfig
from ebbtide.errors import UserError

Phase = str
"""What the loop is doing now, such as `generate` or `train`."""
HoldingName = str
Place = Literal["device", "away", "stays", "host", "streamed", "gathered", "layerwise"]
"""Where a plan puts a holding: `device` (must be there), `away` (offloaded), `stays` (wherever it is), or `host` (lives
there in every phase).

`streamed` is offloaded as well: its parts are on the device one after the other, while they are used.

`gathered` and `layerwise` are for sharded weights: each rank has its shard on the device, and all-gathers all weights
for the phase, or layer by layer in every pass."""

AFTER_STEP: tuple[Phase, ...] = ("save", "evaluate")
"""The phases that come after a step, whatever the algorithm's own are."""

HOST_SHARE = 0.8  # the share of the host's free memory that a run may use where `memory.host_budget_gib` is not set


@dataclass(frozen=True)
class HoldingSpec:
    """What a part of the system says about a holding of its own. It stands beside the part's code."""

    name: HoldingName
    needed_in: frozenset[Phase] = frozenset()
    """The phases that need it on the device. A save reads what is offloaded where it is."""
    movable: bool = True
    """Whether it may be offloaded."""
    frozen: bool = False
    """Whether its tensors never change."""
    exists_in: frozenset[Phase] | None = None
    """The only phases in which it exists; None: it exists in all."""
    transient: bool = False
    """It comes and goes within a phase: the plan does not place it, but the prediction and the meter have its bytes."""
    takes_rest_in: frozenset[Phase] = frozenset()
    """The phases in which all that is allocated within the phase, and that no other row explains, belongs to it."""
    host_setting: str | None = None
    """The setting by which it lives on the host in every phase, as it is written in a config; None: it does not."""
    cells: Mapping[Phase, Place] = field(default_factory=dict)
    """Its place in phases that need it in another way than as a whole on the device, or in which it has to be away."""
    advice: Mapping[Phase | None, str] = field(default_factory=dict)
    """What to change if memory runs out in a phase (None: before the first one)."""


def check_device_budget(budget_gib: float | None, device_gib: float) -> None:
    """Raises an error if the budget exceeds the device's memory."""
    if budget_gib is not None and budget_gib > device_gib:
        raise UserError(
            f"`memory.budget_gib: {budget_gib:g}` is more than the {device_gib:.1f} GiB that the device has:"
            " lower it, or remove it"
        )


@dataclass(frozen=True)
class Plan:
    """The table phase x holding -> place."""

    holdings: Sequence[HoldingSpec]
    """All that the parts of the run describe, in the order of the table's columns."""
    cycle: tuple[Phase, ...]
    """The phases of a step."""
    table: Mapping[Phase, Mapping[HoldingName, Place]]

    @cached_property
    def specs(self) -> Mapping[HoldingName, HoldingSpec]:
        return {spec.name: spec for spec in self.holdings}

    @cached_property
    def names(self) -> tuple[HoldingName, ...]:
        """The holdings that the table places."""
        return tuple(spec.name for spec in self.holdings if not spec.transient)

    @property
    def phases(self) -> tuple[Phase, ...]:
        return tuple(self.table)

    def place(self, phase: Phase, holding: HoldingName) -> Place:
        """A holding that no part has described stays where it is."""
        return self.table[phase].get(holding, "stays")

    def needs(self, phase: Phase) -> list[HoldingName]:
        """The holdings that a phase needs on the device."""
        return [
            name for name in self.names if phase in self.specs[name].needed_in and not self.is_offloaded(phase, name)
        ]

    def rest_row(self, phase: Phase) -> HoldingName | None:
        """The row of what a phase allocates and no other row explains; None: it is workspace."""
        return next((spec.name for spec in self.holdings if phase in spec.takes_rest_in), None)

    def next_phase(self, phase: Phase) -> Phase:
        """The phase that usually follows: its needs are prefetched while the phase before it computes."""
        return self.cycle[(self.cycle.index(phase) + 1) % len(self.cycle)] if phase in self.cycle else self.cycle[0]

    def offloaded_in(self, phase: Phase) -> list[HoldingName]:
        return [holding for holding in self.names if self.is_offloaded(phase, holding)]

    def is_offloaded(self, phase: Phase, holding: HoldingName) -> bool:
        """Whether a holding is not on the device as a whole in a phase."""
        return self.place(phase, holding) in ("away", "streamed")

    def could_offload(self, phase: Phase) -> list[HoldingName]:
        """The holdings that `memory.offload` may name in a phase's row."""
        return [
            spec.name
            for spec in self.holdings
            if spec.movable and not spec.transient and spec.host_setting is None and phase not in spec.needed_in
        ]

    def to_fetch(self, phase: Phase) -> list[HoldingName]:
        """The holdings that a phase fetches when it begins: its own needs first, then those of the next phase that may
        be prefetched."""
        needed, ahead = self.needs(phase), self.needs(self.next_phase(phase))
        return [
            *needed,
            *(holding for holding in ahead if holding not in needed and not self.is_offloaded(phase, holding)),
        ]

    def is_ever_offloaded(self, holding: HoldingName) -> bool:
        return any(self.is_offloaded(phase, holding) for phase in self.table)

    @property
    def moves_anything(self) -> bool:
        return any(self.is_ever_offloaded(holding) for holding in self.names)

    @property
    def gathers_weights(self) -> bool:
        """Whether weights are sharded, and all-gathered to generate."""
        return any(place in ("gathered", "layerwise") for row in self.table.values() for place in row.values())

    def table_rows(self, existing: Container[HoldingName] | None = None) -> list[list[str]]:
        """The table as text, with the holdings that exist: a heading, then one row per phase."""
        shown = [holding for holding in self.names if existing is None or holding in existing]
        lines: list[list[str]] = [["phase", *shown]]
        for phase, row in self.table.items():
            lines.append([phase, *(row[holding] for holding in shown)])
        return lines


def build_plan(
    config: MemoryConfig, holdings: Sequence[HoldingSpec], cycle: Sequence[Phase], known: Collection[HoldingName] = ()
) -> Plan:
    """Builds the preset's table with the config's own rows in it, and checks it: what a phase needs cannot be
    offloaded in it. `cycle` is the phases of a step; names that are `known` but not among the holdings of this run are
    ignored."""
    phases = (*cycle, *AFTER_STEP)
    placed = [spec for spec in holdings if not spec.transient]
    rows = {phase: getattr(config.offload, phase, None) for phase in phases}
    _check_rows(config.offload, rows, placed, known)
    table: dict[Phase, dict[HoldingName, Place]] = {}
    for phase, row in rows.items():
        # A phase that needs nothing on the device, such as scoring, offloads nothing: what was offloaded before may be
        # prefetched in it, for the next phase.
        lean = config.preset == "lean" and any(phase in spec.needed_in for spec in placed)
        places: dict[HoldingName, Place] = {}
        for spec in placed:
            if spec.host_setting is not None:
                places[spec.name] = "host"
            elif phase in spec.needed_in or phase in spec.cells:
                places[spec.name] = spec.cells.get(phase, "device")
            else:
                away = spec.name in row if row is not None else lean and spec.movable
                places[spec.name] = "away" if away else "stays"
        table[phase] = places
    return Plan(holdings, tuple(cycle), table)


def _check_rows(
    offload: OffloadConfig,
    rows: Mapping[Phase, Sequence[HoldingName] | None],
    placed: Sequence[HoldingSpec],
    known: Collection[HoldingName],
) -> None:
    """Refuses rows of `memory.offload` that cannot be."""
    for phase in type(offload).model_fields:
        if phase not in rows and getattr(offload, phase) is not None:
            raise UserError(
                f"`memory.offload.{phase}` is set, but this algorithm has no {phase} phase: remove that row. Its phases"
                f" are {', '.join(rows)}"
            )
    movable = {spec.name: spec for spec in placed if spec.movable}
    for phase, row in rows.items():
        for name in sorted(set(row or ()) - set(movable) - set(known)):
            raise UserError(
                f"`memory.offload.{phase}` names `{name}`, which is no holding that can be offloaded: these are"
                f" {', '.join(dict.fromkeys([*movable, *known]))}"
            )
        named = [movable[name] for name in sorted(row or ()) if name in movable]
        for spec in named:
            if spec.host_setting is not None:
                raise UserError(
                    f"`memory.offload.{phase}` names `{spec.name}`, but with {spec.host_setting} it lives on the host"
                    " in every phase: remove it from that row"
                )
        for spec in named:
            if phase in spec.needed_in:
                others = [name for name, one in movable.items() if phase not in one.needed_in]
                raise UserError(
                    f"`memory.offload.{phase}` names `{spec.name}`, but the {phase} phase needs it on the device:"
                    f" remove it from that row. This phase can offload: {', '.join(others)}"
                )
