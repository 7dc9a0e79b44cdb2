"""The layout of the optimizer's state: parameters are cut into segments, and segments put end to end into chunks.

A chunk moves and is stepped as one. A parameter larger than a chunk is split over several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ebbtide.system.units import ceil_div

ALIGNMENT = 128  # elements: segments start at 256 bytes in 16-bit state, where vectorised kernels want them


@dataclass(frozen=True)
class Segment:
    """Elements `start` to `stop` of a flattened parameter; their state begins at `offset` of its chunk."""

    parameter: int
    start: int
    stop: int
    offset: int = 0

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Chunk:
    segments: tuple[Segment, ...]
    size: int
    """The number of elements, with the gaps between segments."""


def split_gpu_cpu(sizes: Sequence[int], cpu: float) -> tuple[list[Segment], list[Segment]]:
    """Splits the parameters: (segments for the GPU, segments for the CPU); the CPU gets a share `cpu` of all elements.

    The CPU gets the last parameters, whose gradients the backward computes first: these are on the host when it ends.
    At most one parameter is cut, at a multiple of `ALIGNMENT`.
    """
    border = sum(sizes) - round(cpu * sum(sizes))
    gpu_part, cpu_part = [], []
    first = 0
    for parameter, size in enumerate(sizes):
        cut = min(max(border - first, 0), size)
        if cut < size:
            cut -= cut % ALIGNMENT
        if cut > 0:
            gpu_part.append(Segment(parameter, 0, cut))
        if cut < size:
            cpu_part.append(Segment(parameter, cut, size))
        first += size
    return gpu_part, cpu_part


def pack_chunks(segments: Sequence[Segment], limit: int) -> list[Chunk]:
    """Packs segments into chunks of at most `limit` elements, in order; long segments are cut."""
    chunks: list[Chunk] = []
    open_segments: list[Segment] = []
    used = 0
    for segment in segments:
        start = segment.start
        while start < segment.stop:
            if used >= limit:
                chunks.append(Chunk(tuple(open_segments), used))
                open_segments, used = [], 0
            stop = min(segment.stop, start + limit - used)
            open_segments.append(Segment(segment.parameter, start, stop, offset=used))
            used += ceil_div(stop - start, ALIGNMENT) * ALIGNMENT
            start = stop
    if open_segments:
        chunks.append(Chunk(tuple(open_segments), used))
    return chunks
