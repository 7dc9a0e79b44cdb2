"""The section `run`: where a run writes."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from ebbtide.config.base import Positive, Section
from ebbtide.system.printable import has_controls


class RunConfig(Section):
    """Where the run writes."""

    name: str = "run"
    """Short name; without `run.folder` the run is written to `runs/NAME-001`, `runs/NAME-002`, ..."""

    folder: str | None = None
    """Exact folder to write to. It must be new or empty, unless `run.overwrite` is on or the run resumes in it."""

    overwrite: bool = False
    """Replace the run that is already in `run.folder`; with `resume`, its checkpoints are kept."""

    logging_level: Literal["debug", "info", "warning", "error"] = "warning"
    """How much is written to `log.txt` in the run folder: Ebbtide's own log and that of torch.distributed."""

    distributed_timeout_minutes: Positive = 10.0
    """How long ranks wait for each other in training and in joint saves and loads, and how long they wait for rollout
    workers to make progress."""

    @model_validator(mode="after")
    def _check_names(self) -> RunConfig:
        for key, name in (("name", self.name), ("folder", self.folder)):
            if name is not None and has_controls(name):
                raise ValueError(
                    f"`run.{key}` is {name!r}, which has control characters or lone surrogates: remove them"
                )
        if not self.name.strip(". ") or "/" in self.name:
            raise ValueError(
                f"`run.name` is {self.name!r}, which cannot be a folder in `runs`: write a plain name, or set"
                " `run.folder` to a path"
            )
        if self.folder == "":
            raise ValueError("`run.folder` is empty: write a path, or `null` for a numbered folder in `runs`")
        return self

    @model_validator(mode="after")
    def _overwrite_needs_folder(self) -> RunConfig:
        if self.overwrite and self.folder is None:
            raise ValueError("`run.overwrite` replaces the run in `run.folder`, which is not set: set both, or neither")
        return self
