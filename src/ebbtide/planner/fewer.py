"""Whether more GPUs make a step slower: the same run planned for fewer of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import gcd

from ebbtide.config.tree import Cluster, Config
from ebbtide.planner.choose import SAME, Chosen
from ebbtide.planner.ranks import Sharing
from ebbtide.planner.show import number


def said_of_fewer(config: Config, chosen: Chosen, plan: Callable[[Config], Chosen]) -> list[str]:
    """A sentence, where a run with fewer GPUs would take fewer seconds a step. `plan`: what is chosen for a config."""
    mine = chosen.tried.prediction
    if config.cluster is None or not chosen.fits:
        return []
    seconds: float = mine.seconds
    best: Cluster | None = config.cluster
    for cluster in _smaller(config.cluster, mine.sharing):
        found = plan(config.model_copy(update={"cluster": cluster}))
        if not found.fits:
            break  # nor do fewer
        if found.tried.prediction.seconds < seconds:
            seconds, best = found.tried.prediction.seconds, cluster
    if seconds >= (1 - SAME) * mine.seconds:
        return []
    fewer, many = _count(best), mine.sharing.size + config.cluster.rollout_gpus
    return [
        f"fewer GPUs are faster: a step takes about {number(seconds)} s with {fewer} ({_setting(config.cluster, best)}), "
        f"and {number(mine.seconds)} s with these {many}"
    ]


def _smaller(cluster: Cluster, shared: Sharing) -> Iterator[Cluster | None]:
    """Half of the ranks that train; those of one node; and one GPU alone. To try more would take a plan seconds."""
    for size in sorted({shared.size // 2, min(shared.node, shared.size // 2)} - {0, 1}, reverse=True):
        tensor = gcd(cluster.tensor, size)
        replicate = gcd(cluster.replicate, size // tensor)
        yield cluster.model_copy(update={"gpus": size, "data": None, "tensor": tensor, "replicate": replicate})
    yield None


def _count(cluster: Cluster | None) -> int:
    return 1 if cluster is None else (cluster.gpus or 0) + cluster.rollout_gpus


def _setting(before: Cluster, after: Cluster | None) -> str:
    """As one would write it on the command line."""
    if after is None:
        return "`cluster=null`"
    values = {name: getattr(after, name) for name in ("gpus", "data", "tensor", "replicate")}
    changed = {name: value for name, value in values.items() if value != getattr(before, name)}
    return " ".join(f"`cluster.{name}={'null' if value is None else value}`" for name, value in changed.items())
