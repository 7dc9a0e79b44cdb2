"""How much memory the paged engine takes: its cache by the token, and what a pass needs beside it. Pure Python, no torch: a plan is made from it before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

SHARE = 0.95  # of the memory that is free when generation begins, and that a pass does not need for itself
BLOCKS = {"cpu": 16, "cuda": 64}  # tokens of a block
CHUNKS = {"cpu": 2048, "cuda": 16384}  # tokens that are read in one go
DRAWN_AT_ONCE = 512  # rows of logits in memory, after prompts were read
ROWS_CUT_AT_ONCE = 64  # of those, sorted at once for top-k and top-p
SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)  # of captured batches; then in steps of 128


def size_for(rows: int) -> int:
    """The size of batch that is captured for so many."""
    return next((size for size in SIZES if size >= rows), -(-rows // 128) * 128)


def blocks_for(tokens: int, block: int) -> int:
    return -(-tokens // block)


def useful_blocks(prompts: list[tuple[int, int]], new: int, batch: int, block: int, *, shared: bool = True) -> int:
    """Of the cache: for prompts of these lengths with so many samples each, of which `batch` decode at once, with at most `new` tokens each."""
    running = min(batch, sum(samples for _, samples in prompts))
    read = sum(blocks_for(length, block) * (1 if shared else samples) for length, samples in prompts)
    return read + running * (blocks_for(new, block) + 1)


@dataclass(frozen=True)
class Room:
    """Of a model: in numbers, not bytes."""

    layers: int
    heads: int
    """That keys and values have."""
    channels: int
    hidden: int
    query_heads: int
    mlp: int
    vocabulary: int

    def bytes(self, each: int) -> int:
        """That the cache keeps of a token, with numbers of so many bytes."""
        return 2 * self.layers * self.heads * self.channels * each

    def workspace(self, each: int, chunk: int, batch: int) -> int:
        """Bytes for reading `chunk` tokens at once, and for decoding and drawing for `batch` samples."""
        queries = self.query_heads * self.channels
        token = 8 * self.hidden + 4 * queries + 4 * self.mlp  # numbers, at most at once
        drawing = 2 * min(batch, DRAWN_AT_ONCE) * self.vocabulary * each + ROWS_CUT_AT_ONCE * self.vocabulary * 40
        return chunk * token * each + drawing + 32 * batch * queries * 4  # the last: attention in parts, at most so many

    def blocks(self, each: int, block: int, chunk: int, batch: int, free: int) -> int:
        """Of the cache, that fit into so much free memory."""
        return max(0, int(SHARE * free) - self.workspace(each, chunk, batch)) // (block * self.bytes(each))
