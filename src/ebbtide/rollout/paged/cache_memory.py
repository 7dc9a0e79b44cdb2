"""The memory of the paged engine's KV caches: how many blocks fit, their tensors, and the runner that uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ebbtide.errors import UserError
from ebbtide.memory.device_budget import free_bytes
from ebbtide.memory.gauge import transient
from ebbtide.memory.host import free_host_bytes
from ebbtide.memory.plan import HoldingName
from ebbtide.model.row_adapters import row_adapter_bytes
from ebbtide.rollout.paged.attention import CacheLayout, KVCache, cache_costs
from ebbtide.rollout.paged.block_table import UsedCache
from ebbtide.rollout.paged.cache_costs import KV_CACHE, SEQUENCE_STATES, CacheSize, blocks_for
from ebbtide.rollout.paged.runner import Runner
from ebbtide.rollout.paged.state_memory import StateMemory

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
    sequences: int
    """How many prompts and samples have blocks at once, at most: where the model's layers have states, each of them
    has one."""


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
        self._states = StateMemory(model)

    @property
    def empty_size(self) -> CacheSize:
        """The size of a KV cache that holds nothing."""
        return CacheSize(0, 0 if self._states.exist else None)

    def blocks_for(self, tokens: int) -> int:
        """Returns the blocks that `tokens` tokens need."""
        return blocks_for(tokens, self._block)

    def find_size(self, needs: CacheNeeds, *, reusable: int = 0) -> CacheSize:
        """Returns the size of a KV cache: all that is useful, or as much as fits into free memory. It raises if
        that does not hold the longest sample. `reusable` bytes are in use and will be freed for the cache."""
        count = self._blocks
        free = _free_bytes(self._model.device) + reusable - row_adapter_bytes(self._model, self._most)
        states = self._states.count(needs.sequences, free)
        if count is None:
            free -= sum(self._states.tensor_bytes(states))
            sizes = self._model.dtype.itemsize, self._block, self._most, self._batch
            count, self.chunk = self._costs.fit(*sizes, free, useful=needs.useful, least=needs.longest_sample)
        if count < needs.longest_sample:
            raise UserError(
                f"the KV cache has room for {count * self._block:,} tokens, and one sample may need"
                f" {needs.longest_sample * self._block:,}: lower `rollout.max_new_tokens` or"
                " `rollout.max_prompt_tokens` (`max_length` of `ebbtide serve`), lower how many samples decode at once"
                f" (`rollout.max_num_seqs`, or `batch` of `ebbtide serve`: now {self._batch:,}), or free memory for"
                " generation (`memory.offload.generate`, `optimizer.place`)"
            )
        return CacheSize(count, states)

    def tensor_bytes(self, size: CacheSize) -> dict[HoldingName, list[int]]:
        """Returns the bytes of each tensor of a KV cache, and of the states beside it."""
        itemsize = self._model.dtype.itemsize
        keys = [prod(shape) * itemsize for shape in self._layout.shapes(size.blocks * self._block)]
        states = {SEQUENCE_STATES.name: self._states.tensor_bytes(size.states)} if self._states.exist else {}
        return {KV_CACHE.name: keys, **states}

    def total_bytes(self, size: CacheSize) -> int:
        """Returns the bytes of a KV cache with its states."""
        return sum(map(sum, self.tensor_bytes(size).values()))

    @contextmanager
    def counted(self, size: CacheSize) -> Iterator[None]:
        """Within this context, the rows of a KV cache and its states are on the device."""
        with ExitStack() as rows:
            for name, sizes in self.tensor_bytes(size).items():
                rows.enter_context(transient(name, sum(sizes)))
            yield

    def by_holding(self, tensors: Sequence[Tensor]) -> dict[HoldingName, list[Tensor]]:
        """Returns the tensors of the KV cache and of the states, of all that `allocate` returned."""
        keys = 2 * len(self._layout.own)
        states = {SEQUENCE_STATES.name: list(tensors[keys:])} if self._states.exist else {}
        return {KV_CACHE.name: list(tensors[:keys]), **states}

    def allocate(self, size: CacheSize) -> list[Tensor]:
        """Allocates a KV cache: the keys, then the values of each layer, then the states."""
        self._make_room(self.total_bytes(size))
        shapes = self._layout.shapes(size.blocks * self._block)
        keys = [torch.empty(shape, dtype=self._model.dtype, device=self._model.device) for shape in shapes]
        return keys + self._states.allocate(size.states)

    def resize(self, tensors: list[Tensor], used: UsedCache, size: CacheSize) -> list[Tensor]:
        """Copies what is `used` of a KV cache to the front of a new one. The list of old tensors is emptied one by one,
        so that two whole caches are never in memory at once."""
        resized: list[Tensor] = []
        self._make_room(max(0, self.total_bytes(size) - sum(tensor.nbytes for tensor in tensors)))
        while tensors:
            old = tensors.pop(0)
            if len(resized) < 2 * len(self._layout.own):
                by_block = old.view(-1, self._block, *old.shape[1:])
                new = _copy_front(by_block, used.blocks, size.blocks).flatten(0, 1)
            else:
                new = _copy_front(old, used.states, self._states.rows(size.states))
            resized.append(new)
            del old, new
        return resized

    def attach(self, tensors: Sequence[Tensor], needs: CacheNeeds) -> None:
        """Makes the runner use this KV cache, until `detach`."""
        keys = 2 * len(self._layout.own)
        self._runner.attach_cache(
            KVCache(tensors[:keys], self._layout, self._states.by_layer(tensors[keys:])),
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


def _copy_front(old: Tensor, used: Sequence[int], count: int) -> Tensor:
    """Copies some rows of a tensor to the front of a new one with `count` rows."""
    new = old.new_empty((count, *old.shape[1:]))
    if used:
        torch.index_select(old, 0, torch.tensor(used, device=old.device), out=new[: len(used)])
    return new


def _free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return free_host_bytes() // 2
    return free_bytes(device)
