"""The save plan of torch's distributed checkpoint format: which rank writes which tensors.

This takes a second to import: `tensors.py` imports it when there is something to write.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from ebbtide.checkpoint.entries import RankEntries, TensorEntry, WriteShare
from ebbtide.checkpoint.index import TENSORS


class OnDemandPlanner(DefaultSavePlanner):
    """A save planner that gets each tensor when it is written, not before."""

    def __init__(self, find: Callable[[str], Tensor], parallel: bool) -> None:
        super().__init__(dedup_save_to_lowest_rank=not parallel)
        self._find = find

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._find(write_item.index.fqn)


def plan_write(
    folder: Path, everyone: RankEntries, find: Callable[[str], Tensor], share: WriteShare, threads: int
) -> tuple[FileSystemWriter, OnDemandPlanner, list[SavePlan], Metadata]:
    """Plans the write. Every rank knows the entries of all ranks, so all compute the same plans without
    communication."""
    planner = OnDemandPlanner(find, share.parallel)
    writer = FileSystemWriter(folder / TENSORS, thread_count=threads, per_thread_copy_ahead=0)
    names = dict.fromkeys(entry.name for entries in everyone for entry in entries)
    planner.set_up_planner(nest({name: torch.empty(0, device="meta") for name in names}), None, True)
    writer.set_up_storage_writer(is_coordinator=True)
    plans = [SavePlan([_item(entry) for entry in entries], planner_data=planner.mappings) for entries in everyone]
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(plan) for plan in plans])
    return writer, planner, writer.prepare_global_plan(plans), metadata


def _item(entry: TensorEntry) -> WriteItem:
    """An entry as torch describes it. Shards of a tensor differ in their offsets; a tensor that several ranks have
    alike is written once."""
    offset = torch.Size([0] * len(entry.size) if entry.part_of is None else entry.part_of.offset)
    properties = TensorProperties.create_from_tensor(torch.empty(0, dtype=entry.dtype))
    whole = entry.size if entry.part_of is None else entry.part_of.full_size
    data = TensorWriteData(ChunkStorageMetadata(offset, entry.size), properties, whole)
    kind = WriteItemType.TENSOR if entry.part_of is None else WriteItemType.SHARD
    return WriteItem(MetadataIndex(entry.name, offset), kind, tensor_data=data)


def nest(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """`model.x` and `optimizer.y` as {"model": {"x": ...}, "optimizer": {"y": ...}}."""
    tree: dict[str, Any] = {}
    for name, tensor in tensors.items():
        section, rest = name.split(".", 1)
        tree.setdefault(section, {})[rest] = tensor
    return tree
