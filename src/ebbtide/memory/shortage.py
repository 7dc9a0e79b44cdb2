"""When the device's memory runs out: what was where, and what would make room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from ebbtide.errors import UserError
from ebbtide.memory.arena import GIB
from ebbtide.memory.plan import MOVABLE, NEEDS, Name, Phase

ADVICE: Mapping[Phase, str] = {
    "generate": "lower `rollout.batch`",
    "evaluate": "lower `rollout.batch`",
    "logprob": "lower `train.microbatch_tokens` or `train.head_chunk_tokens`",
    "train": "lower `train.microbatch_tokens`, or set `memory.activations.preset` to balanced, recompute or offload",
    "step": "set `optimizer.place` to streamed or cpu, or raise `optimizer.cpu_fraction`",
}


REMEMBERED = 200_000  # allocations: the last few steps


class History:
    """What the allocator did of late, without the stacks that would slow it down."""

    def __init__(self, file: Path) -> None:
        self._file = file
        torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=REMEMBERED)

    def write(self) -> str:
        """In words: where it is."""
        try:
            torch.cuda.memory._dump_snapshot(str(self._file))
        except OSError as error:
            return f"What the allocator did before could not be written to {self._file}: {error}"
        return f"What the allocator did before is in {self._file} (https://pytorch.org/memory_viz draws it)"

    def close(self) -> None:
        torch.cuda.memory._record_memory_history(enabled=None)


def out_of_memory(
    phase: Phase | None,
    device: Mapping[Name, int],
    peak: int,
    table: str,
    problem: str,
    more: Sequence[str] = (),
    away: Sequence[Name] = (),
) -> UserError:
    """`device`: bytes of each holding there; `away`: those that the phase has away already; `peak`: the most that was allocated; `table`: where everything was; `problem`: what the allocator said; `more`: what else there is to say."""
    could_leave = {name: device[name] for name in MOVABLE if phase is not None and name not in NEEDS[phase] and device.get(name)}
    ways = []
    if could_leave:
        ways.append(
            f"set `memory.away.{phase}: [{', '.join(name for name in MOVABLE if name in away or name in could_leave)}]`, which frees {sum(could_leave.values()) / GIB:.2f} GiB"
        )
    if phase is None or phase in ADVICE:
        ways.append(ADVICE[phase] if phase is not None else "set `optimizer.place` to streamed or cpu, or take a smaller model")
    other = f"{'other':<10} {(peak - sum(device.values())) / GIB:>10.3f}   (activations, the cache while it generates, workspaces)"
    lines = [
        f"the device's memory ran out {f'in the {phase} phase' if phase is not None else 'before the first phase'} ({'. '.join(problem.split('. ')[:2])}). Where everything was:",
        "",
        table,
        other,
        "",
    ]
    return UserError("\n".join([*lines, "What makes room: " + "; ".join(ways or ["a smaller model"]), *more]))
