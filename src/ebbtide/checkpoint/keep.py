"""When a checkpoint is due, and which earlier ones go when it is there."""

from __future__ import annotations

from pathlib import Path

from ebbtide.checkpoint.resume import FOLDER
from ebbtide.checkpoint.state import State
from ebbtide.checkpoint.store import prune, write
from ebbtide.config.tree import Checkpoint, Config


def is_due(config: Config, step: int) -> bool:
    assert config.checkpoint is not None
    every = config.checkpoint.every
    return step == config.train.steps or (every is not None and step % every == 0)


def keep(config: Checkpoint, run: Path, state: State, step: int, metrics: dict[str, float]) -> None:
    """Writes the checkpoint of a step, then removes those that are neither new nor good enough."""
    write(run / FOLDER, step, metrics, lambda folder: state.save(folder, step))
    prune(run / FOLDER, config.keep, config.keep_best, config.metric)
