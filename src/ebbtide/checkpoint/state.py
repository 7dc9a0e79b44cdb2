"""What a checkpoint holds, and how it comes back: weights and optimizer by torch's distributed checkpoint, the rest as JSON."""

from __future__ import annotations

import base64
import json
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor, nn

from ebbtide.checkpoint.contents import CONFIG, RUN, RandomStates, random_name, read_random, read_run
from ebbtide.checkpoint.manifest import Damaged, Listed
from ebbtide.checkpoint.ranks import Ranks
from ebbtide.checkpoint.tensors import Entry, Tensors
from ebbtide.config.document import resolved
from ebbtide.config.tree import Config
from ebbtide.errors import UserError
from ebbtide.memory.host import free_host_bytes, ranks_here
from ebbtide.memory.plan import Name
from ebbtide.memory.residency import Residency
from ebbtide.memory.shards import Region, local, region
from ebbtide.optim.adamw import AdamW, Stored
from ebbtide.tasks.sampler import Sampler

HELD: tuple[Name, ...] = ("weights", "master", "moments")
READ_AT_ONCE = 64 * 2**20  # elements: with masters and moments 0.9 GB

Fill = Callable[[Tensor], None]
"""Writes a tensor's contents into one on the host."""


class UnderWay(Protocol):
    """Completions that outlast a step."""

    def state(self) -> list[dict[str, Any]]: ...

    def restore(self, state: Sequence[dict[str, Any]]) -> None: ...


@dataclass
class State:
    """The parts of a run that change."""

    config: Config
    model: nn.Module
    optimizer: AdamW
    sampler: Sampler[Any]
    residency: Residency
    ranks: Ranks
    rollouts: UnderWay | None = None
    problems: str | None = None
    """A digest of those that are trained on."""
    notes: list[str] = field(default_factory=list)
    """What a person should know of the checkpoint that was taken up."""

    def snapshot(self, step: int, *, copy: bool) -> Snapshot:
        """The run as it is now. With `copy` it stays so while the run goes on; without, it is to be written at once."""
        twins = self.residency.copied(*HELD, copy=copy)
        # While the copies run:
        texts = {random_name(self.ranks.rank): json.dumps(_random_states()) + "\n"}
        if self.ranks.rank == 0:
            run = {
                "step": step,
                "world": self.ranks.count,
                "sampler": {"epoch": self.sampler.epoch, "position": self.sampler.position},
                "optimizer_steps": self.optimizer.steps,
                "problems": self.problems,
                "rollouts": self.rollouts.state() if self.rollouts is not None else [],
            }
            texts |= {RUN: json.dumps(run) + "\n", CONFIG: resolved(self.config)}
        fills: dict[Entry, tuple[Fill, bool]] = {}
        for name, parameter in self.model.named_parameters():
            weight = twins(local(parameter))
            if entry := _entry(f"model.{name}", region(parameter), weight.dtype):
                fills[entry] = (lambda out, weight=weight: out.copy_(weight)), False  # type: ignore[misc]
        for name, stored in self.optimizer.state().items():
            if entry := _entry(f"optimizer.{name}", stored.region, stored.dtype):
                fills[entry] = (lambda out, stored=stored: stored.fill(out.view(-1), twins)), bool(twins.leased)  # type: ignore[misc]
        snapshot = Snapshot(texts, fills)
        if twins.leased:
            snapshot.release = self.residency.lease(*twins.leased, copy_first=snapshot.copy_rest).release
        for move in twins.moves:
            self.residency.mover.host_waits(move)
        return snapshot

    @torch.no_grad()
    def load(self, folder: Path, *, load_rng: bool, parallel: bool = True) -> int:
        """Takes up a checkpoint, of any number of ranks; gives its step."""
        files = Listed(folder)
        run, tensors = read_run(files), Tensors(files)
        self._check_types(tensors.weights, folder)
        if absent := [name for name in self.optimizer.steps if name not in run.optimizer_steps]:
            raise Damaged(folder, f"{RUN} lacks the optimizer's steps of {absent[0]}")
        self.optimizer.restore(self._read(tensors, parallel), run.optimizer_steps)
        if None not in (run.problems, self.problems) and run.problems != self.problems:
            self.notes.append(
                "since the checkpoint, the problems of the task have changed: the run goes on with those there are now, from its place among them"
            )
        self.sampler.seek(run.sampler.epoch, run.sampler.position)
        if self.rollouts is not None:
            self.rollouts.restore([group.model_dump() for group in run.rollouts])
        mine = read_random(files, self.ranks.rank) if load_rng else None
        if mine is not None:  # a rank that was not there then goes on with the state that its seed gave it
            try:
                _set_random_states(mine)
            except (ValueError, RuntimeError, TypeError) as error:
                raise Damaged(folder, f"{random_name(self.ranks.rank)}: {error}") from None
        return run.step

    def _check_types(self, saved: dict[str, torch.dtype], folder: Path) -> None:
        """Weights that were rounded are not to be taken for exact ones."""
        for name, weight in self.model.named_parameters():
            if name in saved and saved[name] != weight.dtype:
                was, now = (str(dtype).removeprefix("torch.") for dtype in (saved[name], weight.dtype))
                raise UserError(f"the weights in {folder} are {was}, those of this run {now}: set `model.dtype: {was}` to go on from it")

    def _read(self, saved: Tensors, parallel: bool) -> Iterator[dict[str, Tensor]]:
        """Sets the weights, a few parameters at a time, and gives the masters and moments of those: all at once would take as much memory again as the run has."""
        stored: dict[str, dict[str, Stored]] = {}
        for name, one in self.optimizer.state().items():
            stored.setdefault(name.split("/", 1)[1], {})[name] = one
        batch: dict[str, nn.Parameter] = {}
        for name, weight in self.model.named_parameters():
            # Counted by whole parameters, not by this rank's parts of them: all ranks read the same ones together.
            if batch and sum(one.numel() for one in batch.values()) + weight.numel() > READ_AT_ONCE:
                yield self._read_some(batch, stored, saved, parallel)
                batch = {}
            batch[name] = weight
        yield self._read_some(batch, stored, saved, parallel)

    def _read_some(
        self, weights: dict[str, nn.Parameter], stored: dict[str, dict[str, Stored]], saved: Tensors, parallel: bool
    ) -> dict[str, Tensor]:
        states = {name: one for of in weights for name, one in stored.get(of, {}).items()}
        regions = {f"model.{name}": region(weight) for name, weight in weights.items()}
        regions |= {f"optimizer.{name}": one.region for name, one in states.items()}
        kinds = {f"model.{name}": weight.dtype for name, weight in weights.items()}
        kinds |= {f"optimizer.{name}": one.dtype for name, one in states.items()}
        found = {name: torch.empty(place.size, dtype=kinds[name]) for name, place in regions.items()}
        self._fill(found, regions, saved, parallel)
        for name, weight in weights.items():
            local(weight).copy_(found[f"model.{name}"])
        return {name: found[f"optimizer.{name}"].view(-1) for name in states}

    def _fill(self, found: dict[str, Tensor], regions: dict[str, Region], saved: Tensors, parallel: bool) -> None:
        """What ranks have parts of, each reads for itself; of what all of them have, each reads a part and tells the others."""
        parts = {name: place for name, place in regions.items() if place.cut and found[name].numel()}
        saved.read_parts({name: found[name] for name in parts}, parts)
        tensors = {name: tensor for name, tensor in found.items() if not regions[name].cut}
        owners, burden = {}, [0] * (self.ranks.count if parallel else 1)
        for name in sorted(tensors, key=lambda name: (-tensors[name].nbytes, name)):
            owners[name] = burden.index(min(burden))
            burden[owners[name]] += tensors[name].nbytes
        saved.read({name: tensor for name, tensor in tensors.items() if owners[name] == self.ranks.rank})
        for name, tensor in tensors.items():
            self.ranks.broadcast(tensor, owners[name])


def _entry(name: str, place: Region, dtype: torch.dtype) -> Entry | None:
    """What is written of a tensor; None where other ranks have all of it."""
    if place.cut and not place.size.numel():
        return None
    return Entry(name, place.size, dtype, place if place.cut else None)


class Snapshot:
    """A run at one moment: some of it in copies, and some still where the run will change it, held by a lease until it is read or copied."""

    def __init__(self, texts: dict[str, str], fills: dict[Entry, tuple[Fill, bool]]) -> None:
        self.texts = texts
        self.entries = list(fills)
        self.release: Callable[[], None] = lambda: None
        """Gives the lease back."""
        self._fills = {entry.name: fill for entry, (fill, _) in fills.items()}
        self._held = {entry.name: entry for entry, (_, held) in fills.items() if held}
        self._lock = threading.Lock()

    def fill(self, name: str, out: Tensor) -> None:
        """Writes a tensor's contents; once each."""
        with self._lock, torch.no_grad():
            self._fills.pop(name)(out)
            if self._held.pop(name, None) is not None and not self._held:
                self.release()

    def copy_rest(self) -> None:
        """The run wants to change what is held: copies what was not read yet, so that it need not wait for the disk. Where memory is short, it does."""
        with self._lock, torch.no_grad():
            if sum(entry.bytes for entry in self._held.values()) > 0.8 * free_host_bytes() / ranks_here():  # all of them do so at once
                return
            for name, entry in self._held.items():
                copy = entry.empty()
                self._fills[name](copy)
                self._fills[name] = lambda out, copy=copy: out.copy_(copy)  # type: ignore[misc]
            self._held = {}
        self.release()


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


def _set_random_states(states: RandomStates) -> None:
    version, internal, gauss = states.python
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = states.numpy
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))
    torch.set_rng_state(_tensor(states.torch))
    if torch.cuda.is_available() and len(states.devices) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([_tensor(state) for state in states.devices])


def _text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
