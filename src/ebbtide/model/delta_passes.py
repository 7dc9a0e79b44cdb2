"""The forward and the backward of the gated delta rule by the kernels of delta_kernels.py."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ebbtide.model.delta_sizes import CHUNK, PART, SCAN_WARPS, SMALLEST, WARPS
from ebbtide.model.launch import Launcher


@cache
def _launcher(name: str) -> Launcher:
    from ebbtide.model import delta_kernels  # It needs triton, which comes with torch on a GPU.

    # Two stages: what comes next is loaded while one chunk, or one part of a state, is computed.
    options: dict[str, Any] = {} if name == "_prepare" else {"num_stages": 2}
    return Launcher(getattr(delta_kernels, name), **options)


def _launch(
    name: str, programs: int, tensors: tuple[Tensor, ...], numbers: tuple[int, ...], *constants: int, warps: int
) -> None:
    if not tensors[0].is_meta:  # else it is a plan's trace, which wants to know what is allocated
        _launcher(name)(programs, tensors, numbers, *constants, warps=warps)


class DeltaPasses:
    """Forward and backward for these inputs of `gated_delta_rule`, of 16 bits: of heads whose channels are a power of
    two, from 16 on."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *, normalizes: bool) -> None:
        (self._query, query_step), (self._key, key_step), (self._value, self._value_step) = (
            _by_token(one) for one in (query, key, value)
        )
        self._g, self._beta = g.contiguous(), beta.contiguous()
        self._steps, self._normalizes = (query_step, key_step), normalizes
        batch, tokens, self._heads, self._K = query.shape
        self._V, self._rows, chunks = value.shape[-1], batch * self._heads, -(-tokens // CHUNK)
        self._part = min(self._V, max(PART // self._K, SMALLEST))
        self._lengths = tokens, chunks
        padded = self._rows, chunks * CHUNK
        decay_and_factors, solution_and_scores = self._wide(3, *padded), self._wide(2, *padded, CHUNK)
        self._prepared = *decay_and_factors.unbind(), *solution_and_scores.unbind()
        _launch(
            "_prepare",
            self._rows * chunks,
            (self._query, self._key, self._g, self._beta, *self._prepared),
            self._lengths,
            *(self._heads, self._K, query_step, key_step, normalizes),
            warps=1,  # The steps of its substitution need one another.
        )

    def forward(self, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """(the outputs [B, T, heads, V], the states after the last tokens [B, heads, K, V]), from these states on."""
        output = torch.empty_like(self._value, memory_format=torch.contiguous_format)
        last = self._wide(len(output), self._heads, self._K, self._V)
        initial = last if state is None else state.float().contiguous()
        self._scan(initial, output, last, last, last, continues=state is not None, reads=True)
        return output, last

    def backward(self, grad: Tensor) -> tuple[Tensor, ...]:
        """The gradients of the inputs, for that of the outputs."""
        chunks = self._lengths[1]
        grad, grad_step = _by_token(grad)
        written, dright = self._wide(2, self._rows, chunks * CHUNK, self._V).unbind()
        # In 16 bits, they would cost the gradients of g a twentieth where keys are alike: dS S almost cancels then.
        states, dstates = self._wide(2, self._rows, chunks, self._K, self._V).unbind()
        self._scan(states, written, written, states, states, continues=False, reads=False)
        _launch(
            "_scan_back",
            self._rows * self._V // self._part,
            (self._query, self._key, grad, self._beta, *self._prepared, dright, dstates),
            self._lengths,
            *(self._heads, self._K, self._V, self._part, *self._steps, grad_step),
            warps=SCAN_WARPS,
        )
        inputs = self._query, self._key, self._value, self._g, self._beta
        found = tuple(torch.empty_like(one, memory_format=torch.contiguous_format) for one in inputs)
        decay, query_factor, key_factor, _, scores = self._prepared
        kept = written, states, dright, dstates
        _launch(
            "_gradients",
            self._rows * chunks,
            (*inputs[:3], grad, self._beta, decay, query_factor, key_factor, scores, *kept, *found),
            self._lengths,
            *(self._heads, self._K, self._V, self._part, *self._steps, self._value_step, grad_step, self._normalizes),
            warps=WARPS,
        )
        return found

    def _scan(self, *tensors: Tensor, continues: bool, reads: bool) -> None:
        """`tensors`: from `initial` on."""
        _launch(
            "_scan",
            self._rows * self._V // self._part,
            (self._query, self._key, self._value, self._beta, *self._prepared, *tensors),
            self._lengths,
            *(self._heads, self._K, self._V, self._part, *self._steps, self._value_step, continues, reads),
            warps=SCAN_WARPS,
        )

    def _wide(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self._value.device)


def _by_token(x: Tensor) -> tuple[Tensor, int]:
    """(x [B, T, heads, channels] with each token's numbers side by side, how many lie from a token to the next). It is
    a copy of those that lie otherwise: behind a convolution, a channel's tokens are side by side."""
    tokens, heads, channels = x.shape[1:]
    step = x.stride(1)
    if x.stride() == (tokens * step, step, channels, 1) and (x.is_meta or x.data_ptr() % 16 == 0):
        return x, step
    return x.contiguous(), heads * channels
