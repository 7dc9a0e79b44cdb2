"""A run in which no completion is ever scored, or ever matches `task.extract`, learns nothing: it ends after a few steps."""

from __future__ import annotations

from collections.abc import Sequence

from ebbtide.batch import Sample
from ebbtide.config.tree import Config
from ebbtide.errors import UserError
from ebbtide.printable import printable
from ebbtide.tasks.build import EXTRACTED

STEPS = 3  # in which nothing at all was scored, before a run ends
ENOUGH = 256  # completions without a match before a run ends: of a model that matches once in 100, 1 run in 13 would


class Unmatched:
    """All ranks see the same samples, and so end together."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._matched = config.task.extract is None
        self._steps = self._completions = 0
        self._scored = False
        self._failed_steps = self._failed = 0

    def after_step(self, samples: Sequence[Sample]) -> str | None:
        """What a person should be told. A sample that could not be scored may have matched: its step does not count."""
        self._check_scoring(samples)
        self._matched = self._matched or any(sample.scored.parts.get(EXTRACTED) for sample in samples)
        if self._matched or any(sample.scored.failure for sample in samples):
            return None
        self._steps, self._completions = self._steps + 1, self._completions + len(samples)
        most = self._config.task.unmatched_steps
        if most is not None and self._steps >= most and self._completions >= ENOUGH:
            raise UserError(f"{self._words(samples)}; or let such a run go on with `task.unmatched_steps: null`")
        return self._words(samples) if self._steps == 1 else None

    def _check_scoring(self, samples: Sequence[Sample]) -> None:
        """Ends a run whose scorer has failed on every sample there was."""
        self._scored = self._scored or any(sample.scored.failure is None for sample in samples)
        if self._scored:
            return
        self._failed_steps, self._failed = self._failed_steps + 1, self._failed + len(samples)
        if self._failed_steps >= STEPS and self._failed >= ENOUGH:
            why = f"{samples[0].scored.failure}: {printable(samples[0].scored.message, 300)}"
            raise UserError(f"none of {self._failed:,} completions so far could be scored ({why}): mend the task's scorer")

    def _words(self, samples: Sequence[Sample]) -> str:
        task, rollout = self._config.task, self._config.rollout
        cut = sum(sample.completion.finish == "length" for sample in samples) / len(samples)
        limit = f"`rollout.max_new_tokens: {rollout.max_new_tokens}`"
        longer = f", raise {limit}, which cut {cut:.0%} of them off," if cut else ""
        return (
            f"none of {self._completions:,} completions so far matches `task.extract: {task.extract}`: "
            "every reward is 0, and nothing can be learnt. "
            f'One of them: "{printable(samples[0].completion.text, 300)}". '
            f"Mend the pattern{longer} or ask for its form in `task.system` or the prompts"
        )
