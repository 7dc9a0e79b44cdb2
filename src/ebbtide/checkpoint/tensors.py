"""Named tensors in torch's distributed checkpoint format. They are asked for one by one as they are written, so that no second copy of all of them is ever there."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import SEEK_CUR, SEEK_END, SEEK_SET, FileIO, RawIOBase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ebbtide.checkpoint.index import Kept, Part, read_index
from ebbtide.checkpoint.manifest import MALFORMED, Listed, shown
from ebbtide.memory.shards import Region


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


Everyone = Sequence[Sequence[Entry]]
"""What each rank has."""


def write_tensors(folder: Path, everyone: Everyone, find: Callable[[str], Tensor], share: Share, threads: int = 1) -> list[Any]:
    """Writes this rank's share; gives what `finish_tensors` needs to know of it."""
    from ebbtide.checkpoint.planned import planned  # with torch's checkpoint format: a second to import

    writer, planner, plans, _ = planned(folder, everyone, find, share, threads)
    mine = planner.finish_plan(plans[share.rank])
    results: list[Any] = writer.write_data(mine, planner).wait() if mine.items else []
    if len(results) != len(mine.items):  # torch loses what goes wrong in its threads
        raise OSError(f"{len(mine.items) - len(results)} of {len(mine.items)} tensors could not be written (is the disk full?)")
    return results


def finish_tensors(folder: Path, everyone: Everyone, results: Sequence[list[Any]], share: Share) -> None:
    """Writes what makes the shares of all ranks one."""
    from ebbtide.checkpoint.planned import planned

    writer, _, _, metadata = planned(folder, everyone, lambda name: torch.empty(0), share, 1)
    writer.finish(metadata, list(results))


class Tensors:
    """Those of a checkpoint, to be read by name: `model.` or `optimizer.` and their own."""

    def __init__(self, files: Listed) -> None:
        self._files, self._index = files, read_index(files)

    @property
    def weights(self) -> dict[str, torch.dtype]:
        """Their types, by their own names."""
        named = [(name.partition(".")[::2], kept) for name, kept in self._index.items()]
        return {name: self._dtype(kept) for (section, name), kept in named if section == "model"}

    def read(self, into: dict[str, Tensor]) -> None:
        """Fills tensors on the host."""
        wholes = {name: Region(one.size(), (0,) * one.ndim, one.size()) for name, one in into.items()}
        self.read_parts(into, wholes)

    def read_parts(self, into: dict[str, Tensor], regions: Mapping[str, Region]) -> None:
        """Fills tensors on the host with parts of those of these names, whoever wrote them in whatever pieces."""
        pieces: dict[str, list[tuple[Part, str]]] = {}
        for name, region in regions.items():
            kept = self._kept(name, region)
            if kept.size == tuple(region.whole):
                for part in kept.parts:
                    pieces.setdefault(part.file, []).append((part, name))
                continue
            flat = torch.empty(kept.size, dtype=into[name].dtype)  # as optimizer states were at first
            self.read({name: flat})
            box = tuple(slice(start, start + size) for start, size in zip(region.offset, region.size, strict=True))
            into[name].copy_(flat.view(region.whole)[box])
        for file, wanted in pieces.items():
            with self._files.path(file).open("rb", buffering=0) as opened:
                for part, name in sorted(wanted, key=lambda piece: piece[0].start):
                    self._copy(opened, part, name, into[name], regions[name])

    def _kept(self, name: str, region: Region) -> Kept:
        if name not in self._index:
            raise self._files.damaged(f"it lacks {name}")
        kept = self._index[name]
        if kept.size not in (tuple(region.whole), (region.whole.numel(),)):
            raise self._files.damaged(f"{name} has the size {list(kept.size)} instead of {list(region.whole)}")
        return kept

    def _copy(self, file: FileIO, part: Part, name: str, out: Tensor, region: Region) -> None:
        """What a part and a region have in common, from one to the other."""
        common = [
            (max(one, other), min(one + extent, other + much))
            for one, extent, other, much in zip(part.offset, part.size, region.offset, region.size, strict=True)
        ]
        if all(start < end for start, end in common):
            out[_within(common, region.offset)].copy_(self._part(file, part, name)[_within(common, part.offset)])

    def _part(self, file: FileIO, part: Part, name: str) -> Tensor:
        try:
            stretch: Any = _Stretch(file, part.start, part.length)
            found = torch.load(stretch, map_location="cpu", weights_only=True)
        except MALFORMED as error:
            why = f"{part.file} has no tensor in the place of {name}: {shown(str(error))}"
            raise self._files.damaged(why) from None
        kind = self._dtype(self._index[name])
        if type(found) is not Tensor or (found.device.type, found.layout, found.dtype) != ("cpu", torch.strided, kind):
            raise self._files.damaged(f"{part.file} has no {kind} tensor in the place of {name}")
        if tuple(found.size()) != part.size:
            raise self._files.damaged(f"{part.file} has {list(found.size())} of {name} instead of {list(part.size)}")
        return found

    def _dtype(self, kept: Kept) -> torch.dtype:
        found = getattr(torch, kept.dtype, None)
        if not isinstance(found, torch.dtype):
            raise self._files.damaged(f"torch has no type {kept.dtype}")
        return found


def _within(box: Iterable[tuple[int, int]], offset: Sequence[int]) -> tuple[slice, ...]:
    """The box (start and end in each dimension) as a part that begins at an offset has it."""
    return tuple(slice(start - at, end - at) for (start, end), at in zip(box, offset, strict=True))


class _Stretch(RawIOBase):
    """A stretch of a file as a file of its own: torch reads it straight into the tensor's memory."""

    def __init__(self, file: FileIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._place = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        self._place = offset + {SEEK_SET: 0, SEEK_CUR: self._place, SEEK_END: self._length}[whence]
        return self._place

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._length - self._place)]
        self._file.seek(self._start + self._place)
        count = self._file.readinto(view) or 0
        self._place += count
        return count
