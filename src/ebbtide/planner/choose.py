"""The settings for a budget: all ways of keeping, moving, streaming and recomputing are predicted, and the fastest that fits is taken. What is set by hand stays."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from pydantic import BaseModel

from ebbtide.config.decided import GROUPS, Change, checked, free_groups, groups_of, keys_by_hand, with_changes
from ebbtide.config.tree import Config, Rehearsal
from ebbtide.errors import UserError
from ebbtide.memory.plan import HOST_SHARE
from ebbtide.planner.foretold import CYCLE, Prediction
from ebbtide.planner.machine import GIB
from ebbtide.planner.predict import Predictor, host_limit
from ebbtide.planner.saved import local_names
from ebbtide.planner.work import Work

MARGIN, SPARE, SPARE_SHARE = (
    0.03,
    0.45,
    0.1,
)  # of the budget, and GiB beside it, at most a tenth: left for what the allocator cannot use between what it holds
SAME = 0.005  # two plans whose seconds differ by less are equally fast: the one that changes less is taken

Lacks = Literal["device", "cache", "host", "loading"]

STATE = ["master", "moments"]


@dataclass(frozen=True)
class Tried:
    """One way, and what it comes to."""

    changes: Change
    config: Config
    prediction: Prediction

    @property
    def changed(self) -> int:
        """How many groups are."""
        return self.changed_of(GROUPS)

    def changed_of(self, groups: Collection[str]) -> int:
        """How many of these groups are."""
        return sum(any(key in GROUPS[group] for key in self.changes) for group in groups)


@dataclass(frozen=True)
class Reason:
    """Why a setting was changed."""

    settings: Sequence[str]
    why: str
    seconds: float | None
    """That it costs a step; less than 0 where it saves some. None where what it costs is generation's, and without it nothing would be generated."""


@dataclass(frozen=True)
class Chosen:
    tried: Tried
    """What a run does. Where nothing fits: of what may be chosen, the way that takes least."""
    lacks: Lacks | None = None
    """What there is too little of; None where it fits."""
    reasons: Sequence[Reason] = ()
    nearest: Tried | None = None
    """Where it does not fit: what would, with the fewest changes to what is set by hand."""
    fastest: Tried | None = None
    """Where it does not fit: what would, and faster than the nearest, with more changes to what is set by hand."""
    least: float | None = None
    """Where nothing fits: GiB, the smallest budget that any way could do with, if the device is what lacks."""
    by_hand: Sequence[str] = ()
    """Where it does not fit: the settings that were left alone."""
    more_host: Tried | None = None
    """Where nothing fits: what would, with more host memory; the least of it."""
    notes: Sequence[str] = ()
    """What else a person should know, in sentences."""

    @property
    def fits(self) -> bool:
        return self.lacks is None


class Chooser:
    def __init__(self, predictor: Predictor, work: Work, budget_gib: float, host_gib: float, rehearsal: Rehearsal | None = None) -> None:
        self._predictor, self._work, self._rehearsal = predictor, work, rehearsal
        self._budget_gib, self._host_gib = budget_gib, host_gib
        self.usable = usable(budget_gib) * GIB

    def choose(self, config: Config) -> Chosen:
        """As it is, where that fits with all the cache that is of use; else the fastest of what may be changed; else the nearest, whatever was set by hand."""
        config = self._settled(config)
        as_it_is = self._foretold(config, {})
        lacks = self.lacks(as_it_is)
        planned = config.memory.plan == "auto"
        if lacks is None and (as_it_is.prediction.roomy or not planned):
            return Chosen(self._as_it_runs(as_it_is))
        free = free_groups(config) if planned else ()
        tried = list(self._tried(config, free))
        fitting = [one for one in tried if self.lacks(one) is None]
        if fitting:
            best = _best(fitting)
            return Chosen(self._as_it_runs(best), reasons=self._reasons(config, best))
        closest, by_hand = min(tried, key=self._far), keys_by_hand(config)
        everything = tried if free == groups_of(config) else list(self._tried(config, groups_of(config)))
        if fitting := [one for one in everything if self.lacks(one) is None]:
            nearest, fastest = _nearest(fitting, set(groups_of(config)) - set(free)), _best(fitting)
            faster = fastest.prediction.seconds < (1 - SAME) * nearest.prediction.seconds
            return Chosen(closest, self.lacks(closest), (), nearest, fastest if faster else None, by_hand=by_hand)
        least, lacks = self._least(everything), self.lacks(closest)
        if least is None and any(self._host_lacks(one) == "loading" for one in everything):
            lacks = "loading"  # before anything could be too much for the device, and no plan changes it
        return Chosen(closest, lacks, least=least, by_hand=by_hand, more_host=self._with_more_host(everything))

    def nearest(self, config: Config) -> Tried | None:
        """What fits with the fewest changes, of anything, or with none; of those, the fastest."""
        as_it_is = self._foretold(config, {})
        if self.lacks(as_it_is) is None:
            return as_it_is
        fitting = [one for one in self._tried(config, groups_of(config)) if self.lacks(one) is None]
        return _nearest(fitting, GROUPS) if fitting else None

    def _far(self, tried: Tried) -> tuple[bool, float, int, float]:
        """Orders what does not fit: that which takes least comes first, and what the host has no room for last."""
        prediction, host = tried.prediction, self._host_lacks(tried) is not None
        takes = float(prediction.host) if host else max(prediction.least_peak, prediction.generation.beside)
        return host, takes, tried.changed, prediction.seconds

    def lacks(self, tried: Tried) -> Lacks | None:
        prediction = tried.prediction
        if max(prediction.peak, prediction.generation.beside) > self.usable:
            return "device"
        if not prediction.generates:
            return "cache"
        return self._host_lacks(tried)

    def _host_lacks(self, tried: Tried) -> Lacks | None:
        if tried.prediction.host > host_limit(tried.config, self._host_gib):
            return "host"
        return "loading" if tried.prediction.loading > self._host_gib * GIB else None

    def _with_more_host(self, tried: Iterable[Tried]) -> Tried | None:
        """What would fit if the host, or the budget of what is pinned there, had more; the least of it."""
        lacking = (one for one in tried if self.lacks(one) in ("host", "loading"))
        fitting = (one for one in lacking if one.config.memory.host_budget_gib is None or one.prediction.loading <= self._host_gib * GIB)
        return min(fitting, key=host_wanted, default=None)

    def _as_it_runs(self, tried: Tried) -> Tried:
        """A plan leaves a part of the budget to the allocator; of that, a run's cache takes what is there."""
        if tried.prediction.roomy:
            return tried
        whole = self._predictor.of(tried.config, self._work, int(self._budget_gib * GIB), self._rehearsal)
        return replace(tried, prediction=whole)

    def _least(self, tried: Iterable[Tried]) -> float | None:
        """GiB of the smallest budget that any of them fits into: what it takes outside of generate, or in generate with a cache for one sample."""
        needs = [one.prediction.least_peak for one in tried if self._host_lacks(one) is None]
        if not needs:
            return None
        filled = min(needs) / GIB
        return min((filled + SPARE) / (1 - MARGIN), filled / (1 - MARGIN - SPARE_SHARE))

    def _settled(self, config: Config) -> Config:
        """`preset: balanced` as the lists that it comes to, so that the run does what was foreseen of it."""
        now = config.memory.activations
        if config.memory.plan != "auto" or now.preset != "balanced" or self._predictor.shape.dense_layers:
            return config
        choice = self._predictor.choice(config)
        lists = {"keep": None, "offload": sorted(choice.offload) or None, "recompute": sorted(choice.recompute) or None}
        return with_changes(config, {"memory.activations": now.model_copy(update={"preset": "keep", "gate": "ignore", **lists})})

    def _tried(self, config: Config, free: Sequence[str]) -> Iterator[Tried]:
        """Every combination that could be the answer, those that change least first."""
        options: list[list[Change]] = [
            [checked(one) for one in self._options(config, group)] if group in free else [{}] for group in GROUPS
        ]
        *ways, micro_batches, chunks = options  # in the order of GROUPS
        sizes = [[{**micro_batch, **chunk} for chunk in chunks] for micro_batch in micro_batches]
        for some in product(*ways):
            changes: dict[str, Any] = {}
            for one in some:
                changes |= one
            try:
                yield from self._sized(config, changes, sizes)
            except UserError:  # such as a row of `memory.away` that names what lives on the host
                continue

    def _sized(self, config: Config, changes: Change, sizes: Sequence[Sequence[Change]]) -> Iterator[Tried]:
        """One way with every micro-batch, and of each with the largest chunk of the head that fits: a smaller one takes less memory and no less time."""
        for chunks in sizes:
            yield (largest := self._foretold(config, {**changes, **chunks[0]}))
            if len(chunks) == 1 or self.lacks(largest) is None:
                continue
            smallest = self._foretold(config, {**changes, **chunks[-1]})
            if self.lacks(smallest) is None:
                yield from (self._foretold(config, {**changes, **chunk}) for chunk in chunks[1:-1])
            yield smallest

    def _foretold(self, config: Config, changes: Change) -> Tried:
        changed = with_changes(config, changes)
        return Tried(changes, changed, self._predictor.of(changed, self._work, int(self.usable), self._rehearsal))

    def _options(self, config: Config, group: str) -> list[Change]:
        """What a group may be, as it is first."""
        longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
        if group == "optimizer":
            ways = [("device", None), ("device", 0.5), ("streamed", None), ("cpu", None), ("streamed", 0.5)]
            now = config.optimizer.place, config.optimizer.cpu_fraction
            return [{}, *({"optimizer.place": place, "optimizer.cpu_fraction": part} for place, part in ways if (place, part) != now)]
        if group == "away":
            beside = dict.fromkeys(("generate", "score", "logprob", "evaluate"), STATE)
            return [{}, {"memory.preset": "keep", "memory.away": beside}, {"memory.preset": "lean", "memory.away": {}}]
        if group == "gathering":
            gathers = config.gathering(self._predictor.sharing.held) == "whole"
            return [{}, {"cluster.generate": "layers"}] if gathers else [{}]
        if group == "activations":
            return [{}, *({"memory.activations": one} for one in self._policies(config))]
        if group == "micro-batch":
            sizes = {size for size in (12288, 8192, 4096, 2048, 1024, 512, longest) if longest <= size < config.train.microbatch_tokens}
            return [{}, *({"train.microbatch_tokens": size} for size in sorted(sizes, reverse=True))]
        chunks = [size for size in (1024, 256) if size < config.train.head_chunk_tokens]
        return [{}, *({"train.head_chunk_tokens": size} for size in chunks)]

    def _policies(self, config: Config) -> list[dict[str, Any]]:
        """Of activations: what is cheap made again; that, with as much on the host as the link carries; all made again; and that with blocks' inputs on the host."""
        shape, now = self._predictor.shape, config.memory.activations
        if shape.dense_layers:  # blocks that are not all alike cannot be told what to keep
            return []
        same = {"keep_last": now.keep_last, "minimum_kib": now.minimum_kib}
        balanced = self._predictor.choice(with_changes(config, {"memory.activations": {"preset": "balanced"}}))
        # What was foreseen for the link to carry is not held against it again when the run begins.
        both: dict[str, Any] = {"recompute": sorted(balanced.recompute), "offload": sorted(balanced.offload), "gate": "ignore"}
        listed = [{"recompute": sorted(local_names(shape))}, *([both] if balanced.offload else [])]
        return [{**one, **same} for one in [*listed, {"preset": "recompute"}, {"preset": "offload"}]]

    def _reasons(self, config: Config, best: Tried) -> list[Reason]:
        """Each change, undone alone: what it is for, and what it costs."""
        found = []
        for keys in GROUPS.values():
            if not any(key in keys for key in best.changes):
                continue
            rest = {key: value for key, value in best.changes.items() if key not in keys}
            without = self._foretold(config, rest)
            lacks, tight = self.lacks(without), without.prediction.tightest
            over = without.prediction.phases[tight].peak / GIB
            why = {
                "device": f"without it {tight} would take {over:.3g} GiB of the {self.usable / GIB:.3g} that can be filled",
                "cache": "without it generate would have no room for the cache of one sample",
                "host": "without it the host's memory would not do",
                "loading": "",  # of which no change makes less
                None: "it is faster with it",
            }[lacks]
            cost: float | None = _cost(best.prediction, without.prediction, whole=lacks is None)
            if keys is GROUPS["gathering"] and lacks is not None and not without.prediction.roomy:
                cost = None
            found.append(Reason(settings(without.config, best.config), why, cost))
        return found


def host_wanted(tried: Tried) -> float:
    """Bytes of the host, or of `memory.host_budget_gib` where that is set, with which this has room there."""
    pinned = tried.prediction.host
    return pinned if tried.config.memory.host_budget_gib is not None else max(pinned / HOST_SHARE, tried.prediction.loading)


def _best(fitting: Sequence[Tried]) -> Tried:
    """The fastest; of those that are as fast, the one that changes least."""
    quickest = min(one.prediction.seconds for one in fitting)
    return min((one for one in fitting if one.prediction.seconds <= (1 + SAME) * quickest), key=lambda one: one.changed)


def _nearest(fitting: Sequence[Tried], kept: Collection[str]) -> Tried:
    """The best of those that change the fewest of these groups."""
    fewest = min(one.changed_of(kept) for one in fitting)
    return _best([one for one in fitting if one.changed_of(kept) == fewest])


def _cost(mine: Prediction, other: Prediction, *, whole: bool) -> float:
    """Seconds of a step that one takes more than the other. Generation is left out where the other does not fit and has less cache than is of use: it would not generate so. `whole`: the other fits."""
    compared = [phase for phase in CYCLE if whole or other.roomy or phase != "generate"]
    return sum(mine.phases[phase].seconds - other.phases[phase].seconds for phase in compared)


def usable(budget_gib: float) -> float:
    """GiB of a budget that a plan may fill."""
    return (1 - MARGIN) * budget_gib - min(SPARE, SPARE_SHARE * budget_gib)


def settings(before: Config, after: Config) -> list[str]:
    """What turns one config into the other, as one would write it on the command line."""
    lines: list[str] = []
    for dotted in (key for keys in GROUPS.values() for key in keys):
        section, key = dotted.split(".")
        lines += _differences(dotted, *(getattr(getattr(one, section), key, None) for one in (before, after)))
    return lines


def _differences(dotted: str, before: Any, after: Any) -> list[str]:
    if isinstance(after, BaseModel):
        return [
            line
            for name in type(after).model_fields
            for line in _differences(f"{dotted}.{name}", getattr(before, name), getattr(after, name))
        ]
    return [] if before == after else [f"{dotted}={_text(after)}"]


def _text(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(str, value))}]"
    return "null" if value is None else str(value)
