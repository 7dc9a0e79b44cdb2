"""Searches the settings for a memory budget: every combination of keeping, offloading, streaming and recomputing is
predicted, and the fastest that fits is chosen. Settings made by hand stay."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from ebbtide.config.planner_keys import (
    GROUPS,
    Change,
    decidable_groups,
    free_groups,
    keys_by_hand,
    settings_diff,
    validate_changes,
    with_changes,
)
from ebbtide.config.root import Config
from ebbtide.config.train import Rehearsal
from ebbtide.errors import UserError
from ebbtide.memory.plan import HOST_SHARE
from ebbtide.model.workload import Workload, max_workload
from ebbtide.optim.costs import STATE
from ebbtide.planner.holdings import phases_without
from ebbtide.planner.predict import Predictor, host_limit
from ebbtide.planner.prediction import Prediction
from ebbtide.policy.activation_costs import ActivationPolicy
from ebbtide.policy.fused_costs import can_fuse
from ebbtide.system.units import GIB, gib

# A plan leaves 3% of the budget, and 0.45 GiB, or a tenth of the budget if that is less, to fragmentation.
MARGIN, SPARE, SPARE_SHARE = 0.03, 0.45, 0.1
SAME = 0.005  # Two plans whose seconds differ by less are equally fast: the one with fewer changes is chosen.
# Larger micro-batches are tried where everything fits: with them a small model, which waits for the host to launch its
# kernels, does so less often. They take memory: a step must take less than this fraction of its seconds.
LARGER_TOKENS, FASTER = (32768, 65536), 0.95

Bottleneck = Literal["device", "cache", "host", "loading"]


@dataclass(frozen=True)
class Candidate:
    """One combination of settings, and its prediction."""

    changes: Change
    config: Config
    prediction: Prediction

    @property
    def change_count(self) -> int:
        """How many groups of settings are changed."""
        return self.change_count_in(GROUPS)

    def change_count_in(self, groups: Collection[str]) -> int:
        """How many of these groups are changed."""
        return sum(any(key in GROUPS[group] for key in self.changes) for group in groups)


@dataclass(frozen=True)
class Reason:
    """Why a setting was changed."""

    settings: Sequence[str]
    why: str
    seconds: float | None
    """Seconds that it adds to a step; negative if it saves some. None if it costs generation, and without it nothing
    could be generated."""


@dataclass(frozen=True)
class PlanResult:
    """What a search found. The fields after `reasons` are for the case that nothing fits without changing settings made
    by hand."""

    candidate: Candidate
    """What the run does; if nothing fits, the candidate that needs the least memory."""
    bottleneck: Bottleneck | None = None
    """What there is too little of; None if the plan fits."""
    reasons: Sequence[Reason] = ()
    nearest: Candidate | None = None
    """The candidate that fits with the fewest changes to settings made by hand."""
    fastest: Candidate | None = None
    """The fastest candidate that fits, if it is faster than the nearest; it changes more settings made by hand."""
    min_gib: float | None = None
    """If nothing fits at all: the smallest budget in GiB that any candidate could do with, if the device is what
    lacks."""
    by_hand: Sequence[str] = ()
    """The settings made by hand, which were not changed."""
    with_more_host: Candidate | None = None
    """If nothing fits at all: the candidate that would fit with the least additional host memory."""
    notes: Sequence[str] = ()
    """Further notes for the user, in sentences."""

    @property
    def fits(self) -> bool:
        return self.bottleneck is None


class PlanSearch:
    """The search for one model, workload and budget."""

    def __init__(
        self,
        predictor: Predictor,
        work: Workload,
        budget_gib: float,
        host_gib: float,
        rehearsal: Rehearsal | None = None,
    ) -> None:
        self._predictor, self._work, self._rehearsal = predictor, work, rehearsal
        self._budget_gib, self._host_gib = budget_gib, host_gib
        self.usable_bytes = usable_gib(budget_gib) * GIB

    @classmethod
    def for_config(cls, predictor: Predictor, config: Config, rehearsal: Rehearsal | None = None) -> PlanSearch:
        """The search for a config's largest step, on the predictor's machine and within the config's budget."""
        machine = predictor.machine
        budget_gib = config.memory.budget_gib or machine.device_gib
        return cls(predictor, max_workload(config), budget_gib, machine.host_gib, rehearsal)

    def choose(self, config: Config) -> PlanResult:
        """The config unchanged, or with larger micro-batches, if it fits with a KV cache of full size; otherwise the
        fastest candidate that leaves settings made by hand alone; otherwise a misfit with the nearest of all."""
        config = self._resolve_balanced(config)
        unchanged = self._predict(config, {})
        lacks = self.bottleneck(unchanged)
        planned = config.memory.plan == "auto"
        free = free_groups(config) if planned else ()
        if lacks is None and (unchanged.prediction.cache_is_full_size or not planned):
            grows = "micro-batch" in free and not self._predictor.on_cpu
            best = self._with_larger_micro_batches(config, unchanged) if grows else unchanged
            return PlanResult(self._at_full_budget(best), reasons=self._reasons(config, best))
        candidates = list(self._candidates(config, free))
        fitting = [one for one in candidates if self.bottleneck(one) is None]
        if fitting:
            best = _best(fitting)
            return PlanResult(self._at_full_budget(best), reasons=self._reasons(config, best))
        smallest, by_hand = min(candidates, key=self._misfit_key), keys_by_hand(config)
        everything = (
            candidates if free == decidable_groups(config) else list(self._candidates(config, decidable_groups(config)))
        )
        if fitting := [one for one in everything if self.bottleneck(one) is None]:
            nearest, fastest = _nearest(fitting, set(decidable_groups(config)) - set(free)), _best(fitting)
            faster = fastest.prediction.seconds < (1 - SAME) * nearest.prediction.seconds
            return PlanResult(
                smallest, self.bottleneck(smallest), (), nearest, fastest if faster else None, by_hand=by_hand
            )
        least, lacks = self._min_budget(everything), self.bottleneck(smallest)
        if least is None and any(self._host_bottleneck(one) == "loading" for one in everything):
            lacks = "loading"  # It comes before anything else, and no plan changes it.
        return PlanResult(
            smallest, lacks, min_gib=least, by_hand=by_hand, with_more_host=self._with_more_host(everything)
        )

    def _with_larger_micro_batches(self, config: Config, unchanged: Candidate) -> Candidate:
        """The config with the smallest micro-batches that are not much slower than larger ones."""
        best = unchanged
        for tokens in (tokens for tokens in LARGER_TOKENS if tokens > config.train.microbatch_tokens):
            larger = self._predict(config, {"train.microbatch_tokens": tokens})
            fits = self.bottleneck(larger) is None and larger.prediction.cache_is_full_size
            if not fits or larger.prediction.seconds > FASTER * best.prediction.seconds:
                break
            best = larger
        return best

    def nearest(self, config: Config) -> Candidate | None:
        """The candidate that fits with the fewest changes to any settings; among equals, the fastest."""
        unchanged = self._predict(config, {})
        if self.bottleneck(unchanged) is None:
            return unchanged
        fitting = [one for one in self._candidates(config, decidable_groups(config)) if self.bottleneck(one) is None]
        return _nearest(fitting, GROUPS) if fitting else None

    def _misfit_key(self, candidate: Candidate) -> tuple[bool, float, int, float]:
        """Sort key of candidates that do not fit: by the memory that they need, with those that lack host memory
        last."""
        prediction, host = candidate.prediction, self._host_bottleneck(candidate) is not None
        takes = float(prediction.host) if host else max(prediction.min_peak, prediction.generation.rollout_worker_bytes)
        return host, takes, candidate.change_count, prediction.seconds

    def bottleneck(self, candidate: Candidate) -> Bottleneck | None:
        """What there is too little of for a candidate; None if it fits."""
        prediction = candidate.prediction
        if max(prediction.peak, prediction.generation.rollout_worker_bytes) > self.usable_bytes:
            return "device"
        if not prediction.can_generate:
            return "cache"
        return self._host_bottleneck(candidate)

    def _host_bottleneck(self, candidate: Candidate) -> Bottleneck | None:
        if candidate.prediction.host > host_limit(candidate.config, self._host_gib):
            return "host"
        return "loading" if candidate.prediction.loading_bytes > self._host_gib * GIB else None

    def _with_more_host(self, candidates: Iterable[Candidate]) -> Candidate | None:
        """The candidate that would fit with the least additional host memory, or with a larger
        `memory.host_budget_gib`."""
        lacking = (one for one in candidates if self.bottleneck(one) in ("host", "loading"))
        fitting = (
            one
            for one in lacking
            if one.config.memory.host_budget_gib is None or one.prediction.loading_bytes <= self._host_gib * GIB
        )
        return min(fitting, key=required_host_bytes, default=None)

    def _at_full_budget(self, candidate: Candidate) -> Candidate:
        """The candidate as a run executes it: a plan leaves part of the budget to the allocator, and the KV cache of a
        run also uses what is free of that."""
        if candidate.prediction.cache_is_full_size:
            return candidate
        whole = self._predictor.predict(candidate.config, self._work, int(self._budget_gib * GIB), self._rehearsal)
        return replace(candidate, prediction=whole)

    def _min_budget(self, candidates: Iterable[Candidate]) -> float | None:
        """The smallest budget in GiB that any candidate fits into, with a KV cache for one sample in generate."""
        needs = [one.prediction.min_peak for one in candidates if self._host_bottleneck(one) is None]
        if not needs:
            return None
        filled = gib(min(needs))
        return min((filled + SPARE) / (1 - MARGIN), filled / (1 - MARGIN - SPARE_SHARE))

    def _resolve_balanced(self, config: Config) -> Config:
        """The config with `preset: balanced` replaced by the lists that it resolves to, so that the run does what was
        predicted."""
        now = config.memory.activations
        if config.memory.plan != "auto" or now.preset != "balanced" or self._predictor.shape.dense_layers:
            return config
        choice = self._predictor.resolve_activations(config)
        lists = {"keep": None, "offload": sorted(choice.offload) or None, "recompute": sorted(choice.recompute) or None}
        resolved = {"preset": "keep", "on_slow_link": "ignore", "recompute_blocks": choice.recompute_blocks, **lists}
        return with_changes(config, {"memory.activations": now.model_copy(update=resolved)})

    def _candidates(self, config: Config, free: Sequence[str]) -> Iterator[Candidate]:
        """Every combination that could be the answer, those with the fewest changes first."""
        options: list[list[Change]] = [
            [validate_changes(one) for one in self._options(config, group)] if group in free else [{}]
            for group in GROUPS
        ]
        *others, micro_batches, chunks = options  # In the order of GROUPS.
        sizes = [[{**micro_batch, **chunk} for chunk in chunks] for micro_batch in micro_batches]
        for combination in product(*others):
            changes: dict[str, Any] = {}
            for one in combination:
                changes |= one
            try:
                yield from self._with_batch_sizes(config, changes, sizes)
            except UserError:  # Such as a list of `memory.offload` that names a holding that is always on the host.
                continue

    def _with_batch_sizes(
        self, config: Config, changes: Change, sizes: Sequence[Sequence[Change]]
    ) -> Iterator[Candidate]:
        """One combination with every micro-batch size, each with the largest chunk of the output head that fits: a
        smaller chunk needs less memory but no less time."""
        for chunks in sizes:
            yield (largest := self._predict(config, {**changes, **chunks[0]}))
            if len(chunks) == 1 or self.bottleneck(largest) is None:
                continue
            smallest = self._predict(config, {**changes, **chunks[-1]})
            if self.bottleneck(smallest) is None:
                yield from (self._predict(config, {**changes, **chunk}) for chunk in chunks[1:-1])
            yield smallest

    def _predict(self, config: Config, changes: Change) -> Candidate:
        changed = with_changes(config, changes)
        return Candidate(
            changes, changed, self._predictor.predict(changed, self._work, int(self.usable_bytes), self._rehearsal)
        )

    def _options(self, config: Config, group: str) -> list[Change]:
        """The options of a group; the first leaves it as it is."""
        if group == "optimizer":
            choices = [("device", None), ("device", 0.5), ("streamed", None), ("cpu", None), ("streamed", 0.5)]
            now = config.optimizer.place, config.optimizer.cpu_fraction
            return [
                {},
                *(
                    {"optimizer.place": place, "optimizer.cpu_fraction": fraction}
                    for place, fraction in choices
                    if (place, fraction) != now
                ),
            ]
        if group == "offload":
            state_offload = {phase: list(STATE) for phase in phases_without(STATE, config)}
            return [
                {},
                *([{"memory.preset": "keep", "memory.offload": state_offload}] if state_offload else []),
                {"memory.preset": "lean", "memory.offload": {}},
            ]
        if group == "base":
            device = "cpu" if self._predictor.on_cpu else "cuda"
            streams = can_fuse(self._predictor.shape, config.model.itemsize(device), device, 1)
            return [{}, {"memory.stream_base": True}] if streams and not config.memory.stream_base else [{}]
        if group == "rollout_weights":
            gathers = config.rollout_weights(self._predictor.sharing.shards) == "gathered"
            return [{}, {"parallel.rollout_weights": "layerwise"}] if gathers else [{}]
        if group == "activations":
            return [{}, *({"memory.activations": one} for one in self._activation_options(config))]
        if group == "micro-batch":
            least = config.min_microbatch_tokens
            tried = (12288, 8192, 4096, 2048, 1024, 512, least)
            sizes = {size for size in tried if least <= size < config.train.microbatch_tokens}
            return [{}, *({"train.microbatch_tokens": size} for size in sorted(sizes, reverse=True))]
        chunks = [size for size in (1024, 256) if size < config.train.head_chunk_tokens]
        return [{}, *({"train.head_chunk_tokens": size} for size in chunks)]

    def _activation_options(self, config: Config) -> list[dict[str, Any]]:
        """The options for activations, with the user's `keep_last` and `minimum_kib`."""
        shape, now = self._predictor.shape, config.memory.activations
        if shape.dense_layers:  # `memory.activations` works only for blocks that are all alike.
            return []
        same = {"keep_last": now.keep_last, "minimum_kib": now.minimum_kib}
        balanced = ActivationPolicy()
        if not shape.is_traced:
            tried = with_changes(config, {"memory.activations": {"preset": "balanced"}})
            balanced = self._predictor.resolve_activations(tried)
        return [{**one, **same} for one in self._predictor.activation_options(balanced)]

    def _reasons(self, config: Config, best: Candidate) -> list[Reason]:
        """What each change is for and what it costs, found by undoing it alone."""
        found = []
        for keys in GROUPS.values():
            if not any(key in keys for key in best.changes):
                continue
            rest = {key: value for key, value in best.changes.items() if key not in keys}
            without = self._predict(config, rest)
            lacks, tight = self.bottleneck(without), without.prediction.peak_phase
            over = gib(without.prediction.phases[tight].peak)
            why = {
                "device": f"without it the {tight} phase needs {over:.3g} GiB ({gib(self.usable_bytes):.3g} usable)",
                "cache": "without it the generate phase has no room for the KV cache of one sample",
                "host": "without it there is too little host memory",
                "loading": "",  # No change affects what loading needs.
                None: "it makes a step faster",
            }[lacks]
            cost: float | None = _cost(best.prediction, without.prediction, whole=lacks is None)
            if keys is GROUPS["rollout_weights"] and lacks is not None and not without.prediction.cache_is_full_size:
                cost = None
            found.append(Reason(settings_diff(without.config, best.config), why, cost))
        return found


def required_host_bytes(candidate: Candidate) -> float:
    """Bytes of host memory, or of `memory.host_budget_gib` if that is set, that a candidate needs."""
    pinned = candidate.prediction.host
    return (
        pinned
        if candidate.config.memory.host_budget_gib is not None
        else max(pinned / HOST_SHARE, candidate.prediction.loading_bytes)
    )


def _best(fitting: Sequence[Candidate]) -> Candidate:
    """The fastest candidate; among equally fast ones, the one with the fewest changes."""
    quickest = min(one.prediction.seconds for one in fitting)
    return min(
        (one for one in fitting if one.prediction.seconds <= (1 + SAME) * quickest), key=lambda one: one.change_count
    )


def _nearest(fitting: Sequence[Candidate], kept: Collection[str]) -> Candidate:
    """The best of the candidates that change the fewest of these groups."""
    fewest = min(one.change_count_in(kept) for one in fitting)
    return _best([one for one in fitting if one.change_count_in(kept) == fewest])


def _cost(mine: Prediction, other: Prediction, *, whole: bool) -> float:
    """Seconds by which a step of one is longer than of the other. Generation is left out if the other does not fit and
    has a smaller KV cache than it could use: its time would be that of no real run. `whole`: the other fits."""
    compared = [phase for phase in mine.cycle if whole or other.cache_is_full_size or phase != "generate"]
    return sum(mine.phases[phase].seconds - other.phases[phase].seconds for phase in compared)


def usable_gib(budget_gib: float) -> float:
    """The part of a budget that a plan may use, in GiB."""
    return (1 - MARGIN) * budget_gib - min(SPARE, SPARE_SHARE * budget_gib)
