"""Which blocks of the KV cache, and which state slots, are free, and which hold a prompt or a sample."""

from __future__ import annotations

from dataclasses import dataclass, field

from ebbtide.rollout.paged.cache_costs import CacheSize


@dataclass(frozen=True)
class UsedCache:
    """The blocks of a KV cache, and the state slots, that are in use."""

    blocks: list[int]
    states: list[int]


class BlockAllocator:
    """Knows which blocks of the KV cache are free, or which state slots."""

    def __init__(self, count: int) -> None:
        self.num_blocks = count
        self._free = list(range(count - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def allocate(self, count: int) -> list[int]:
        assert count <= len(self._free)
        return [self._free.pop() for _ in range(count)]

    def release(self, blocks: list[int]) -> None:
        self._free += reversed(blocks)
        blocks.clear()


@dataclass(eq=False)
class BlockTable:
    """The blocks that hold the keys and values of a prompt, or of a sample's own tokens. The first `computed` tokens
    are in the KV cache, or will be after the passes scheduled so far."""

    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    state: list[int] = field(default_factory=list)
    """Its state slot, if it has one."""

    def slots(self, first: int, last: int, size: int) -> list[int]:
        """Returns the slot mapping: where in the KV cache tokens `first` to `last` (excluded) lie."""
        return [self.blocks[index // size] * size + index % size for index in range(first, last)]


def allocators(size: CacheSize) -> tuple[BlockAllocator, BlockAllocator | None]:
    """Returns the allocators of a KV cache's blocks, and of its state slots if it has some."""
    return BlockAllocator(size.blocks), None if size.states is None else BlockAllocator(size.states)
