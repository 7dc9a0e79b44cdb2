"""The report of a rank that is not the first: it shows and writes nothing."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn
from transformers import PreTrainedTokenizerBase

from ebbtide.batch import Sample
from ebbtide.checkpoint.store import Saved
from ebbtide.config.tree import Config
from ebbtide.memory.residency import Residency
from ebbtide.planning import RunPlan
from ebbtide.report.folder import HISTORY
from ebbtide.report.report import Report
from ebbtide.report.terminal import Terminal


class _Folder:
    """That of the first rank, which writes there."""

    def __init__(self, path: Path) -> None:
        self.path, self.history = path, path / HISTORY


class Silent(Report):
    def __init__(self, config: Config, folder: Path, resumed: Saved | None = None) -> None:
        self._config, self.resumed = config, resumed
        self._nowhere = Path(os.devnull).open("w")  # noqa: SIM115 (closed when the run ends)
        self.terminal = Terminal(config.train.steps, Console(file=self._nowhere))
        written: Any = _Folder(folder)
        self.folder = written
        self.steps_done = resumed.step if resumed is not None else 0
        self._began = False

    def __enter__(self) -> Silent:
        logging.getLogger("ebbtide").addHandler(logging.NullHandler())  # without any, logging shows warnings itself
        return self

    def __exit__(self, *_: object) -> None:
        self._nowhere.close()

    def planned(self, config: Config, plan: RunPlan | None) -> None:
        self._config = config

    def begin(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, residency: Residency, notes: Sequence[str], *, prompts: int, tests: int
    ) -> None:
        pass

    def step(self, step: int, metrics: dict[str, float], samples: Sequence[Sample]) -> None:
        self.steps_done, self._began = step, True

    def evaluated(self, step: int, figures: dict[str, float]) -> None:
        self._began = True

    def skipped(self, parameter: str | None) -> None:
        pass

    @property
    def began(self) -> bool:
        return self._began

    def end(self, outcome: str, *, rehearsed: bool = False) -> None:
        pass
