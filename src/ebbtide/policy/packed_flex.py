"""Attention with soft caps within packed sequences, by torch's flex attention, which compiles a kernel for them. It is
for a GPU in 16 bits; flash kernels know no caps, and plain attention has memory for every pair of tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ebbtide.model.attention_kind import AttentionKind
from ebbtide.system.torch_internals import compile_by_size
from ebbtide.system.units import ceil_div

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # tokens of a block of the mask
FEWEST = 1024  # tokens that a kernel is compiled for


def can_flex(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether flex attention computes the mixed values of such queries, keys and values [T, heads, channels]."""
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    return _compiles(query.device, query.dtype, query.shape[1:], key.shape[1:], value.shape[1:])


@cache
def _compiles(device: torch.device, dtype: torch.dtype, *sizes: torch.Size) -> bool:
    """Whether forward and backward compile and run: a small GPU may lack the shared memory for many channels."""
    tokens = 2 * BLOCK
    query, key, value = (torch.zeros((tokens, *size), dtype=dtype, device=device, requires_grad=True) for size in sizes)
    starts = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    try:
        with torch.enable_grad():
            mixed = flex(query, key, value, starts, 1.0, AttentionKind(softcap=1.0))
        torch.autograd.grad(mixed.sum(), (query, key, value))
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AssertionError):  # Errors of torch's compiler are of these kinds.
        return False
    return True


def flex(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, scale: float, kind: AttentionKind) -> Tensor:
    """The mixed values [T, heads, value channels] of queries and keys [T, heads, channels] and values. The kind has a
    soft cap, no chunks and no sinks."""
    cap = kind.softcap
    assert cap is not None

    def bend(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    tokens, size = len(query), padded_size(len(query))
    q, k, v = (  # [1, heads, size, channels]
        pad(states, (0, 0, 0, 0, 0, size - tokens)).transpose(0, 1)[None] for states in (query, key, value)
    )
    mask = block_mask(starts, size, kind.window)
    mixed: Tensor = _compiled()(
        q, k, v, score_mod=bend, block_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return mixed[0].transpose(0, 1)[:tokens]


def padded_size(tokens: int) -> int:
    """So many tokens and at most a quarter more, or 1,024: kernels are compiled for each size, and packs are of any
    size. What is added is a sequence of its own."""
    step = max(FEWEST // 4, 1 << max(0, (tokens - 1).bit_length() - 3))
    return max(FEWEST, ceil_div(tokens, step) * step)


def block_mask(starts: Tensor, tokens: int, window: int | None) -> BlockMask:
    """Which blocks of keys the blocks of queries of a pack see. Rows see the keys from the start of their sequence, or
    of their window, up to themselves, where those after the last sequence are one more: so the first key of a row never
    lies before that of an earlier row, and the blocks follow from those of the first and last row of each. torch's own
    function evaluates every pair of tokens."""
    from torch.nn.attention.flex_attention import BlockMask  # The import loads torch's compiler.

    places = torch.arange(tokens, device=starts.device)
    first = starts[torch.searchsorted(starts, places, right=True) - 1].long()  # [T]: the first key that a row sees
    if window is not None:
        first = first.maximum(places - window + 1)

    def sees(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return (column >= first[row]) & (column <= row)

    blocks = torch.arange(ceil_div(tokens, BLOCK), device=starts.device)
    begin, end = blocks * BLOCK, (blocks * BLOCK + BLOCK - 1).clamp(max=tokens - 1)
    some = (blocks >= first[begin, None] // BLOCK) & (blocks <= blocks[:, None])  # [blocks of rows, blocks of keys]
    whole = some & (begin >= first[end, None]) & (blocks < blocks[:, None])
    partly, full = (_numbered(one[None, None]) for one in (some & ~whole, whole))
    return BlockMask.from_kv_blocks(*partly, *full, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(tokens, tokens))


def _numbered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(how many blocks of each row are set, their numbers first)."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.int()


@cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return compile_by_size(flex_attention)
