"""Named tensors in torch's distributed checkpoint format. They are asked for one by one as they are written, so that no second copy of all of them is ever there."""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load

TENSORS = "tensors"


@dataclass(frozen=True)
class Entry:
    """A tensor's name (`model.` or `optimizer.` and its own), size and type."""

    name: str
    size: torch.Size
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.size.numel() * self.dtype.itemsize

    def empty(self) -> Tensor:
        return torch.empty(self.size, dtype=self.dtype)

    def within(self, memory: mmap.mmap, start: int) -> Tensor:
        """The tensor over a part of some memory. Its storage is as large as it is: torch writes others from a copy, and keeps that until the file ends."""
        if not self.bytes:
            return self.empty()
        return torch.frombuffer(memory, dtype=self.dtype, count=self.size.numel(), offset=start).view(self.size)


@dataclass(frozen=True)
class Share:
    """Who writes: one of so many ranks, all of which have every tensor; a part each, or the first one alone."""

    rank: int = 0
    count: int = 1
    parallel: bool = True


class _OnDemand(DefaultSavePlanner):
    def __init__(self, find: Callable[[str], Tensor], parallel: bool) -> None:
        super().__init__(dedup_save_to_lowest_rank=not parallel)
        self._find = find

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._find(write_item.index.fqn)


def _planned(
    folder: Path, entries: Sequence[Entry], find: Callable[[str], Tensor], share: Share, threads: int
) -> tuple[FileSystemWriter, _OnDemand, list[SavePlan], Metadata]:
    """Every rank has the same entries, so each knows what all of them plan."""
    planner, writer = _OnDemand(find, share.parallel), FileSystemWriter(folder / TENSORS, thread_count=threads, per_thread_copy_ahead=0)
    planner.set_up_planner(
        _nested({entry.name: torch.empty(entry.size, dtype=entry.dtype, device="meta") for entry in entries}), None, True
    )
    writer.set_up_storage_writer(is_coordinator=True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan] * share.count)
    return writer, planner, writer.prepare_global_plan(plans), metadata


def write_tensors(folder: Path, entries: Sequence[Entry], find: Callable[[str], Tensor], share: Share, threads: int = 1) -> list[Any]:
    """Writes this rank's share; gives what `finish_tensors` needs to know of it."""
    writer, planner, plans, _ = _planned(folder, entries, find, share, threads)
    mine = planner.finish_plan(plans[share.rank])
    results: list[Any] = writer.write_data(mine, planner).wait() if mine.items else []
    if len(results) != len(mine.items):  # torch loses what goes wrong in its threads
        raise OSError(f"{len(mine.items) - len(results)} of {len(mine.items)} tensors could not be written (is the disk full?)")
    return results


def finish_tensors(folder: Path, entries: Sequence[Entry], results: Sequence[list[Any]], share: Share) -> None:
    """Writes what makes the shares of all ranks one."""
    writer, _, _, metadata = _planned(folder, entries, lambda name: torch.empty(0), share, 1)
    writer.finish(metadata, list(results))


def read_tensors(into: dict[str, Tensor], folder: Path) -> None:
    """Fills tensors on the host, by name."""
    with _alone():
        load(_nested(into), storage_reader=FileSystemReader(folder / TENSORS), no_dist=True)


def saved_dtype(folder: Path) -> torch.dtype:
    """Type of the weights in a checkpoint."""
    entries = FileSystemReader(folder / TENSORS).read_metadata().state_dict_metadata
    found: Any = next(entry for name, entry in entries.items() if name.startswith("model."))
    dtype: torch.dtype = found.properties.dtype
    return dtype


def _nested(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """`model.x` and `optimizer.y` as {"model": {"x": ...}, "optimizer": {"y": ...}}."""
    tree: dict[str, Any] = {}
    for name, tensor in tensors.items():
        section, rest = name.split(".", 1)
        tree.setdefault(section, {})[rest] = tensor
    return tree


@contextmanager
def _alone() -> Iterator[None]:
    """torch warns that there is one process only: there is."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
