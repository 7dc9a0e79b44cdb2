"""The report of every rank but rank 0: it shows and writes nothing."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Self

from torch import nn
from transformers import PreTrainedTokenizerBase as Tokenizer

from ebbtide.checkpoint.store import Checkpoint
from ebbtide.config.root import Config
from ebbtide.memory.residency import Residency
from ebbtide.planner.run_plan import RunPlan
from ebbtide.progress import Progress, no_progress
from ebbtide.rollout.batch import Sample


class NullReport:
    """A `RankReport` without output. It knows rank 0's run folder, into which checkpoints are written by all ranks."""

    def __init__(self, path: Path, resumed: Checkpoint | None = None) -> None:
        self.path, self.resumed = path, resumed
        self.steps_done = resumed.step if resumed is not None else 0
        self.has_begun = False

    def __enter__(self) -> Self:
        # Without a handler, logging prints warnings itself.
        logging.getLogger("ebbtide").addHandler(logging.NullHandler())
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def warn(self, text: str) -> None:
        pass

    def working(self, what: str) -> AbstractContextManager[Progress]:
        return nullcontext(no_progress)

    def phase(self, name: str) -> AbstractContextManager[Progress]:
        return nullcontext(no_progress)

    def set_plan(self, config: Config, plan: RunPlan | None) -> None:
        pass

    def begin(self, model: nn.Module, tokenizer: Tokenizer, residency: Residency, about: str) -> None:
        pass

    def step(
        self, step: int, metrics: dict[str, float], samples: Sequence[Sample], lengths: Sequence[tuple[int, int]] = ()
    ) -> None:
        self.steps_done, self.has_begun = step, True

    def note_evaluation(self, step: int, figures: dict[str, float]) -> None:
        self.has_begun = True

    def note_skipped_update(self, parameter: str | None) -> None:
        pass

    def summarize_run(self, outcome: str, *, rehearsed: bool = False) -> None:
        pass
