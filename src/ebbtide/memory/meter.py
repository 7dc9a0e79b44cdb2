"""Measures each phase: seconds, peak and reserved memory, bytes by holding, bytes moved, and the seconds that compute waited for moves."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ebbtide.memory.mover import Mover, Tally
from ebbtide.memory.plan import HOLDINGS, PHASES, Name, Phase

GIB = 2**30


@dataclass
class Row:
    """What one phase measured since it was last read. Bytes on the device, unless they say otherwise."""

    seconds: float = 0.0
    peak: int = 0
    """Of the allocator; on a CPU, of the process."""
    reserved: int = 0
    holdings: dict[Name, int] = field(default_factory=dict)
    host: int = 0
    """Host memory that holdings have taken."""
    moved: Tally = field(default_factory=Tally)

    @property
    def other(self) -> int:
        """What is not a holding: activations, the cache while it generates, workspaces. With the holdings it adds up to the peak."""
        return self.peak - sum(self.holdings.values())

    def absorb(self, later: Row) -> None:
        """The same phase again: seconds and moves add up, memory takes the larger peak's figures."""
        self.seconds += later.seconds
        if later.peak >= self.peak:
            self.peak, self.reserved, self.holdings, self.host = later.peak, later.reserved, later.holdings, later.host
        for name, value in vars(later.moved).items():
            setattr(self.moved, name, getattr(self.moved, name) + value)


class Owner(Protocol):
    """What the meter asks of the residency while it measures a phase. It keeps no hold of it: a run's tensors are freed with the run."""

    def enter(self, phase: Phase) -> None: ...

    def holdings(self) -> Mapping[Name, tuple[int, int]]:
        """(bytes on the device, bytes on the host) of each."""

    @property
    def host_bytes(self) -> int: ...


class Meter:
    """`with meter.phase("generate"):` around each phase; `take()` gives and clears what was measured."""

    def __init__(self, device: torch.device, mover: Mover) -> None:
        self._device, self._mover = device, mover
        self._rows: dict[Phase, Row] = {}
        self.run: dict[Phase, Row] = {}
        """The whole run so far: for the table at its end."""

    @property
    def on_gpu(self) -> bool:
        return self._device.type == "cuda"

    @contextmanager
    def phase(self, phase: Phase, owner: Owner) -> Iterator[None]:
        """Enters the phase and measures it. Its moves count in its seconds; the peak is of what comes after they are issued."""
        on_gpu = self.on_gpu
        start = time.perf_counter()
        owner.enter(phase)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
        before = _on_device(owner)
        try:
            yield
        finally:
            if on_gpu:
                torch.cuda.current_stream(self._device).synchronize()  # the phase's own compute, not moves beside it
            row = Row(
                seconds=time.perf_counter() - start,
                peak=torch.cuda.max_memory_allocated(self._device) if on_gpu else _process_peak(),
                reserved=torch.cuda.max_memory_reserved(self._device) if on_gpu else _process_peak(),
                holdings={name: max(size, before.get(name, 0)) for name, size in _on_device(owner).items()},
                host=owner.host_bytes,
                moved=self._mover.take(),
            )
            for rows in (self._rows, self.run):
                rows.setdefault(phase, Row()).absorb(row)

    def take(self) -> dict[str, float]:
        """The figures since the last call, for metrics.jsonl."""
        figures: dict[str, float] = {}
        for phase, row in self._rows.items():
            figures[f"seconds/{phase}"] = row.seconds
            figures[f"peak_gib/{phase}"] = row.peak / GIB
            figures[f"reserved_gib/{phase}"] = row.reserved / GIB
            figures |= {f"device_gib/{phase}/{name}": size / GIB for name, size in row.holdings.items()}
            figures[f"device_gib/{phase}/other"] = row.other / GIB
            figures[f"moved_gib/{phase}"] = (row.moved.bytes_out + row.moved.bytes_in) / GIB
            figures[f"seconds_moved/{phase}"] = row.moved.seconds_out + row.moved.seconds_in
            figures[f"seconds_exposed/{phase}"] = row.moved.exposed
        rows = self._rows.values()
        figures["peak_gib"] = max((row.peak for row in rows), default=0) / GIB
        figures["host_gib"] = max((row.host for row in rows), default=0) / GIB
        figures["moved_gib"] = sum(row.moved.bytes_out + row.moved.bytes_in for row in rows) / GIB
        figures["seconds_exposed"] = sum(row.moved.exposed for row in rows)
        self._rows = {}
        return figures

    def table(self) -> list[list[str]]:
        """The run as rows of text: a heading, then one row per phase. Holdings and other add up to the peak."""
        shown = [name for name in HOLDINGS if any(row.holdings.get(name) for row in self.run.values())]
        heading = ["phase", "seconds", "peak GiB", *shown, "other", "reserved", "host", "moved GiB", "exposed s"]
        lines = [heading]
        for phase in PHASES:
            if phase in self.run:
                row = self.run[phase]
                sizes = [row.peak, *(row.holdings.get(name, 0) for name in shown), row.other, row.reserved, row.host]
                moved = row.moved.bytes_out + row.moved.bytes_in
                lines.append(
                    [
                        phase,
                        f"{row.seconds:.2f}",
                        *(f"{size / GIB:.2f}" for size in sizes),
                        f"{moved / GIB:.2f}",
                        f"{row.moved.exposed:.3f}",
                    ]
                )
        # Columns in which nothing ever happened say nothing.
        kept = [place for place, name in enumerate(heading) if place < 3 or any(float(line[place]) for line in lines[1:])]
        return [[line[place] for place in kept] for line in lines]


def _on_device(owner: Owner) -> dict[Name, int]:
    return {name: device for name, (device, _) in owner.holdings().items()}


def _process_peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
