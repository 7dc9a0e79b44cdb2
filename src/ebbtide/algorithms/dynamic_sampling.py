"""Dynamic sampling (DAPO, https://arxiv.org/abs/2503.14476): a step is filled with groups whose rewards differ."""

from __future__ import annotations

from statistics import fmean
from typing import NamedTuple, Protocol

from ebbtide.algorithms.task import Rollouts
from ebbtide.rollout.engine import Completion
from ebbtide.rollout.episodes import Episode
from ebbtide.rollout.prompts import Prompt
from ebbtide.tasks.score_message import ScoreResult


class _Group(NamedTuple):
    """The completions of one prompt."""

    prompt: Prompt
    completions: list[Completion]
    scored: list[ScoreResult]
    episodes: list[Episode]

    @property
    def has_signal(self) -> bool:
        """Whether the rewards differ, as the task gave them: what a long completion loses, or one that is far from the
        reference, is no sign of what the policy can do."""
        return len({one.value for one in self.scored if not one.is_unjudged}) > 1


class Refill(Protocol):
    """Samples and scores more groups."""

    def __call__(self, count: int, *names: object) -> Rollouts:
        """Groups of the next `count` prompts, with seeds of their own by these names."""
        ...


class Filled(NamedTuple):
    """The groups of a step, and what it took to find them."""

    rollouts: Rollouts
    metrics: dict[str, float]


def fill_with_signal(first: Rollouts, more: Refill, step: int, max_num_gen_batches: int) -> Filled:
    """The groups of `first` whose rewards differ, in place of the others groups of more prompts; where there are too
    few in the end, the last ones without a signal stay."""
    wanted = len(first.prompts)
    groups = _groups(first)
    batches = 1
    while (missing := wanted - sum(group.has_signal for group in groups)) > 0 and batches < max_num_gen_batches:
        groups += _groups(more(missing, step, "refill", batches))
        batches += 1
    signal = [group for group in groups if group.has_signal]
    rest = [group for group in groups if not group.has_signal]
    chosen = signal + rest[len(rest) - (wanted - len(signal)) :]
    metrics = {
        "gen_batches": float(batches),
        "groups_sampled": float(len(groups)),
        "reward_sampled": fmean(one.value for group in groups for one in group.scored),
    }
    return Filled(_joined(chosen), metrics)


def _groups(rollouts: Rollouts) -> list[_Group]:
    found, first = [], 0
    for prompt, group in zip(rollouts.prompts, rollouts.groups, strict=True):
        last = first + len(group)
        found.append(
            _Group(prompt, list(group), list(rollouts.scored[first:last]), list(rollouts.episodes[first:last]))
        )
        first = last
    return found


def _joined(groups: list[_Group]) -> Rollouts:
    return Rollouts(
        [group.prompt for group in groups],
        [group.completions for group in groups],
        [one for group in groups for one in group.scored],
        [one for group in groups for one in group.episodes],
    )
