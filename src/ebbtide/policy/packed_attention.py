"""Attention within packed sequences: T tokens in a row, cut into sequences.

On a GPU in 16 bits, torch's varlen flash kernel reads them in place. Elsewhere they are padded on the right, where a
causal mask alone keeps real tokens from seeing padding, and packed again afterwards.

Flash kernels know windows. Chunks are sequences of their own to them. Values with fewer channels than keys are padded
with zeros. Sinks change the sums of the softmax, and these are what the kernels' backward reads. Soft caps have a
kernel of their own (packed_flex.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ebbtide.model.attention_kind import PLAIN, AttentionKind, attend
from ebbtide.policy.packed_flex import can_flex, flex
from ebbtide.system.torch_internals import flash_backward, flash_forward

MOST_FLASH_CHANNELS = 256  # of a query or key, in torch's flash kernels


def has_flash(device: torch.device, dtype: torch.dtype, channels: int, value_channels: int) -> bool:
    """Whether torch's flash kernels compute such attention."""
    fits = value_channels <= channels <= MOST_FLASH_CHANNELS
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and fits


@dataclass(frozen=True)
class PackedAttention:
    """Causal attention within packed sequences: by autograd, or with a backward that is called by name."""

    starts: Tensor
    """[S + 1]: where each sequence starts, and T."""
    longest: int
    scale: float
    kind: AttentionKind = PLAIN
    exact: bool = False
    """Whether the forward has the bits of the paged engine's."""

    def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The mixed values [T, heads, value channels], for autograd, of queries and keys [T, heads, channels] and
        values [T, kv heads, value channels]."""
        by = self._without_chunks()
        if by.kind.softcap is not None and by.kind.sinks is None and can_flex(query, key, value):
            return flex(query, key, value, by.starts, by.scale, by.kind)
        if by.kind.softcap is not None or not _flashes(query, value):
            return by._padded(query, key, value)
        if by.kind.sinks is not None:
            mixed: Tensor = _WithSinks.apply(query, key, value, by.kind.sinks, by)  # type: ignore[no-untyped-call]
            return mixed
        mixed = _kernel()(
            query, key, _widened(value, query), by.starts, by.starts, by.longest, by.longest, scale=by.scale,
            window_size=by._flash()["window"],
        )  # fmt: skip
        return mixed[..., : value.shape[-1]]

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """(the mixed values [T, heads, channels], what the backward needs besides), of queries [T, heads, channels],
        and keys and values [T, kv heads, channels]. It leaves out sinks, and computes no soft cap."""
        if self.exact:
            from ebbtide.model.attention_kernels import attend_packed  # It needs triton, which torch brings on a GPU.

            return attend_packed(query, key, value, self.starts, self.longest, self.scale, self.kind)
        if _flashes(query, value):
            mixed, sums = flash_forward(query, key, _widened(value, query), **self._flash())
            return mixed[..., : value.shape[-1]], sums
        return self._padded(query, key, value), query.new_empty(0)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mixed: Tensor, sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of queries, keys and values; `mixed` and `sums` are what the forward returned."""
        if _flashes(query, value):
            grad, wide, mixed = (_widened(one, query) for one in (grad, value, mixed))
            dquery, dkey, dvalue = flash_backward(grad, query, key, wide, mixed, sums, **self._flash())
            return dquery, dkey, dvalue[..., : value.shape[-1]]
        inputs = [one.detach().requires_grad_() for one in (query, key, value)]
        with torch.enable_grad():
            again = self._padded(*inputs)
        dquery, dkey, dvalue = torch.autograd.grad(again, inputs, grad)
        return dquery, dkey, dvalue

    def _flash(self) -> dict[str, Any]:
        window = self.kind.within(self.longest).window
        left = -1 if window is None else window - 1
        return {"starts": self.starts, "longest": self.longest, "scale": self.scale, "window": (left, 0)}

    def _without_chunks(self) -> PackedAttention:
        """The same attention, where each chunk is a sequence."""
        kind = self.kind.within(self.longest)
        if kind.chunk is None:
            return replace(self, kind=kind)
        # All sequences are cut into as many as the longest has, so that the host need not know their lengths.
        cuts = torch.arange(0, self.longest, kind.chunk, device=self.starts.device, dtype=self.starts.dtype)
        begins = (self.starts[:-1, None] + cuts).minimum(self.starts[1:, None]).flatten()
        starts = torch.cat([begins, self.starts[-1:]])
        return replace(self, starts=starts, longest=kind.chunk, kind=replace(kind, chunk=None).within(kind.chunk))

    def _padded(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        starts, tokens, kind = self.starts, len(query), self.kind.within(self.longest)
        column = torch.arange(self.longest, device=query.device)  # [L]
        real = column < starts.diff()[:, None]  # [S, L]
        # The row that each position of the padded layout reads; padding reads an extra row of zeros at the end.
        source = torch.where(real, starts[:-1, None] + column, tokens)  # [S, L]

        def pad_right(states: Tensor) -> Tensor:
            rows = pad(states, (0, 0, 0, 0, 0, 1))  # [T + 1, heads, channels]
            return rows[source].transpose(1, 2)  # [S, heads, L, channels]

        seen = None if kind.window is None and kind.chunk is None else kind.sees(column[:, None], column)
        mixed = attend(pad_right(query), pad_right(key), pad_right(value), seen, self.scale, kind)
        return mixed.transpose(1, 2)[real]  # [T, heads, value channels]


class _WithSinks(torch.autograd.Function):
    """Flash attention with sinks. A sink is one more key, whose value is zero: it changes the sums of exp, and the
    kernels' backward computes its weights from those."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, attention: PackedAttention
    ) -> Tensor:
        mixed, sums = attention.forward(query, key, value)
        total = torch.logaddexp(sums, sinks.float()[:, None])  # [heads, T]
        mixed = (mixed * (sums - total).exp().T[..., None]).to(mixed.dtype)
        ctx.save_for_backward(query, key, value, sinks, mixed, total)
        ctx.attention = attention
        return mixed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, mixed, total = ctx.saved_tensors
        grad = grads[0].contiguous()
        by_token = (grad.float() * mixed.float()).sum(-1).T  # [heads, T]
        dsinks = -((sinks.float()[:, None] - total).exp() * by_token).sum(1).to(sinks.dtype)
        return *ctx.attention.backward(grad, query, key, value, mixed, total), dsinks, None


def _flashes(query: Tensor, value: Tensor) -> bool:
    return has_flash(query.device, query.dtype, query.shape[-1], value.shape[-1])


def _widened(value: Tensor, query: Tensor) -> Tensor:
    """Values with as many channels as the queries: the added ones are zero."""
    missing = query.shape[-1] - value.shape[-1]
    return pad(value, (0, missing)) if missing else value


@cache
def _kernel() -> Callable[..., Any]:
    """torch's varlen kernel, imported when it is first needed: the import loads torch's compiler."""
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 accepts fewer key heads than query heads as they are; later versions need a flag.
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
    return partial(varlen_attn, **grouped)
