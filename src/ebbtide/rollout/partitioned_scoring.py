"""Scores completions on all ranks of a run."""

from __future__ import annotations

from collections.abc import Sequence

from ebbtide.parallel.comm import Comm
from ebbtide.progress import Progress
from ebbtide.tasks.score_message import ScoreResult
from ebbtide.tasks.scoring import ScoringPool
from ebbtide.tasks.task import Problem


class PartitionedScoring:
    """Each rank scores its share of the completions in its own worker processes; the scores are then all-gathered."""

    def __init__(self, pool: ScoringPool, comm: Comm) -> None:
        self._pool, self._comm = pool, comm

    def score(
        self, work: Sequence[tuple[Problem, str]], progress: Progress = lambda done, of: None
    ) -> list[ScoreResult]:
        return self._comm.map_partitioned(work, [1] * len(work), lambda share: self._pool.score(share, progress))
