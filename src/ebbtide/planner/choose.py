"""The settings for a budget: all ways of keeping, moving, streaming and recomputing are predicted, and the fastest that fits is taken. What is set by hand stays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from ebbtide.config.tree import Config, Rehearsal
from ebbtide.errors import UserError
from ebbtide.planner.machine import GIB
from ebbtide.planner.predict import Prediction, Predictor, room_of
from ebbtide.planner.saved import local_names
from ebbtide.planner.work import Work
from ebbtide.rollout.paged.room import SHARE, blocks_for

MARGIN, SPARE = 0.03, 0.25  # of the budget, and GiB beside it, are left for what the allocator cannot use between what it holds
SAME = 0.005  # two plans whose seconds differ by less are equally fast: the one that changes less is taken
HOST_SHARE = 0.8  # of the host's memory may be pinned, where no budget is set

Change = Mapping[str, Any]
"""Dotted key -> value."""

STATE = ["master", "moments"]
GROUPS: Mapping[str, tuple[str, ...]] = {
    "optimizer": ("optimizer.place", "optimizer.cpu_fraction"),
    "away": ("memory.preset", "memory.away"),
    "activations": ("memory.activations",),
    "micro-batch": ("train.microbatch_tokens",),
    "head": ("train.head_chunk_tokens",),
}
"""What is decided together: set one by hand, and the group is left alone."""


@dataclass(frozen=True)
class Tried:
    """One way, and what it comes to."""

    changes: Change
    config: Config
    prediction: Prediction


@dataclass(frozen=True)
class Chosen:
    tried: Tried
    fits: bool
    reasons: Sequence[str]
    """In words: why each setting that was changed was changed."""
    nearest: Tried | None = None
    """Where it does not fit: the fewest changes with which it would, hand-set or not."""
    least: float | None = None
    """Where it does not fit: GiB, the smallest budget that any way could do with."""


class Chooser:
    def __init__(self, predictor: Predictor, work: Work, budget_gib: float, host_gib: float, rehearsal: Rehearsal | None = None) -> None:
        self._predictor, self._work, self._rehearsal = predictor, work, rehearsal
        self.budget, self._host = budget_gib * GIB, host_gib * GIB
        self.usable = usable(budget_gib) * GIB

    def choose(self, config: Config) -> Chosen:
        """As it is, where that fits; else the fastest of what may be changed; else the nearest, whatever was set by hand."""
        config = self._settled(config)
        as_it_is = next(self._tried(config, ()))
        if self.fits(as_it_is):
            return Chosen(as_it_is, True, [])
        tried = [as_it_is]
        if config.memory.plan == "auto":
            tried = list(self._tried(config, free_groups(config)))
        fitting = [one for one in tried if self.fits(one)]
        if fitting:
            quickest = min(one.prediction.seconds for one in fitting)
            best = min((one for one in fitting if one.prediction.seconds <= (1 + SAME) * quickest), key=_changed)
            return Chosen(best, True, self._reasons(config, best))
        nearest, everything = self.nearest(config, tuple(GROUPS)), self._tried(config, tuple(GROUPS))
        return Chosen(as_it_is, False, [], nearest, None if nearest else min(self._needs(one) for one in everything) / GIB)

    def _settled(self, config: Config) -> Config:
        """`preset: balanced` as the lists that it comes to, so that the run does what was foreseen of it."""
        now = config.memory.activations
        if config.memory.plan != "auto" or now.preset != "balanced" or self._predictor.shape.dense_layers:
            return config
        choice = self._predictor.choice(config)
        lists = {"keep": None, "offload": sorted(choice.offload) or None, "recompute": sorted(choice.recompute) or None}
        return with_changes(config, {"memory.activations": now.model_copy(update={"preset": "keep", "gate": "ignore", **lists})})

    def nearest(self, config: Config, free: Sequence[str]) -> Tried | None:
        """What fits with the fewest changes; of those, the fastest."""
        fitting = (one for one in self._tried(config, free) if self.fits(one))
        return min(fitting, key=lambda one: (_changed(one), one.prediction.seconds), default=None)

    def _needs(self, tried: Tried) -> float:
        """Bytes of a budget with which a way would fit: what it takes outside of generate, or in generate with a cache for one sample."""
        prediction, generate = tried.prediction, tried.prediction.phases["generate"]
        room = room_of(self._predictor.shape)
        each, batch = self._predictor.each, tried.config.rollout.batch
        cache = blocks_for(round(self._work.prompt), prediction.block) + blocks_for(self._work.most_new, prediction.block) + 1
        one = (cache * prediction.block * room.bytes(each) + room.workspace(each, self._predictor.chunk, batch)) / SHARE
        held = sum(generate.device.get(name, 0) for name in ("weights", "reference", "master", "moments"))
        others = max(phase.peak for name, phase in prediction.phases.items() if name not in ("generate", "evaluate"))
        filled = max(others, held + one)
        return min((filled + SPARE * GIB) / (1 - MARGIN), filled / (1 - MARGIN - 0.1))

    def fits(self, tried: Tried) -> bool:
        prediction, work = tried.prediction, self._work
        needed = blocks_for(round(work.prompt), prediction.block) + blocks_for(work.most_new, prediction.block)
        return prediction.blocks >= needed and tried.prediction.peak <= self.usable and self._host_fits(tried)

    def _host_fits(self, tried: Tried) -> bool:
        limit = tried.config.memory.host_budget_gib
        return tried.prediction.host <= (limit * GIB if limit is not None else HOST_SHARE * self._host)

    def _tried(self, config: Config, free: Sequence[str]) -> Iterator[Tried]:
        """Every combination, those that change least first."""
        options: list[list[Change]] = [self._options(config, group) if group in free else [{}] for group in GROUPS]
        for some in product(*options):
            changes: dict[str, Any] = {}
            for one in some:
                changes |= one
            changed = with_changes(config, changes)
            try:
                prediction = self._predictor.of(changed, self._work, int(self.usable), self._rehearsal)
            except UserError:  # such as a row of `memory.away` that names what lives on the host
                continue
            yield Tried(changes, changed, prediction)

    def _options(self, config: Config, group: str) -> list[Change]:
        """What a group may be, as it is first."""
        longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
        if group == "optimizer":
            halves = [{"optimizer.place": place, "optimizer.cpu_fraction": 0.5} for place in ("device", "streamed")]
            whole = [{"optimizer.place": place, "optimizer.cpu_fraction": None} for place in ("device", "streamed", "cpu")]
            return _first({}, [whole[0], halves[0], *whole[1:], halves[1]], config)
        if group == "away":
            beside = {"generate": STATE, "score": STATE, "logprob": STATE, "evaluate": STATE, "save": None, "train": None, "step": None}
            return [{}, {"memory.away": beside}, {"memory.preset": "lean"}]
        if group == "activations":
            return [{}, *({"memory.activations": one} for one in self._policies(config))]
        if group == "micro-batch":
            sizes = [size for size in (12288, 8192, 4096, 2048, 1024, 512) if longest <= size < config.train.microbatch_tokens]
            least = [longest] if longest < config.train.microbatch_tokens and longest not in sizes else []
            return [{}, *({"train.microbatch_tokens": size} for size in [*sizes, *least])]
        chunks = [size for size in (1024, 256) if size < config.train.head_chunk_tokens]
        return [{}, *({"train.head_chunk_tokens": size} for size in chunks)]

    def _policies(self, config: Config) -> list[dict[str, Any]]:
        """Of activations: what is cheap made again; that, with as much on the host as the link carries; all made again; and that with blocks' inputs on the host."""
        shape = self._predictor.shape
        if shape.dense_layers:  # blocks that are not all alike cannot be told what to keep
            return []
        names = sorted(local_names(shape))
        balanced = self._predictor.choice(with_changes(config, {"memory.activations": {"preset": "balanced"}}))
        # What was foreseen for the link to carry is not held against it again when the run begins.
        both: dict[str, Any] = {"recompute": sorted(balanced.recompute), "offload": sorted(balanced.offload), "gate": "ignore"}
        listed = [{"recompute": names}, *([both] if balanced.offload else [])]
        return [*listed, {"preset": "recompute"}, {"preset": "offload"}]

    def _reasons(self, config: Config, best: Tried) -> list[str]:
        """Each change, undone alone: what it is for, and what it costs."""
        found = []
        for keys in GROUPS.values():
            mine = {key: value for key, value in best.changes.items() if key in keys}
            if not mine:
                continue
            rest = {key: value for key, value in best.changes.items() if key not in keys}
            config_without = with_changes(config, rest)
            said = _said(mine)
            prediction = self._predictor.of(config_without, self._work, int(self.usable), self._rehearsal)
            without = Tried(rest, config_without, prediction)
            costs = best.prediction.seconds - without.prediction.seconds
            if self.fits(without):
                found.append(f"{said}: saves {-costs:.2f} s a step")
                continue
            tight = without.prediction.tightest
            over = without.prediction.phases[tight].peak / GIB
            why = (
                f"without it {tight} would take {over:.1f} GiB of the {self.budget / GIB:.1f}"
                if self._host_fits(without)
                else "without it the host's memory would not do"
            )
            found.append(f"{said}: {why}; it costs {max(0.0, costs):.2f} s a step")
        return found


def usable(budget_gib: float) -> float:
    """GiB of a budget that a plan may fill: tiny ones, as in tests, give up a share only."""
    return (1 - MARGIN) * budget_gib - min(SPARE, 0.1 * budget_gib)


def free_groups(config: Config) -> tuple[str, ...]:
    """The groups of which nothing is set by hand."""
    by_hand = {f"{name}.{key}" for name in ("optimizer", "memory", "train") for key in getattr(config, name).model_fields_set}
    return tuple(group for group, keys in GROUPS.items() if not by_hand & set(keys))


def with_changes(config: Config, changes: Change) -> Config:
    """The config with dotted keys set; sections are replaced whole."""
    sections: dict[str, dict[str, Any]] = {}
    for dotted, value in changes.items():
        section, key = dotted.split(".")
        field = type(getattr(config, section)).model_fields[key].annotation
        if isinstance(value, dict) and field is not None:
            value = field.model_validate(value)
        sections.setdefault(section, {})[key] = value
    return config.model_copy(update={name: getattr(config, name).model_copy(update=update) for name, update in sections.items()})


def _first(now: Change, options: Sequence[Change], config: Config) -> list[Change]:
    """All options, without the one that is in force already."""
    place, fraction = config.optimizer.place, config.optimizer.cpu_fraction
    return [now, *(one for one in options if (one["optimizer.place"], one["optimizer.cpu_fraction"]) != (place, fraction))]


def _changed(tried: Tried) -> int:
    """How many groups are."""
    return sum(any(key in keys for key in tried.changes) for keys in GROUPS.values())


def _said(changes: Change) -> str:
    return ", ".join(f"`{line}`" for line in settings(changes))


def settings(changes: Change) -> list[str]:
    """As one would write them on the command line."""
    lines = []
    for key, value in changes.items():
        if isinstance(value, dict):
            lines += [f"{key}.{name}={_text(inner)}" for name, inner in value.items() if inner is not None]
        elif value is not None or key == "optimizer.cpu_fraction":
            lines.append(f"{key}={_text(value)}")
    return [line for line in lines if line != "optimizer.cpu_fraction=null"] or lines


def _text(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(str, value))}]"
    return "null" if value is None else str(value)
