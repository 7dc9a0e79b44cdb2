"""Rewards of several scorers, or of a model: each is an entry of `task.rewards`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ebbtide.importing.answers import Answers
from ebbtide.importing.problems import ODD
from ebbtide.importing.source import Unread

REWARDS = "task.rewards"
SCORING = ("task.file.scorer", "task.python", REWARDS)  # what says how completions are scored
NO_ANSWERS = "a reward model reads no answers"
RESERVED = "extracted"  # no reward may have this name
PASSING = "with `task.rewards`, `evaluate.pass_reward` has to be the reward that passes, where `evaluate` is set"


@dataclass(frozen=True)
class Reward:
    """One scorer of a run."""

    name: str
    """What it is called there; its name here is made of it."""
    settings: Mapping[str, Any]
    """Key below `task.rewards.NAME`, such as `python.object` -> its value."""
    theirs: tuple[str, ...]
    """Their keys that say it."""
    how: str = ""
    weight: float = 1.0
    weight_keys: tuple[str, ...] = ()
    weight_how: str = ""


def function_reward(target: str, *theirs: str, how: str = "", options: Mapping[str, Any] | None = None) -> Reward:
    """A reward function, `module:name`."""
    settings = {"python.object": target} | ({"python.options": dict(options)} if options else {})
    return Reward(target.rpartition(":")[2], settings, theirs, how)


def model_reward(path: Any, *theirs: str, how: str = "", **options: Any) -> Reward:
    """A reward model, by its folder or hub id. It is called by the last part of that, as its metrics are there."""
    text = str(path)
    name = "reward_model" if "$" in text or isinstance(path, Unread) else text.rstrip("/").rpartition("/")[2]
    settings = {"reward_model.path": text} | {f"reward_model.{key}": value for key, value in options.items()}
    return Reward(name, settings, theirs, how)


def take_rewards(answers: Answers, rewards: Sequence[Reward]) -> None:
    """All that scores completions, in place of what was taken before."""
    forget_scorers(answers)
    for name, one in _named(rewards):
        ours = f"{REWARDS}.{name}"
        for number, (key, value) in enumerate(one.settings.items()):
            answers.take(f"{ours}.{key}", value, *one.theirs, how=one.how if number == 0 else "")
        if len(rewards) > 1 or one.weight != 1:
            answers.take(f"{ours}.weight", one.weight, *one.weight_keys, how=one.weight_how)
    if not any("python.object" in one.settings or "scorer" in one.settings for one in rewards):
        answers.take("task.file.answer_field", None, *rewards[0].theirs, how=NO_ANSWERS)
    answers.source.notes.append(PASSING)


def forget_scorers(answers: Answers) -> None:
    """Forgets what scores completions, because something else does."""
    answers.taken = {key: taken for key, taken in answers.taken.items() if not key.startswith(SCORING)}


def prefer_command_line(answers: Answers) -> None:
    """A scorer of Ebbtide that the command line names is the only one; but `task.rewards.NAME` is added to the rewards
    that were taken, or changes one of them."""
    ours, below = answers.source.ours, f"{REWARDS}."
    is_added = any(key.startswith(below) for key in ours) and not any(key.startswith(below) for key in answers.taken)
    if is_added or any(key in (*SCORING, "task.python.object") for key in ours):
        forget_scorers(answers)


def weighed(rewards: Sequence[Reward], weights: Sequence[float], *theirs: str) -> list[Reward]:
    """The rewards with their weights."""
    return [replace(one, weight=weight, weight_keys=theirs) for one, weight in zip(rewards, weights, strict=True)]


def _named(rewards: Sequence[Reward]) -> list[tuple[str, Reward]]:
    """The rewards with a name for each: one that metrics can have, and no other has."""
    found: dict[str, Reward] = {}
    for one in rewards:
        name = ODD.sub("_", one.name).strip("_") or "reward"
        while name in found or name == RESERVED:
            name = f"{name}_{len(found) + 1}"
        found[name] = one
    return list(found.items())
