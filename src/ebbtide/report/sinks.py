"""TensorBoard, if it is installed, and Weights & Biases, if it is asked for.

They show what metrics.jsonl has, and so never end a run.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ebbtide.config.tree import Config
from ebbtide.errors import UserError
from ebbtide.files import append_whole


class Sink(Protocol):
    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """An events file, written at once: torch's SummaryWriter has a thread for it, which a full disk ends, with a traceback."""

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
        """What a RecordWriter wants of a file."""
        append_whole(self._file, record)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        event = self._event(wall_time=time.time(), step=step, summary=self._summary(value=values))
        self._records.write(event.SerializeToString())

    def close(self) -> None:
        """Nothing is held back."""


class WeightsAndBiases:
    def __init__(self, config: Config, folder: Path) -> None:
        assert config.report.wandb is not None  # made only when the config has the section
        try:
            import wandb
        except ImportError:
            raise UserError("`report.wandb` needs the package wandb: pip install 'ebbtide[wandb]', or set `report.wandb: null`") from None
        settings = config.report.wandb
        self._run = wandb.init(
            project=settings.project, mode=settings.mode, dir=str(folder), name=folder.name, config=config.model_dump(mode="json")
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()


class Sinks:
    """Those of a run. One that cannot be written is given up, and that is said once."""

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
            self._say(f"{name} cannot be written ({error.strerror or error}): the run goes on without it")
