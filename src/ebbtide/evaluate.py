"""Held-out problems: when they are due, mean reward and pass@k."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from ebbtide.batch import requests
from ebbtide.checkpoint.store import Saved
from ebbtide.config.tree import Config
from ebbtide.progress import Progress
from ebbtide.rollout.engine import Engine, Sampling
from ebbtide.rollout.prompts import Prompt
from ebbtide.tasks.scoring import ScoringPool


def due(config: Config, step: int) -> bool:
    """After this step."""
    return config.evaluate is not None and (step % config.evaluate.every == 0 or step == config.train.steps)


def owed(config: Config, saved: Saved) -> bool:
    """A checkpoint's step has not had the evaluation that was due: its run was stopped, and did not wait for it."""
    return due(config, saved.step) and not any(key.startswith("evaluate/") for key in saved.metrics)


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Chance that at least one of k samples, drawn without return from `samples` of which `passed` passed, passes."""
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def evaluate(config: Config, engine: Engine, scoring: ScoringPool, prompts: Sequence[Prompt], progress: Progress) -> dict[str, float]:
    """The same problems with the same seeds every time, so that a difference is the policy's.

    Draws from no random state of the run: one that is left out, or made up for later, changes nothing.
    """
    settings, rollout = config.evaluate, config.rollout
    assert settings is not None  # the loop asks only when the config has the section
    sampled = settings.temperature > 0
    sampling = Sampling(
        rollout.max_new_tokens,
        settings.temperature,
        rollout.top_p if sampled else 1.0,
        rollout.top_k if sampled else 0,
        rollout.min_p if sampled else 0.0,
        tuple(rollout.stop),
    )
    groups = engine.generate(requests(prompts, settings.samples, config.seed, "evaluate"), sampling, progress)
    work = [(prompt.problem, done.text) for prompt, group in zip(prompts, groups, strict=True) for done in group]
    scored = scoring.score(work, progress)
    rewards = [score.value for score in scored]
    cut = settings.samples
    right = [score.failure is None and score.value >= settings.pass_reward for score in scored]
    passed = [sum(right[i : i + cut]) for i in range(0, len(right), cut)]
    figures = {f"evaluate/pass@{k}": fmean(pass_at_k(cut, count, k) for count in passed) for k in settings.k}
    failures = Counter(score.failure for score in scored if score.failure is not None)
    return {"evaluate/reward": fmean(rewards), **figures, **{f"evaluate/score_failures/{name}": float(n) for name, n in failures.items()}}
