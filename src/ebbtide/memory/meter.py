"""Measures each phase: seconds, peak and reserved memory, bytes by holding, bytes moved, and the seconds that
compute waited for moves."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ebbtide.memory.gauge import Gauge, measuring
from ebbtide.memory.mover import Mover, Tally
from ebbtide.memory.plan import HoldingName, Phase, Plan
from ebbtide.system.units import gib


@dataclass
class PhaseRow:
    """The measurements of one phase since they were last read, in bytes on the device unless noted."""

    seconds: float = 0.0
    peak: int = 0
    """The allocator's peak; on a CPU, the process's."""
    reserved: int = 0
    holdings: dict[HoldingName, int] = field(default_factory=dict)
    """The bytes of each row at the peak."""
    host: int = 0
    """The host memory of the holdings."""
    moved: Tally = field(default_factory=Tally)

    @property
    def other(self) -> int:
        """The bytes that belong to no row: workspace; on a CPU also activations and the process itself. With the rows
        they add up to the peak."""
        return self.peak - sum(self.holdings.values())

    def merge(self, later: PhaseRow) -> None:
        """Merges a later row of the same phase: seconds and moves add up, memory is that of the larger peak."""
        self.seconds += later.seconds
        if later.peak >= self.peak:
            self.peak, self.reserved, self.holdings, self.host = later.peak, later.reserved, later.holdings, later.host
        for name, value in vars(later.moved).items():
            setattr(self.moved, name, getattr(self.moved, name) + value)


class Owner(Protocol):
    """What the meter needs of the residency while it measures a phase. The meter keeps no reference to it, so that a
    run's tensors are freed with the run."""

    def enter(self, phase: Phase) -> None: ...

    def holdings(self) -> Mapping[HoldingName, tuple[int, int]]:
        """(bytes on the device, bytes on the host) of each holding."""

    @property
    def host_bytes(self) -> int: ...


class Meter:
    """`with meter.phase("generate"):` wraps each phase; `drain()` returns and clears what was measured."""

    def __init__(self, device: torch.device, mover: Mover, plan: Plan) -> None:
        self._device, self._mover, self._plan = device, mover, plan
        self._rows: dict[Phase, PhaseRow] = {}
        self.last = PhaseRow()
        """The phase that was measured last, or that is being entered."""
        self.run_rows: dict[Phase, PhaseRow] = {}
        """The rows of the whole run so far, for the table at its end."""

    @property
    def on_gpu(self) -> bool:
        return self._device.type == "cuda"

    @contextmanager
    def phase(self, phase: Phase, owner: Owner) -> Iterator[None]:
        """Enters the phase and measures it. Its moves count in its seconds; the peak is measured from when they are
        issued."""
        on_gpu = self.on_gpu
        start = time.perf_counter()
        self.last = PhaseRow()  # where entering fails, what the phase before it had does not count
        owner.enter(phase)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
        gauge = Gauge(self._device, lambda: {name: device for name, (device, _) in owner.holdings().items()})
        try:
            with measuring(gauge):
                yield
        finally:
            if on_gpu:
                torch.cuda.current_stream(self._device).synchronize()  # waits for the phase's compute, not for moves
            gauge.close(self._plan.rest_row(phase))
            row = self.last = PhaseRow(
                seconds=time.perf_counter() - start,
                peak=gauge.peak,
                reserved=torch.cuda.max_memory_reserved(self._device) if on_gpu else gauge.peak,
                holdings=gauge.rows,
                host=owner.host_bytes,
                moved=self._mover.drain(),
            )
            for rows in (self._rows, self.run_rows):
                rows.setdefault(phase, PhaseRow()).merge(row)

    def drain(self) -> dict[str, float]:
        """Returns and clears the figures since the last call, for metrics.jsonl."""
        figures: dict[str, float] = {}
        for phase, row in self._rows.items():
            figures[f"seconds/{phase}"] = row.seconds
            figures[f"peak_gib/{phase}"] = gib(row.peak)
            figures[f"reserved_gib/{phase}"] = gib(row.reserved)
            figures |= {f"device_gib/{phase}/{name}": gib(size) for name, size in row.holdings.items()}
            figures[f"device_gib/{phase}/other"] = gib(row.other)
            figures[f"moved_gib/{phase}"] = gib(row.moved.bytes_out + row.moved.bytes_in)
            figures[f"seconds_moved/{phase}"] = row.moved.seconds_out + row.moved.seconds_in
            figures[f"seconds_exposed/{phase}"] = row.moved.exposed
        rows = self._rows.values()
        figures["peak_gib"] = gib(max((row.peak for row in rows), default=0))
        figures["host_gib"] = gib(max((row.host for row in rows), default=0))
        figures["moved_gib"] = gib(sum(row.moved.bytes_out + row.moved.bytes_in for row in rows))
        figures["seconds_exposed"] = sum(row.moved.exposed for row in rows)
        self._rows = {}
        return figures

    def table_rows(self) -> list[list[str]]:
        """The run as rows of text: a heading, then one row per phase, whose parts and `other` add up to the peak."""
        rows = [name for row in self.run_rows.values() for name in row.holdings]
        known = dict.fromkeys([*self._plan.names, *self._plan.specs, *rows])
        shown = [name for name in known if any(row.holdings.get(name) for row in self.run_rows.values())]
        heading = ["phase", "seconds", "peak GiB", *shown, "other", "reserved", "host", "moved GiB", "exposed s"]
        lines = [heading]
        for phase in self._plan.phases:
            if phase in self.run_rows:
                row = self.run_rows[phase]
                sizes = [row.peak, *(row.holdings.get(name, 0) for name in shown), row.other, row.reserved, row.host]
                moved = row.moved.bytes_out + row.moved.bytes_in
                lines.append(
                    [
                        phase,
                        f"{row.seconds:.2f}",
                        *(f"{gib(size):.2f}" for size in sizes),
                        f"{gib(moved):.2f}",
                        f"{row.moved.exposed:.3f}",
                    ]
                )
        # Columns that are zero in every row are left out.
        kept = [
            column for column in range(len(heading)) if column < 3 or any(float(line[column]) for line in lines[1:])
        ]
        return [[line[column] for column in kept] for line in lines]
