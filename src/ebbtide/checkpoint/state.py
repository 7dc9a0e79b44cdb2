"""The state of a run that a checkpoint saves and restores: weights and optimizer by torch's distributed checkpoint, the
rest as JSON."""

from __future__ import annotations

import base64
import json
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor, nn

from ebbtide.checkpoint.contents import CONFIG, RUN, RandomStates, random_name, read_random, read_run
from ebbtide.checkpoint.costs import SAVED_HOLDINGS as SAVED_HOLDINGS
from ebbtide.checkpoint.entries import TensorEntry
from ebbtide.checkpoint.initial_model import check_base, check_codes
from ebbtide.checkpoint.manifest import CheckpointFiles, DamagedCheckpoint
from ebbtide.checkpoint.tensors import TensorReader
from ebbtide.config.document import to_yaml
from ebbtide.config.root import Config
from ebbtide.errors import UserError
from ebbtide.memory.host import free_host_bytes, local_world_size
from ebbtide.memory.host_copies import HostCopies
from ebbtide.memory.residency import Residency
from ebbtide.optim.adamw import AdamW, StoredState
from ebbtide.parallel.base_digest import digest_of_ranks
from ebbtide.parallel.dtensor import Region, local, local_region
from ebbtide.parallel.group import Group

READ_AT_ONCE = 64 * 2**20  # elements: with masters and moments 0.9 GB

Fill = Callable[[Tensor], None]
"""A function that writes a tensor's contents into one on the host."""


class UnfinishedRollouts(Protocol):
    """Unfinished rollouts that continue in the next step (partial rollouts)."""

    def state(self) -> list[dict[str, Any]]: ...

    def restore(self, state: Sequence[dict[str, Any]]) -> None: ...


class CurriculumStates(Protocol):
    """The levels of tasks that become harder."""

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class DataOrder(Protocol):
    """The order in which data are drawn: the epoch, and the position in it."""

    epoch: int
    position: int

    def seek(self, epoch: int, position: int) -> None: ...


@dataclass
class UntrackedOrder:
    """The order of data that the caller draws itself: it is kept as it was loaded."""

    epoch: int = 0
    position: int = 0

    def seek(self, epoch: int, position: int) -> None:
        self.epoch, self.position = epoch, position


@dataclass
class RunState:
    """The parts of a run that change."""

    config: Config
    model: nn.Module
    optimizer: AdamW
    sampler: DataOrder
    residency: Residency
    ranks: Group
    rollouts: UnfinishedRollouts | None = None
    problems: str | None = None
    """A digest of the problems that are trained on."""
    reward_models: str | None = None
    """A digest of the reward models, which no checkpoint has."""
    curricula: CurriculumStates | None = None

    def __post_init__(self) -> None:
        if self.config.memory.stream_base:
            _ = self.base  # Later its blocks may be away.

    @cached_property
    def base(self) -> str | None:
        """A digest of the frozen weights, which no checkpoint has; None where all are trained. All ranks must ask for
        it together."""
        return digest_of_ranks(self.model, self.ranks) if self.config.model.lora is not None else None

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        """What a checkpoint has of the model: all of it, or the adapters, if their base can be loaded again."""
        return [
            (name, weight)
            for name, weight in self.model.named_parameters()
            if weight.requires_grad or not self.config.model.has_lasting_base
        ]

    def snapshot(self, step: int, *, copy: bool) -> Snapshot:
        """A snapshot of the run as it is now. With `copy` it stays valid while the run continues; without, it has to be
        written at once."""
        copies = self.residency.copy_to_host(*SAVED_HOLDINGS, copy=copy)
        # The rest is done while the copies run.
        texts, base = {random_name(self.ranks.rank): json.dumps(_random_states()) + "\n"}, self.base
        if self.ranks.rank == 0:
            run = {
                "step": step,
                "world": self.ranks.size,
                "sampler": {"epoch": self.sampler.epoch, "position": self.sampler.position},
                "optimizer_steps": self.optimizer.steps,
                "problems": self.problems,
                "reward_models": self.reward_models,
                "base": base,
                "rollouts": self.rollouts.state() if self.rollouts is not None else [],
                "curricula": self.curricula.state() if self.curricula is not None else {},
            }
            texts |= {RUN: json.dumps(run) + "\n", CONFIG: to_yaml(self.config)}
        fills: dict[TensorEntry, tuple[Fill, bool]] = {}
        for name, parameter in self._parameters():
            weight = copies(local(parameter))
            if entry := _entry(f"model.{name}", local_region(parameter), weight.dtype):
                fills[entry] = partial(_copy_from, weight), False
        leased = bool(copies.needs_lease)
        for name, stored in self.optimizer.state().items():
            if entry := _entry(f"optimizer.{name}", stored.region, stored.dtype):
                fills[entry] = partial(_copy_state, stored, copies), leased
        snapshot = Snapshot(texts, fills)
        if copies.needs_lease:
            snapshot.release = self.residency.lease(*copies.needs_lease, copy_first=snapshot.copy_rest).release
        for move in copies.moves:
            self.residency.mover.host_waits(move)
        return snapshot

    @torch.no_grad()
    def load(
        self, folder: Path, *, load_rng: bool, parallel: bool = True, warn: Callable[[str], None] = lambda text: None
    ) -> int:
        """Loads a checkpoint, which may be of any number of ranks; returns its step. Warns where the task's problems
        are not those that the checkpoint was made with."""
        files = CheckpointFiles(folder)
        run, tensors = read_run(files), TensorReader(files)
        self._check_types(tensors.weights, folder)
        if self.base is not None and self.config.model.has_lasting_base:
            check_base(self.base, files)
        if absent := [name for name in self.optimizer.steps if name not in run.optimizer_steps]:
            raise DamagedCheckpoint(folder, f"{RUN} lacks the optimizer's steps of {absent[0]}")
        self.optimizer.restore(self._read(tensors, parallel), run.optimizer_steps)
        if None not in (run.problems, self.problems) and run.problems != self.problems:
            warn(
                "since the checkpoint, the problems of the task have changed:"
                " the run continues with the new ones, from its position among them"
            )
        if None not in (run.reward_models, self.reward_models) and run.reward_models != self.reward_models:
            warn(
                "since the checkpoint, the weights of a reward model have changed: the run continues with the new ones"
            )
        self.sampler.seek(run.sampler.epoch, run.sampler.position)
        if self.curricula is not None:
            self.curricula.restore({name: one.model_dump() for name, one in run.curricula.items()})
        if self.rollouts is not None:
            self.rollouts.restore([group.model_dump() for group in run.rollouts])
        mine = read_random(files, self.ranks.rank) if load_rng else None
        if mine is not None:  # otherwise the rank is new, and keeps the state that its seed gave it
            try:
                _set_random_states(mine)
            except (ValueError, RuntimeError, TypeError) as error:
                raise DamagedCheckpoint(folder, f"{random_name(self.ranks.rank)}: {error}") from None
        return run.step

    def _check_types(self, saved: dict[str, torch.dtype], folder: Path) -> None:
        """Raises if the dtypes differ: rounded weights must not pass for exact ones."""
        for name, weight in self.model.named_parameters():
            if name in saved and saved[name] != weight.dtype:
                check_codes(saved[name], weight, folder)
                was, now = (str(dtype).removeprefix("torch.") for dtype in (saved[name], weight.dtype))
                raise UserError(
                    f"the weights in {folder} are {was}, those of this run {now}:"
                    f" set `model.dtype: {was}` to resume from it"
                )

    def _read(self, saved: TensorReader, parallel: bool) -> Iterator[dict[str, Tensor]]:
        """Sets the weights, a few parameters at a time, and yields their masters and moments: all at once would take
        as much memory again as the run has."""
        stored: dict[str, dict[str, StoredState]] = {}
        for name, one in self.optimizer.state().items():
            stored.setdefault(name.split("/", 1)[1], {})[name] = one
        batch: dict[str, nn.Parameter] = {}
        for name, weight in self._parameters():
            # Counts whole parameters, not this rank's shards, so that all ranks read the same parameters together.
            if batch and sum(one.numel() for one in batch.values()) + weight.numel() > READ_AT_ONCE:
                yield self._read_some(batch, stored, saved, parallel)
                batch = {}
            batch[name] = weight
        yield self._read_some(batch, stored, saved, parallel)

    def _read_some(
        self,
        weights: dict[str, nn.Parameter],
        stored: dict[str, dict[str, StoredState]],
        saved: TensorReader,
        parallel: bool,
    ) -> dict[str, Tensor]:
        states = {name: one for parameter in weights for name, one in stored.get(parameter, {}).items()}
        regions = {f"model.{name}": local_region(weight) for name, weight in weights.items()}
        regions |= {f"optimizer.{name}": one.region for name, one in states.items()}
        dtypes = {f"model.{name}": weight.dtype for name, weight in weights.items()}
        dtypes |= {f"optimizer.{name}": one.dtype for name, one in states.items()}
        found = {name: torch.empty(place.size, dtype=dtypes[name]) for name, place in regions.items()}
        self._fill(found, regions, saved, parallel)
        for name, weight in weights.items():
            local(weight).copy_(found[f"model.{name}"])
        return {name: found[f"optimizer.{name}"].view(-1) for name in states}

    def _fill(self, found: dict[str, Tensor], regions: dict[str, Region], saved: TensorReader, parallel: bool) -> None:
        """Fills tensors from the checkpoint. Each rank reads its own shards; of the replicated tensors, each rank reads
        some and broadcasts them."""
        parts = {name: place for name, place in regions.items() if place.is_shard and found[name].numel()}
        saved.read_parts({name: found[name] for name in parts}, parts)
        tensors = {name: tensor for name, tensor in found.items() if not regions[name].is_shard}
        owners, load = {}, [0] * (self.ranks.size if parallel else 1)
        for name in sorted(tensors, key=lambda name: (-tensors[name].nbytes, name)):
            owners[name] = load.index(min(load))
            load[owners[name]] += tensors[name].nbytes
        saved.read({name: tensor for name, tensor in tensors.items() if owners[name] == self.ranks.rank})
        for name, tensor in tensors.items():
            self.ranks.broadcast_tensor(tensor, owners[name])


def _entry(name: str, place: Region, dtype: torch.dtype) -> TensorEntry | None:
    """What this rank writes of a tensor; None where its shard is empty."""
    if place.is_shard and not place.size.numel():
        return None
    return TensorEntry(name, place.size, dtype, place if place.is_shard else None)


def _copy_from(source: Tensor, out: Tensor) -> None:
    out.copy_(source)


def _copy_state(stored: StoredState, copies: HostCopies, out: Tensor) -> None:
    """Copies a parameter's optimizer state from where its bytes are."""
    stored.fill(out.view(-1), copies)


class Snapshot:
    """A run at one moment: some of it in copies, and some still where the run will change it, protected by a lease
    until it is read or copied."""

    def __init__(self, texts: dict[str, str], fills: dict[TensorEntry, tuple[Fill, bool]]) -> None:
        self.texts = texts
        self.entries = list(fills)
        self.release: Callable[[], None] = lambda: None
        """Releases the lease."""
        self._fills = {entry.name: fill for entry, (fill, _) in fills.items()}
        self._leased = {entry.name: entry for entry, (_, leased) in fills.items() if leased}
        self._lock = threading.Lock()

    def fill(self, name: str, out: Tensor) -> None:
        """Writes a tensor's contents; called once for each."""
        with self._lock, torch.no_grad():
            self._fills.pop(name)(out)
            if self._leased.pop(name, None) is not None and not self._leased:
                self.release()

    def copy_rest(self) -> None:
        """Called when the run is about to change what is leased: copies what was not read yet, so that the run need
        not wait for the disk. If memory is short, nothing is copied and the run waits."""
        with self._lock, torch.no_grad():
            # All ranks of this machine copy at once.
            if sum(entry.bytes for entry in self._leased.values()) > 0.8 * free_host_bytes() / local_world_size():
                return
            for name, entry in self._leased.items():
                copy = entry.empty()
                self._fills[name](copy)
                self._fills[name] = partial(_copy_from, copy)
            self._leased = {}
        self.release()


def _random_states() -> dict[str, Any]:
    numpy_state: Any = numpy.random.get_state(legacy=True)
    kind, keys, position, has_gauss, cached = numpy_state
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
