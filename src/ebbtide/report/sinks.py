"""Metrics for TensorBoard, if it is installed, and for Weights & Biases, if the config has `report.wandb`.

Both only repeat what metrics.jsonl has, so their failure never ends a run.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ebbtide.config.root import Config
from ebbtide.errors import UserError
from ebbtide.system.files import append_atomic


class Sink(Protocol):
    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """An events file that is written synchronously: torch's SummaryWriter writes in a thread, which a full disk kills
    with a traceback."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        folder.mkdir(exist_ok=True)
        self._file = folder / f"events.out.tfevents.{time.time_ns()}.{os.getpid()}"
        self._file.touch()
        self._records = RecordWriter(self)
        self._records.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())

    def write(self, record: bytes) -> None:
        """Writes a record; the RecordWriter uses this object as its file."""
        append_atomic(self._file, record)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        event = self._event(wall_time=time.time(), step=step, summary=self._summary(value=values))
        self._records.write(event.SerializeToString())

    def close(self) -> None:
        """Does nothing, as every record is already written."""


class WeightsAndBiases:
    def __init__(self, config: Config, folder: Path) -> None:
        assert config.report.wandb is not None  # only constructed if the config has the section
        try:
            import wandb
        except ImportError:
            raise UserError(
                "`report.wandb` needs the package wandb: pip install 'ebbtide[wandb]', or set `report.wandb: null`"
            ) from None
        settings = config.report.wandb
        self._run = wandb.init(
            project=settings.project,
            mode=settings.mode,
            dir=str(folder),
            name=folder.name,
            config=config.model_dump(mode="json"),
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()


class Sinks:
    """The sinks of a run. One that cannot be written is closed, with one message."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._open: dict[str, Sink] = {}

    def open(self, config: Config, folder: Path) -> None:
        if importlib.util.find_spec("tensorboard") is not None:
            self._try("TensorBoard", lambda: self._open.update({"TensorBoard": TensorBoard(folder / "tensorboard")}))
        if config.report.wandb is not None:
            self._try("W&B", lambda: self._open.update({"W&B": WeightsAndBiases(config, folder)}))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, sink in list(self._open.items()):
            self._try(name, lambda sink=sink: sink.log(step, metrics))  # type: ignore[misc]

    def close(self) -> None:
        for name, sink in list(self._open.items()):
            self._try(name, sink.close)

    def _try(self, name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as error:
            self._open.pop(name, None)
            self._say(f"{name} cannot be written ({error.strerror or error}): the run continues without it")
