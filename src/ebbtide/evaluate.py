"""Held-out problems: when they are due, mean reward and pass@k."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
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


def evaluate(
    config: Config, engine: Engine, scoring: ScoringPool, prompts: Sequence[Prompt], progress: Progress, *, last: bool = False
) -> dict[str, float]:
    """The same problems with the same seeds every time, so that a difference is the policy's.

    Draws from no random state of the run: one that is left out, or made up for later, changes nothing. `last`: with
    those of `evaluate.final` as well.
    """
    settings = config.evaluate
    assert settings is not None  # the loop asks only when the config has the section
    trial = Trial(config, engine, scoring, progress)
    figures = trial(prompts[: settings.problems], settings.samples, settings.temperature, settings.k)
    if last and settings.final is not None:
        chosen = prompts[: settings.final.problems]
        greedy = trial(chosen, 1, 0.0, [1])
        sampled = trial(chosen, settings.final.samples, settings.final.temperature, settings.final.k)
        figures |= {f"final/{name}": value for name, value in sampled.items()} | {"final/greedy": greedy["pass@1"]}
    return {f"evaluate/{name}": value for name, value in figures.items()}


@dataclass(frozen=True)
class Trial:
    """Completions of held-out prompts, and the figures of how they did."""

    config: Config
    engine: Engine
    scoring: ScoringPool
    progress: Progress

    def __call__(self, prompts: Sequence[Prompt], samples: int, temperature: float, ks: Sequence[int]) -> dict[str, float]:
        rollout, sampled = self.config.rollout, temperature > 0
        sampling = Sampling(
            rollout.max_new_tokens,
            temperature,
            rollout.top_p if sampled else 1.0,
            rollout.top_k if sampled else 0,
            rollout.min_p if sampled else 0.0,
            tuple(rollout.stop),
        )
        groups = self.engine.generate(requests(prompts, samples, self.config.seed, "evaluate"), sampling, self.progress)
        done = [completion for group in groups for completion in group]
        asked = [prompt.problem for prompt, group in zip(prompts, groups, strict=True) for _ in group]
        scored = self.scoring.score([(problem, one.text) for problem, one in zip(asked, done, strict=True)], self.progress)
        assert self.config.evaluate is not None
        right = [score.failure is None and score.value >= self.config.evaluate.pass_reward for score in scored]
        passed = [sum(right[i : i + samples]) for i in range(0, len(right), samples)]
        failures = Counter(score.failure for score in scored if score.failure is not None)
        return {
            "reward": fmean(score.value for score in scored),
            **{f"pass@{k}": fmean(pass_at_k(samples, count, k) for count in passed) for k in ks},
            "completion_tokens": fmean(len(one.tokens) for one in done),
            "finished": fmean(one.finish == "stop" for one in done),
            **{f"score_failures/{name}": float(number) for name, number in failures.items()},
        }
