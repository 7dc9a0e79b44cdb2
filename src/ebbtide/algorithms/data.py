"""What a run is trained and evaluated on, read before its model is loaded."""

from __future__ import annotations

from typing import NamedTuple

from ebbtide.config.root import Config
from ebbtide.rollout.examples import ExampleRows, read_example_rows
from ebbtide.tasks.build import build_task
from ebbtide.tasks.task import Problems


class RunData(NamedTuple):
    """The data of a run."""

    rows: ExampleRows | None
    """Of `data`, where the algorithm trains on a file."""
    problems: Problems | None
    """Of `task`: to sample completions of, or to evaluate on."""


def read_data(config: Config) -> RunData:
    file, task, evaluated = config.trained_file, config.task, config.evaluate is not None
    return RunData(
        read_example_rows(file, evaluated=evaluated) if file is not None else None,
        build_task(task, config.seed, evaluated=evaluated).problems()
        if task is not None and config.generates
        else None,
    )
