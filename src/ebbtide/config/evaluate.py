"""The section `evaluate`: held-out problems."""

from __future__ import annotations

from pydantic import model_validator

from ebbtide.config.base import Count, NotNegative, Positive, Section


class FinalEvaluationConfig(Section):
    """The evaluation after the last step: usually on more held-out problems, once greedily and once with several
    samples per problem."""

    problems: Count | None = None
    """Number of held-out problems; `null` is all of them."""

    samples: Count = 8
    """Completions per problem, in addition to the greedy one."""

    temperature: Positive = 1.0
    """Sampling temperature of those completions."""

    k: list[Count] = [1, 8]
    """Values of k for which pass@k is reported, each at most `samples`."""

    @model_validator(mode="after")
    def _k_within_samples(self) -> FinalEvaluationConfig:
        if not self.k or max(self.k) > self.samples:
            raise ValueError(
                f"`evaluate.final.k: {self.k}` must name values from 1 to `evaluate.final.samples` = {self.samples}"
            )
        return self


class EvaluateConfig(Section):
    """Evaluation on held-out problems, as a phase of the loop."""

    every: Count = 20
    """Steps between evaluations. One always runs before the first step and one after the last."""

    problems: Count = 64
    """Number of held-out problems, at most `task.held_out`."""

    samples: Count = 1
    """Completions per problem."""

    temperature: NotNegative = 0.0
    """Sampling temperature; 0 is greedy decoding."""

    k: list[Count] = [1]
    """Values of k for which pass@k is reported, each at most `samples`."""

    pass_reward: float = 1.0
    """A completion with at least this reward passes."""

    final: FinalEvaluationConfig | None = None
    """If set, a larger evaluation, both greedy and sampled, runs after the last step."""

    @model_validator(mode="after")
    def _k_within_samples(self) -> EvaluateConfig:
        if not self.k or max(self.k) > self.samples:
            raise ValueError(f"`evaluate.k: {self.k}` must name values from 1 to `evaluate.samples` = {self.samples}")
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(
                f"greedy evaluation (`evaluate.temperature: 0`) would give {self.samples} identical completions: set a"
                " temperature above 0, or `evaluate.samples: 1`"
            )
        return self

    @property
    def max_problems(self) -> int | None:
        """The most held-out problems that an evaluation of the run uses; None is all of them."""
        if self.final is None:
            return self.problems
        return None if self.final.problems is None else max(self.problems, self.final.problems)
