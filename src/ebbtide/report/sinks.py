"""TensorBoard, if it is installed, and Weights & Biases, if it is asked for."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Protocol

from ebbtide.config.tree import Config
from ebbtide.errors import UserError


class Sink(Protocol):
    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


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


def sinks(config: Config, folder: Path) -> list[Sink]:
    found: list[Sink] = []
    if importlib.util.find_spec("tensorboard") is not None:
        found.append(TensorBoard(folder / "tensorboard"))
    if config.report.wandb is not None:
        found.append(WeightsAndBiases(config, folder))
    return found
