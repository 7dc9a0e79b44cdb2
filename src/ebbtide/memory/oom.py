"""The error message for running out of device memory (OOM): what was where, and which settings would make room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ebbtide.errors import UserError
from ebbtide.memory.plan import HoldingName, Phase, Plan
from ebbtide.system.torch_internals import dump_allocations, record_allocations, stop_recording_allocations
from ebbtide.system.units import gib

HISTORY_ENTRIES = 200_000  # allocations: those of the last few steps


class AllocationHistory:
    """The allocator's recent history, without the stack traces that would slow it down."""

    def __init__(self, file: Path) -> None:
        self._file = file
        record_allocations(HISTORY_ENTRIES)

    def write(self) -> str:
        """Writes the history, and returns a sentence that says where."""
        try:
            dump_allocations(str(self._file))
        except OSError as error:
            return f"The allocator's history could not be written to {self._file}: {error}"
        return f"The allocator's history is in {self._file} (https://pytorch.org/memory_viz draws it)"

    def close(self) -> None:
        stop_recording_allocations()


def oom_error(
    plan: Plan,
    phase: Phase | None,
    device: Mapping[HoldingName, int],
    other: int,
    table: str,
    problem: str,
    more: Sequence[str] = (),
    away: Sequence[HoldingName] = (),
    unused: int = 0,
) -> UserError:
    """Builds the error. `device`: the bytes of each holding on the device; `away`: the holdings that the phase offloads
    already; `other`: the bytes of no row at the peak; `table`: where everything was; `problem`: the allocator's own
    message; `more`: further sentences; `unused`: the bytes that the allocator holds and nothing uses."""
    movable = plan.could_offload(phase) if phase is not None else []
    could_offload = {name: device[name] for name in movable if device.get(name)}
    advice = []
    if could_offload:
        offload = ", ".join(name for name in movable if name in away or name in could_offload)
        freed = gib(sum(could_offload.values()))
        advice.append(f"set `memory.offload.{phase}: [{offload}]`, which frees {freed:.2f} GiB")
    advice += [spec.advice[phase] for spec in plan.holdings if phase in spec.advice]
    when = f"in the {phase} phase" if phase is not None else "before the first phase"
    cause = ". ".join(problem.split(". ")[:2])
    held = f"{'unused':<10} {gib(unused):>10.3f}   (the allocator has it, in pieces too small or for CUDA graphs)"
    lines = [
        f"the device's memory ran out {when} ({cause}). Where everything was:",
        "",
        table,
        f"{'other':<10} {gib(other):>10.3f}   (workspace)",
        *([held] if unused else []),
        "",
        "To make room: " + "; ".join(advice or ["choose a smaller model"]),
    ]
    return UserError("\n".join([*lines, *more]))
