"""Named tensors in torch's distributed checkpoint format. They are asked for one by one as they are written, so that no second copy of all of them is ever there."""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load

from ebbtide.memory.shards import Region

TENSORS = "tensors"


@dataclass(frozen=True)
class Entry:
    """A tensor's name (`model.` or `optimizer.` and its own), size and type; or those of the part of it that a rank has."""

    name: str
    size: torch.Size
    dtype: torch.dtype
    part_of: Region | None = None

    @property
    def bytes(self) -> int:
        return self.size.numel() * self.dtype.itemsize

    def empty(self) -> Tensor:
        return torch.empty(self.size, dtype=self.dtype)

    def item(self) -> WriteItem:
        """For torch's plan of what is written. Parts of one tensor have places of their own in it; what several ranks have alike is written once."""
        offset = torch.Size([0] * len(self.size) if self.part_of is None else self.part_of.offset)
        properties = TensorProperties.create_from_tensor(torch.empty(0, dtype=self.dtype))
        whole = self.size if self.part_of is None else self.part_of.whole
        data = TensorWriteData(ChunkStorageMetadata(offset, self.size), properties, whole)
        kind = WriteItemType.TENSOR if self.part_of is None else WriteItemType.SHARD
        return WriteItem(MetadataIndex(self.name, offset), kind, tensor_data=data)

    def within(self, memory: mmap.mmap, start: int) -> Tensor:
        """The tensor over a part of some memory. Its storage is as large as it is: torch writes others from a copy, and keeps that until the file ends."""
        if not self.bytes:
            return self.empty()
        return torch.frombuffer(memory, dtype=self.dtype, count=self.size.numel(), offset=start).view(self.size)


@dataclass(frozen=True)
class Share:
    """Who writes: one of so many ranks. What all of them have is shared out, or written by the first one alone."""

    rank: int = 0
    count: int = 1
    parallel: bool = True


class _OnDemand(DefaultSavePlanner):
    def __init__(self, find: Callable[[str], Tensor], parallel: bool) -> None:
        super().__init__(dedup_save_to_lowest_rank=not parallel)
        self._find = find

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._find(write_item.index.fqn)


Everyone = Sequence[Sequence[Entry]]
"""What each rank has."""


def _planned(
    folder: Path, everyone: Everyone, find: Callable[[str], Tensor], share: Share, threads: int
) -> tuple[FileSystemWriter, _OnDemand, list[SavePlan], Metadata]:
    """Every rank knows what all of them have, and so what each writes."""
    planner, writer = _OnDemand(find, share.parallel), FileSystemWriter(folder / TENSORS, thread_count=threads, per_thread_copy_ahead=0)
    names = dict.fromkeys(entry.name for entries in everyone for entry in entries)
    planner.set_up_planner(_nested({name: torch.empty(0, device="meta") for name in names}), None, True)
    writer.set_up_storage_writer(is_coordinator=True)
    plans = [SavePlan([entry.item() for entry in entries], planner_data=planner.mappings) for entries in everyone]
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(plan) for plan in plans])
    return writer, planner, writer.prepare_global_plan(plans), metadata


def write_tensors(folder: Path, everyone: Everyone, find: Callable[[str], Tensor], share: Share, threads: int = 1) -> list[Any]:
    """Writes this rank's share; gives what `finish_tensors` needs to know of it."""
    writer, planner, plans, _ = _planned(folder, everyone, find, share, threads)
    mine = planner.finish_plan(plans[share.rank])
    results: list[Any] = writer.write_data(mine, planner).wait() if mine.items else []
    if len(results) != len(mine.items):  # torch loses what goes wrong in its threads
        raise OSError(f"{len(mine.items) - len(results)} of {len(mine.items)} tensors could not be written (is the disk full?)")
    return results


def finish_tensors(folder: Path, everyone: Everyone, results: Sequence[list[Any]], share: Share) -> None:
    """Writes what makes the shares of all ranks one."""
    writer, _, _, metadata = _planned(folder, everyone, lambda name: torch.empty(0), share, 1)
    writer.finish(metadata, list(results))


class _Parts(DefaultLoadPlanner):
    """Reads, of each tensor, the part that is asked for, whoever wrote it in whatever pieces."""

    def __init__(self, regions: Mapping[str, Region]) -> None:
        super().__init__()
        self._regions = regions

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None  # set up by now
        items = []
        for name, region in self._regions.items():
            saved: Any = self.metadata.state_dict_metadata[name]
            items += create_read_items_for_chunk_list(name, saved, [ChunkStorageMetadata(torch.Size(region.offset), region.size)])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        found: Tensor = self.state_dict[index.fqn]
        return found


def read_tensors(into: dict[str, Tensor], folder: Path) -> None:
    """Fills tensors on the host, by name."""
    read_parts(into, {name: Region(tensor.size(), (0,) * tensor.ndim, tensor.size()) for name, tensor in into.items()}, folder)


def read_parts(into: dict[str, Tensor], regions: Mapping[str, Region], folder: Path) -> None:
    """Fills tensors on the host with parts of those of these names."""
    reader = FileSystemReader(folder / TENSORS)
    saved: Any = reader.read_metadata().state_dict_metadata
    if absent := [name for name in into if name not in saved]:
        raise RuntimeError(f"the checkpoint {folder} lacks {len(absent)} tensors, such as {absent[0]}")
    flat = [name for name, region in regions.items() if saved[name].size != region.whole]  # as optimizer states were at first
    lain = {name: torch.empty(saved[name].size, dtype=tensor.dtype) for name, tensor in into.items() if name in flat}
    for name, whole in lain.items():
        read_tensors({name: whole}, folder)
        box = tuple(slice(start, start + size) for start, size in zip(regions[name].offset, regions[name].size, strict=True))
        into[name].copy_(whole.view(regions[name].whole)[box])
    wanted = {name: region for name, region in regions.items() if name not in flat}
    with _alone():
        load(_nested({name: into[name] for name in wanted}), storage_reader=reader, planner=_Parts(wanted), no_dist=True)


def saved_dtypes(folder: Path) -> dict[str, torch.dtype]:
    """Types of the weights in a checkpoint, by name."""
    entries: dict[str, Any] = FileSystemReader(folder / TENSORS).read_metadata().state_dict_metadata
    return {name.removeprefix("model."): entry.properties.dtype for name, entry in entries.items() if name.startswith("model.")}


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
