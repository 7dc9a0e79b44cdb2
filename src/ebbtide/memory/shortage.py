"""When the device's memory runs out: what was where, and what would make room."""

from __future__ import annotations

from collections.abc import Mapping

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


def out_of_memory(phase: Phase, device: Mapping[Name, int], peak: int, table: str, problem: str) -> UserError:
    """`device`: bytes of each holding there; `peak`: the most that was allocated; `table`: where everything was; `problem`: what the allocator said."""
    could_leave = {name: device[name] for name in MOVABLE if name not in NEEDS[phase] and device.get(name)}
    ways = []
    if could_leave:
        ways.append(f"set `memory.away.{phase}: [{', '.join(could_leave)}]`, which frees {sum(could_leave.values()) / GIB:.2f} GiB")
    if phase in ADVICE:
        ways.append(ADVICE[phase])
    other = f"{'other':<10} {(peak - sum(device.values())) / GIB:>10.3f}   (activations, the cache while it generates, workspaces)"
    lines = [
        f"the device's memory ran out in the {phase} phase ({'. '.join(problem.split('. ')[:2])}). Where everything was:",
        "",
        table,
        other,
        "",
    ]
    return UserError("\n".join([*lines, "What makes room: " + "; ".join(ways or ["a smaller model"])]))
