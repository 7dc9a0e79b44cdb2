"""Finds out whether more GPUs make a step slower, by planning the same run for fewer GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import gcd

from ebbtide.config.parallel import ParallelConfig
from ebbtide.config.root import Config
from ebbtide.parallel.costs import MeshShape
from ebbtide.planner.render import format_number
from ebbtide.planner.search import SAME, PlanResult


def note_fewer_gpus(config: Config, chosen: PlanResult, plan: Callable[[Config], PlanResult]) -> list[str]:
    """A note, if a step would be faster with fewer GPUs. `plan` plans a config."""
    mine = chosen.candidate.prediction
    if config.parallel is None or not chosen.fits:
        return []
    seconds: float = mine.seconds
    best: ParallelConfig | None = config.parallel
    for parallel in _smaller(config.parallel, mine.sharing):
        found = plan(config.model_copy(update={"parallel": parallel}))
        if not found.fits:
            break  # Even fewer GPUs do not fit either.
        if found.candidate.prediction.seconds < seconds:
            seconds, best = found.candidate.prediction.seconds, parallel
    if seconds >= (1 - SAME) * mine.seconds:
        return []
    fewer, many = _count(best), mine.sharing.size + config.parallel.rollout_gpus
    return [
        f"fewer GPUs are faster: a step takes about {format_number(seconds)} s with {fewer}"
        f" ({_setting(config.parallel, best)}) and {format_number(mine.seconds)} s with these {many}"
    ]


def _smaller(parallel: ParallelConfig, shared: MeshShape) -> Iterator[ParallelConfig | None]:
    """Half of the training ranks, those of one node, and one GPU alone. Trying more would take the plan seconds."""
    for size in sorted({shared.size // 2, min(shared.node, shared.size // 2)} - {0, 1}, reverse=True):
        tensor = gcd(parallel.tensor, size)
        replicate = gcd(parallel.replicate, size // tensor)
        yield parallel.model_copy(update={"gpus": size, "data": None, "tensor": tensor, "replicate": replicate})
    yield None


def _count(parallel: ParallelConfig | None) -> int:
    return 1 if parallel is None else (parallel.gpus or 0) + parallel.rollout_gpus


def _setting(before: ParallelConfig, after: ParallelConfig | None) -> str:
    """The change from `before` to `after`, as written on the command line."""
    if after is None:
        return "`parallel=null`"
    values = {name: getattr(after, name) for name in ("gpus", "data", "tensor", "replicate")}
    changed = {name: value for name, value in values.items() if value != getattr(before, name)}
    return " ".join(f"`parallel.{name}={'null' if value is None else value}`" for name, value in changed.items())
