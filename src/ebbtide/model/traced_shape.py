"""The shape of a model whose blocks may all be different, as a trace found it (planner/trace.py): the sizes of its
parameters, and what a forward and a backward take by token. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from ebbtide.errors import UserError
from ebbtide.model.shape import Shape, Tensor, largest_shard
from ebbtide.system.units import ceil_div


@dataclass(frozen=True)
class Work:
    """What a pass over a model's decoder computes."""

    flops: float
    """Operations of matmuls for each token, without attention."""
    touched: float
    """Bytes for each token that all other kernels read and write."""
    kernels: int
    """Kernels that are launched, of whatever size."""


@dataclass(frozen=True)
class TracedPass:
    """Bytes of activations for each token, in a forward with its backward."""

    saved: tuple[int, ...]
    """What each block leaves on the device for the backward."""
    outside: int
    """What is there before the first block, such as the embedded tokens."""
    norm_saved: int
    """Of what comes after the last block: what it saves, and its output."""
    in_final_norm: int
    """Additional bytes in the backward of what comes after the last block."""
    in_backward: int
    """Additional bytes at the peak of the blocks' backward, beyond what all blocks saved."""
    in_first: int
    """All bytes at the peak of the first block's backward."""
    backward: Work


@dataclass(frozen=True)
class TracedShape(Shape):
    """The shape of one model. `heads` and `head_dim` are those of the layer with the most queries, and `mlp` is the
    widest of all; what the planner adds up comes from the trace."""

    itemsize: int = 2
    """Bytes of a number in the trace."""
    blocks: tuple[tuple[Tensor, ...], ...] = ()
    """The parameters of each block, without adapters."""
    before: tuple[Tensor, ...] = ()
    """Those outside the blocks, up to the first block, and next those after it."""
    after: tuple[Tensor, ...] = ()
    block_adapters: tuple[tuple[Tensor, ...], ...] = ()
    """The matrices of each block's adapters."""
    kv_layers: tuple[tuple[int, int, int], ...] = ()
    """Key-value heads, and the channels of a key and of a value, of each layer that has some of its own."""
    state_bytes: int = 0
    """The bytes of the states of one sequence."""
    attention: tuple[tuple[int, int | None], ...] = ()
    """For each call of attention: the width of its queries, and how many tokens a token sees at most."""
    forward: Work = Work(0.0, 0.0, 0)
    in_forward: int = 0
    """Bytes for each token at the peak of a forward without gradient."""
    keep: TracedPass = TracedPass((), 0, 0, 0, 0, 0, Work(0.0, 0.0, 0))
    recompute: TracedPass = TracedPass((), 0, 0, 0, 0, 0, Work(0.0, 0.0, 0))
    """The same where all blocks are recomputed from their inputs."""
    inputs: tuple[int, ...] = ()
    """Bytes of each block's input for each token."""
    has_named_modules: bool = False
    """Whether a run knows the modules of its blocks by names, so that `memory.activations` may list them."""

    @property
    def is_traced(self) -> bool:
        return True

    def block_shard(self, ranks: int = 1) -> int:
        return max(largest_shard(block, ranks) for block in self.blocks)

    def root_shard(self, ranks: int = 1) -> int:
        return largest_shard((*self.before, *self.after), ranks)

    def model_shard(self, ranks: int = 1) -> int:
        return sum(largest_shard(block, ranks) for block in self.blocks) + self.root_shard(ranks)

    def round_up_to_tensors(self, place: int, ranks: int = 1, *, grouped: bool = False) -> int:
        if place <= 0:
            return 0
        sizes: Iterable[int]
        if grouped:
            sizes = (self.root_shard(ranks), *(largest_shard(block, ranks) for block in self.blocks))
        else:
            sizes = (largest_shard([one], ranks) for one in self._tensors)
        return next((end for end in accumulate(sizes) if end >= place), self.model_shard(ranks))

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        return (*self.before, *(one for block in self.blocks for one in block), *self.after)

    @property
    def widest_layer(self) -> int:
        """A third of what a forward has at its peak beside three times the hidden states, which is how a plan counts
        it for a block of the usual structure."""
        return max(0, ceil_div(self.in_forward, self.itemsize) - 3 * self.hidden) // 3

    @cached_property
    def largest_tensor(self) -> int:
        return max(rows * row for rows, row in self._tensors)

    @cached_property
    def largest_trained_tensor(self) -> int:
        if self.lora is None:
            return self.largest_tensor
        return max(rows * row for block in self.block_adapters for rows, row in block)

    @cached_property
    def tensor_count(self) -> int:
        return len(self._tensors)

    @cached_property
    def trained_tensor_count(self) -> int:
        return self.tensor_count if self.lora is None else sum(map(len, self.block_adapters))

    @cached_property
    def adapters(self) -> dict[str, Tensor]:
        """A layer for each adapter of a block, on average."""
        count = ceil_div(sum(map(len, self.block_adapters)), 2 * self.layers) if self.block_adapters else 0
        return {str(number): (1, 1) for number in range(count)}

    def adapter_shard(self, ranks: int = 1) -> int:
        return max((largest_shard(block, ranks) for block in self.block_adapters), default=0)

    def adapters_shard(self, ranks: int = 1) -> int:
        return sum(largest_shard(block, ranks) for block in self.block_adapters)

    def tensor_parallel_shape(self, tensor: int) -> Shape:
        if tensor == 1:
            return self
        raise UserError(
            f"a plan of `parallel.tensor: {tensor}` is not possible for {self.family}: set `parallel.tensor: 1` and"
            " shard the model with `parallel.data`"
        )

    def attention_flops(self, length: float) -> float:
        """The operations of attention for each token of sequences of so many tokens, in a forward."""
        return sum(2 * width * min(length, 2 * (window or length)) for width, window in self.attention)

    def train_flops(self, lengths: Iterable[tuple[int, int]]) -> float:
        found = list(lengths)
        attention = sum((before + new) * self.attention_flops(before + new) for before, new in found)
        blocks = self.forward.flops * sum(before + new for before, new in found)
        times = 3.0 if self.lora is None else 2.0
        return 3.0 * attention + times * (blocks + 2 * self.embedding * sum(new for _, new in found))

    @property
    def matmul_parameters_per_token(self) -> int:
        return round(self.forward.flops / 2 / self.layers)

    @property
    def kv_numbers_per_token(self) -> int:
        return sum(heads * (key + value) for heads, key, value in self.kv_layers)
