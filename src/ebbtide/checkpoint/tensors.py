"""Writes and reads named tensors in torch's distributed checkpoint format. The writer gets them one by one, so there is
never a second copy of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from io import SEEK_CUR, SEEK_END, SEEK_SET, FileIO, RawIOBase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ebbtide.checkpoint.entries import RankEntries, WriteShare
from ebbtide.checkpoint.index import StoredPart, StoredTensor, read_index
from ebbtide.checkpoint.manifest import MALFORMED, CheckpointFiles, safe_excerpt
from ebbtide.parallel.dtensor import Region


def write_tensors(
    folder: Path, everyone: RankEntries, find: Callable[[str], Tensor], share: WriteShare, threads: int = 1
) -> list[Any]:
    """Writes this rank's share; returns the write results that `finish_tensors` needs."""
    from ebbtide.checkpoint.write_plan import plan_write  # takes a second to import

    writer, planner, plans, _ = plan_write(folder, everyone, find, share, threads)
    mine = planner.finish_plan(plans[share.rank])
    results: list[Any] = writer.write_data(mine, planner).wait() if mine.items else []
    if len(results) != len(mine.items):  # torch drops exceptions of its threads
        raise OSError(
            f"{len(mine.items) - len(results)} of {len(mine.items)} tensors could not be written (is the disk full?)"
        )
    return results


def finish_tensors(folder: Path, everyone: RankEntries, results: Sequence[list[Any]], share: WriteShare) -> None:
    """Writes the metadata that joins the shares of all ranks."""
    from ebbtide.checkpoint.write_plan import plan_write

    writer, _, _, metadata = plan_write(folder, everyone, lambda name: torch.empty(0), share, 1)
    writer.finish(metadata, list(results))


class TensorReader:
    """The tensors of a checkpoint, to be read by name: `model.` or `optimizer.`, and their own name."""

    def __init__(self, files: CheckpointFiles) -> None:
        self._files, self._index = files, read_index(files)

    @property
    def weights(self) -> dict[str, torch.dtype]:
        """The dtypes of the model's weights, by their own names."""
        named = [(name.partition(".")[::2], kept) for name, kept in self._index.items()]
        return {name: self._dtype(kept) for (section, name), kept in named if section == "model"}

    def read(self, into: dict[str, Tensor]) -> None:
        """Fills tensors on the host with the whole tensors of these names."""
        wholes = {name: Region(one.size(), (0,) * one.ndim, one.size()) for name, one in into.items()}
        self.read_parts(into, wholes)

    def read_parts(self, into: dict[str, Tensor], regions: Mapping[str, Region]) -> None:
        """Fills tensors on the host with regions of the tensors of these names, in whatever pieces they were
        written."""
        pieces: dict[str, list[tuple[StoredPart, str]]] = {}
        for name, region in regions.items():
            kept = self._kept(name, region)
            if kept.size == tuple(region.full_size):
                for part in kept.parts:
                    pieces.setdefault(part.file, []).append((part, name))
                continue
            flat = torch.empty(kept.size, dtype=into[name].dtype)  # early versions wrote optimizer states flat
            self.read({name: flat})
            box = tuple(slice(start, start + size) for start, size in zip(region.offset, region.size, strict=True))
            into[name].copy_(flat.view(region.full_size)[box])
        for file, wanted in pieces.items():
            with self._files.path(file).open("rb", buffering=0) as opened:
                for part, name in sorted(wanted, key=lambda piece: piece[0].start):
                    self._copy(opened, part, name, into[name], regions[name])

    def _kept(self, name: str, region: Region) -> StoredTensor:
        if name not in self._index:
            raise self._files.damage_error(f"it lacks {name}")
        kept = self._index[name]
        if kept.size not in (tuple(region.full_size), (region.full_size.numel(),)):
            raise self._files.damage_error(f"{name} has the size {list(kept.size)} instead of {list(region.full_size)}")
        return kept

    def _copy(self, file: FileIO, part: StoredPart, name: str, out: Tensor, region: Region) -> None:
        """Copies the overlap of a stored part and a region into `out`."""
        overlap = [
            (max(start, other_start), min(start + size, other_start + other_size))
            for start, size, other_start, other_size in zip(
                part.offset, part.size, region.offset, region.size, strict=True
            )
        ]
        if all(start < end for start, end in overlap):
            out[_within(overlap, region.offset)].copy_(self._part(file, part, name)[_within(overlap, part.offset)])

    def _part(self, file: FileIO, part: StoredPart, name: str) -> Tensor:
        try:
            contents: Any = _FileRange(file, part.start, part.length)
            found = torch.load(contents, map_location="cpu", weights_only=True)
        except MALFORMED as error:
            why = f"{part.file} has no tensor in the place of {name}: {safe_excerpt(str(error))}"
            raise self._files.damage_error(why) from None
        dtype = self._dtype(self._index[name])
        if type(found) is not Tensor or (found.device.type, found.layout, found.dtype) != ("cpu", torch.strided, dtype):
            raise self._files.damage_error(f"{part.file} has no {dtype} tensor in the place of {name}")
        if tuple(found.size()) != part.size:
            raise self._files.damage_error(
                f"{part.file} has {list(found.size())} of {name} instead of {list(part.size)}"
            )
        return found

    def _dtype(self, kept: StoredTensor) -> torch.dtype:
        found = getattr(torch, kept.dtype, None)
        if not isinstance(found, torch.dtype):
            raise self._files.damage_error(f"torch has no dtype {kept.dtype}")
        return found


def _within(box: Iterable[tuple[int, int]], offset: Sequence[int]) -> tuple[slice, ...]:
    """The box (start and end in each dimension) as slices of a part that begins at an offset."""
    return tuple(slice(start - at, end - at) for (start, end), at in zip(box, offset, strict=True))


class _FileRange(RawIOBase):
    """A range of a file as a file of its own: torch reads it straight into the tensor's memory."""

    def __init__(self, file: FileIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._position = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        self._position = offset + {SEEK_SET: 0, SEEK_CUR: self._position, SEEK_END: self._length}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._length - self._position)]
        self._file.seek(self._start + self._position)
        count = self._file.readinto(view) or 0
        self._position += count
        return count
