"""Evaluation on held-out problems: when it is due, mean reward and pass@k."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from ebbtide.checkpoint.store import Checkpoint
from ebbtide.config.root import Config
from ebbtide.progress import Progress
from ebbtide.rollout.batch import by_task
from ebbtide.rollout.engine import Completion, SamplingParams
from ebbtide.rollout.prompts import Prompt
from ebbtide.tasks.score_message import ScoreResult

Attempt = Callable[[Sequence[Prompt], int, SamplingParams, Progress], tuple[list[Completion], list[ScoreResult]]]
"""Samples so many completions of each prompt and scores them: both are [prompts * samples]."""


def is_eval_missing(config: Config, saved: Checkpoint) -> bool:
    """Whether the evaluation that was due at this checkpoint's step is missing, as the run was stopped before it."""
    return config.is_eval_due(saved.step) and not any(key.startswith("evaluate/") for key in saved.metrics)


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """The probability that at least one of k samples passes, drawn without replacement from `samples` of which `passed`
    pass."""
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def evaluate(
    config: Config,
    attempt: Attempt,
    prompts: Sequence[Prompt],
    progress: Progress,
    *,
    last: bool = False,
) -> dict[str, float]:
    """Evaluates the policy on the same problems with the same seeds every time, so that a difference is due to the
    policy alone.

    An evaluation uses no random state of the run, so skipping it or doing it later changes nothing. `last` adds the
    evaluation of `evaluate.final`.
    """
    settings = config.evaluate
    assert settings is not None  # the loop evaluates only if the config has the section
    run_trial = _Trial(config, attempt, progress)
    figures = run_trial(prompts[: settings.problems], settings.samples, settings.temperature, settings.k)
    if last and settings.final is not None:
        chosen = prompts[: settings.final.problems]
        greedy = run_trial(chosen, 1, 0.0, [1])
        sampled = run_trial(chosen, settings.final.samples, settings.final.temperature, settings.final.k)
        figures |= {f"final/{name}": value for name, value in sampled.items()}
        figures |= {"final/greedy": greedy["pass@1"]} if "pass@1" in greedy else {}
    return {f"evaluate/{name}": value for name, value in figures.items()}


@dataclass(frozen=True)
class _Trial:
    """Generates completions of held-out prompts, scores them and returns their metrics."""

    config: Config
    attempt: Attempt
    progress: Progress

    def __call__(
        self, prompts: Sequence[Prompt], samples: int, temperature: float, ks: Sequence[int]
    ) -> dict[str, float]:
        rollout, sampled = self.config.rollout, temperature > 0
        sampling = SamplingParams(
            rollout.max_new_tokens,
            temperature,
            rollout.top_p if sampled else 1.0,
            rollout.top_k if sampled else 0,
            rollout.min_p if sampled else 0.0,
            tuple(rollout.stop),
        )
        completions, scored = self.attempt(prompts, samples, sampling, self.progress)
        assert self.config.evaluate is not None
        pass_reward = self.config.evaluate.pass_reward
        failures = Counter(score.failure for score in scored if score.failure is not None)
        # [prompts][those of its samples that were not lost by a judge or a reward model]
        judged = [
            [score for score in scored[first : first + samples] if not score.is_unjudged]
            for first in range(0, len(scored), samples)
        ]
        passed = [sum(one.failure is None and one.value >= pass_reward for one in some) for some in judged]

        def figures(places: Sequence[int]) -> dict[str, float]:
            """Of the prompts at these places; nothing where too few samples were judged."""
            found = {"reward": [score.value for place in places for score in judged[place]]}
            for k in ks:
                enough = [place for place in places if len(judged[place]) >= k]
                found[f"pass@{k}"] = [pass_at_k(len(judged[place]), passed[place], k) for place in enough]
            return {name: fmean(values) for name, values in found.items() if values}

        parts = by_task(range(len(prompts)), lambda place: prompts[place].problem)
        return {
            **figures(range(len(prompts))),
            **{f"task/{name}/{key}": value for name, some in parts.items() for key, value in figures(some).items()},
            "completion_tokens": fmean(len(one.tokens) for one in completions),
            "finished": fmean(one.finish == "stop" for one in completions),
            **{f"score_failures/{name}": float(number) for name, number in failures.items()},
        }
