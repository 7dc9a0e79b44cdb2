"""What a checkpoint holds, and how it comes back: weights and optimizer by torch's distributed checkpoint, the rest as JSON."""

from __future__ import annotations

import base64
import json
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from ebbtide.config.document import resolved
from ebbtide.config.tree import Config
from ebbtide.optim.adamw import AdamW
from ebbtide.tasks.sampler import Sampler

TENSORS, RUN, CONFIG = "tensors", "run.json", "config.yaml"


@dataclass
class State:
    """The parts of a run that change."""

    config: Config
    model: nn.Module
    optimizer: AdamW
    sampler: Sampler[Any]

    def save(self, folder: Path, step: int) -> None:
        moments, steps = self.optimizer.state()
        weights = {name: parameter.detach().cpu() for name, parameter in self.model.named_parameters()}
        with _alone():
            save_tensors({"model": weights, "optimizer": moments}, storage_writer=FileSystemWriter(folder / TENSORS), no_dist=True)
        run = {
            "step": step,
            "sampler": {"epoch": self.sampler.epoch, "position": self.sampler.position},
            "optimizer_steps": steps,
            "random": _random_states(),
        }
        (folder / RUN).write_text(json.dumps(run) + "\n")
        (folder / CONFIG).write_text(resolved(self.config))

    @torch.no_grad()
    def load(self, folder: Path, *, load_rng: bool) -> int:
        """Takes up a checkpoint; gives its step."""
        run = json.loads((folder / RUN).read_text())
        moments, _ = self.optimizer.state()
        weights = {name: parameter.detach().cpu() for name, parameter in self.model.named_parameters()}
        read({"model": weights, "optimizer": moments}, folder)
        for name, parameter in self.model.named_parameters():
            parameter.copy_(weights[name])
        self.optimizer.restore(moments, run["optimizer_steps"])
        self.sampler.seek(run["sampler"]["epoch"], run["sampler"]["position"])
        if load_rng:
            _set_random_states(run["random"])
        return int(run["step"])


def read(into: dict[str, dict[str, Tensor]], folder: Path) -> None:
    """Fills tensors on the host from a checkpoint."""
    with _alone():
        load_tensors(into, storage_reader=FileSystemReader(folder / TENSORS), no_dist=True)


@contextmanager
def _alone() -> Iterator[None]:
    """torch warns that there is one process only: there is."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def saved_dtype(folder: Path) -> torch.dtype:
    """Type of the weights in a checkpoint."""
    entries = FileSystemReader(folder / TENSORS).read_metadata().state_dict_metadata
    found: Any = next(entry for name, entry in entries.items() if name.startswith("model."))
    dtype: torch.dtype = found.properties.dtype
    return dtype


def _random_states() -> dict[str, Any]:
    drawn: Any = numpy.random.get_state(legacy=True)
    kind, keys, position, has_gauss, cached = drawn
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": random.getstate(),
        "numpy": [kind, keys.tolist(), position, has_gauss, cached],
        "torch": _text(torch.get_rng_state()),
        "devices": [_text(state) for state in devices],
    }


def _set_random_states(states: dict[str, Any]) -> None:
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = states["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
    torch.set_rng_state(_tensor(states["torch"]))
    if torch.cuda.is_available() and len(states["devices"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([_tensor(state) for state in states["devices"]])


def _text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
