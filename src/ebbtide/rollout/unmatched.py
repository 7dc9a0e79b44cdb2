"""Ends a run after a few steps if no completion was ever scored, or none ever matched `task.extract`: it would learn
nothing."""

from __future__ import annotations

from collections.abc import Sequence

from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.errors import UserError
from ebbtide.rollout.batch import Sample
from ebbtide.system.printable import printable
from ebbtide.tasks.rewards import EXTRACTED

UNSCORED_STEPS = 3  # steps without a single score before a run ends
# completions without a match before a run ends: with a match once in 100, that would end 1 run in 13
MIN_COMPLETIONS = 256


class UnmatchedGuard:
    """Counts completions without a match or a score. All ranks see the same samples, and so end together."""

    def __init__(self, config: GrpoConfig) -> None:
        self._config = config
        self._matched = config.task.extract is None
        self._steps = self._completions = 0
        self._scored = False
        self._failed_steps = self._failed = 0

    def after_step(self, samples: Sequence[Sample]) -> str | None:
        """Returns a note after the first step without a match, and raises after enough of them. A sample that could not
        be scored might have matched: its step does not count."""
        self._check_scoring(samples)
        scored = [sample.scored for sample in samples if sample.scored is not None]
        self._matched = self._matched or any(one.parts.get(EXTRACTED) for one in scored)
        if self._matched or any(one.failure for one in scored):
            return None
        self._steps, self._completions = self._steps + 1, self._completions + len(samples)
        most = self._config.task.unmatched_steps
        if most is not None and self._steps >= most and self._completions >= MIN_COMPLETIONS:
            raise UserError(f"{self._explain(samples)}; or continue such runs with `task.unmatched_steps: null`")
        return self._explain(samples) if self._steps == 1 else None

    def _check_scoring(self, samples: Sequence[Sample]) -> None:
        """Ends a run whose scorer has failed on every sample so far."""
        scored = [sample.scored for sample in samples if sample.scored is not None]
        self._scored = self._scored or any(one.failure is None for one in scored)
        if self._scored:
            return
        self._failed_steps, self._failed = self._failed_steps + 1, self._failed + len(samples)
        if self._failed_steps >= UNSCORED_STEPS and self._failed >= MIN_COMPLETIONS:
            why = f"{scored[0].failure}: {printable(scored[0].message, 300)}"
            raise UserError(
                f"none of {self._failed:,} completions so far could be scored ({why}): fix the task's scorer, its"
                " judge or its environment"
            )

    def _explain(self, samples: Sequence[Sample]) -> str:
        task, rollout = self._config.task, self._config.rollout
        cut = sum(sample.completion.finish == "length" for sample in samples) / len(samples)
        limit = f"`rollout.max_new_tokens: {rollout.max_new_tokens}`"
        longer = f", raise {limit}, which cut {cut:.0%} of them off," if cut else ""
        return (
            f"none of {self._completions:,} completions so far matches `task.extract: {task.extract}`: "
            "every reward is 0, and there is nothing to learn from. "
            f'One of them: "{printable(samples[0].completion.text, 300)}". '
            f"Fix the pattern{longer} or ask for its format in `task.system` or in the prompts"
        )
