"""What the loop and the launcher call on the report of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, Self

from torch import nn
from transformers import PreTrainedTokenizerBase as Tokenizer

from ebbtide.checkpoint.store import Checkpoint
from ebbtide.config.root import Config
from ebbtide.memory.residency import Residency
from ebbtide.planner.run_plan import RunPlan
from ebbtide.progress import Progress
from ebbtide.rollout.batch import Sample


class RankReport(Protocol):
    """The report of one rank: `Report` on rank 0, which shows and writes everything, `NullReport` on the others."""

    @property
    def path(self) -> Path:
        """The run folder."""
        ...

    @property
    def resumed(self) -> Checkpoint | None:
        """The checkpoint that the run resumes from."""
        ...

    @property
    def steps_done(self) -> int:
        """The number of the last step that is done."""
        ...

    @property
    def has_begun(self) -> bool:
        """Whether metrics have been written."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None: ...

    def note(self, text: str) -> None:
        """Shows something that a user should know."""
        ...

    def warn(self, text: str) -> None:
        """Shows what a user should not overlook."""
        ...

    def working(self, what: str) -> AbstractContextManager[Progress]:
        """Shows progress of work before the first step that may take seconds."""
        ...

    def phase(self, name: str) -> AbstractContextManager[Progress]:
        """Shows progress of a phase of the current step."""
        ...

    def set_plan(self, config: Config, plan: RunPlan | None) -> None:
        """Writes the config as it will run, with everything decided, and the plan if there is one."""
        ...

    def begin(self, model: nn.Module, tokenizer: Tokenizer, residency: Residency, about: str) -> None:
        """Shows what the run is, before its first step. `about`: what is trained on."""
        ...

    def step(
        self, step: int, metrics: dict[str, float], samples: Sequence[Sample], lengths: Sequence[tuple[int, int]] = ()
    ) -> None:
        """Writes and shows a step that is done. `lengths`: (tokens without loss, tokens with loss) of each sequence
        that was trained on."""
        ...

    def note_evaluation(self, step: int, figures: dict[str, float]) -> None:
        """Writes and shows an evaluation that does not belong to a step of this process."""
        ...

    def note_skipped_update(self, parameter: str | None) -> None:
        """Shows a skipped update. `parameter` is the first whose gradient was not finite; None if none was skipped."""
        ...

    def summarize_run(self, outcome: str, *, rehearsed: bool = False) -> None:
        """Ends the progress display and shows the summary of the run."""
        ...
