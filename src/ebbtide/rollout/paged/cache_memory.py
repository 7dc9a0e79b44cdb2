"""The memory of the paged engine's KV caches: how many blocks fit, their tensors, and the runner that uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ebbtide.errors import UserError
from ebbtide.memory.device_budget import free_bytes
from ebbtide.memory.host import free_host_bytes
from ebbtide.model.row_adapters import row_adapter_bytes
from ebbtide.rollout.paged.attention import CacheLayout, KVCache, cache_costs
from ebbtide.rollout.paged.cache_costs import blocks_for
from ebbtide.rollout.paged.runner import Runner

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class CacheNeeds:
    """What the samples of a session need of a KV cache, in blocks."""

    useful: int
    """More than these would never be filled."""
    longest_prompt: int
    longest_completion: int
    longest_sample: int
    """A prompt and its completion."""


class CacheMemory:
    """Allocates KV caches, one at a time, and attaches them to the runner."""

    def __init__(
        self,
        model: PreTrainedModel,
        runner: Runner,
        layout: CacheLayout,
        *,
        batch: int,
        block: int,
        chunk: int,
        blocks: int | None,
        longest: tuple[int, int],
        make_room: Callable[[int], None],
    ) -> None:
        """`make_room` is called with the bytes of a cache before it is allocated; `PagedEngine` describes the other
        arguments."""
        self._model, self._runner, self._make_room = model, runner, make_room
        self._batch, self._block, self._blocks, self._most = batch, block, blocks, chunk
        self.chunk = chunk
        """The tokens that are prefilled in one pass, beside the KV cache that was counted last."""
        self._layout = layout
        self._costs = cache_costs(model, layout)
        self._longest = tuple(map(self.blocks_for, longest))

    def blocks_for(self, tokens: int) -> int:
        """Returns the blocks that `tokens` tokens need."""
        return blocks_for(tokens, self._block)

    def count_blocks(self, needs: CacheNeeds, *, reusable: int = 0) -> int:
        """Returns the size of a KV cache in blocks: all useful ones, or as many as fit into free memory. It raises if
        they do not hold the longest sample. `reusable` bytes are in use and will be freed for the cache."""
        count = self._blocks
        if count is None:
            weight = next(self._model.parameters())
            free = _free_bytes(weight.device) + reusable - row_adapter_bytes(self._model, self._most)
            sizes = weight.dtype.itemsize, self._block, self._most, self._batch
            count, self.chunk = self._costs.fit(*sizes, free, useful=needs.useful, least=needs.longest_sample)
        if count < needs.longest_sample:
            raise UserError(
                f"the KV cache has room for {count * self._block:,} tokens, and one sample may need"
                f" {needs.longest_sample * self._block:,}: lower `rollout.max_new_tokens` or"
                " `rollout.max_prompt_tokens` (`max_length` of `ebbtide serve`), lower how many samples decode at once"
                f" (`rollout.max_num_seqs`, or `batch` of `ebbtide serve`: now {self._batch:,}), or free memory for"
                " generation (`memory.offload.generate`, `optimizer.place`)"
            )
        return count

    def tensor_bytes(self, blocks: int) -> list[int]:
        """Returns the bytes of each tensor of a KV cache of `blocks` blocks."""
        itemsize = next(self._model.parameters()).dtype.itemsize
        return [prod(shape) * itemsize for shape in self._layout.shapes(blocks * self._block)]

    def allocate(self, blocks: int) -> list[Tensor]:
        """Allocates a KV cache: the keys, then the values of each layer."""
        self._make_room(sum(self.tensor_bytes(blocks)))
        weight = next(self._model.parameters())
        shapes = self._layout.shapes(blocks * self._block)
        return [torch.empty(shape, dtype=weight.dtype, device=weight.device) for shape in shapes]

    def resize(self, tensors: list[Tensor], used: Sequence[int], blocks: int) -> list[Tensor]:
        """Copies the `used` blocks of a KV cache to the front of a new one of `blocks` blocks. The list of old tensors
        is emptied one by one, so that two whole caches are never in memory at once."""
        resized = []
        self._make_room(max(0, sum(self.tensor_bytes(blocks)) - sum(tensor.nbytes for tensor in tensors)))
        while tensors:
            old = tensors.pop(0)
            new = old.new_empty((blocks * self._block, *old.shape[1:]))
            if used:
                by_block = new.view(blocks, self._block, *new.shape[1:])
                source = old.view(-1, *by_block.shape[1:])
                torch.index_select(source, 0, torch.tensor(used, device=old.device), out=by_block[: len(used)])
            resized.append(new)
            del old, new
        return resized

    def attach(self, tensors: Sequence[Tensor], needs: CacheNeeds) -> None:
        """Makes the runner use this KV cache, until `detach`."""
        self._runner.attach_cache(
            KVCache(tensors, self._layout),
            max(needs.longest_prompt, self._longest[0]),
            max(needs.longest_completion, self._longest[1]),
        )

    def detach(self) -> None:
        """Makes the runner release its KV cache."""
        self._runner.detach_cache()

    @contextmanager
    def without_making_room(self) -> Iterator[None]:
        """Within this context, KV caches are allocated without a call of `make_room`."""
        make_room, self._make_room = self._make_room, lambda size: None
        try:
            yield
        finally:
            self._make_room = make_room


def _free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return free_host_bytes() // 2
    return free_bytes(device)
