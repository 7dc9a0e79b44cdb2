"""What the attention of a layer computes besides a causal softmax: windows, chunks, soft caps and sinks; and attention
of any kind in plain torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True, eq=False)  # Tensors are not compared.
class AttentionKind:
    """What a layer wants of causal attention. By default a token sees itself and all tokens before it."""

    window: int | None = None
    """How many tokens a token sees, including itself (sliding window)."""
    chunk: int | None = None
    """The size of the chunks that a sequence is cut into: a token sees those of its own chunk (Llama 4)."""
    softcap: float | None = None
    """Scores are bent by a tanh, so that none is larger than this (Gemma 2)."""
    sinks: Tensor | None = None
    """[heads]: a score for each head that takes part in the softmax and has no value (gpt-oss)."""

    @property
    def is_plain(self) -> bool:
        """Whether it is a softmax of scores as they are, whatever tokens are seen."""
        return self.softcap is None and self.sinks is None

    @property
    def mask_name(self) -> str:
        """Its mask, in words."""
        window = f" of {self.window} tokens" if self.window is not None else ""
        return f"the causal one{window}" + (f" in chunks of {self.chunk} tokens" if self.chunk is not None else "")

    def within(self, longest: int) -> AttentionKind:
        """The same attention for sequences of at most `longest` tokens: what none of them reaches is left out."""
        window = None if self.window is None or self.window >= longest else self.window
        chunk = None if self.chunk is None or self.chunk >= longest else self.chunk
        return self if (window, chunk) == (self.window, self.chunk) else replace(self, window=window, chunk=chunk)

    def sees(self, position: Tensor, other: Tensor) -> Tensor:
        """Whether a token at `position` sees the one at `other`, for tensors that broadcast."""
        seen = position >= other
        if self.window is not None:
            seen = seen & (position - other < self.window)
        if self.chunk is not None:
            seen = seen & (position // self.chunk == other // self.chunk)
        return seen


PLAIN = AttentionKind()


def attend(
    query: Tensor,  # [S, heads, Q, channels]
    key: Tensor,  # [S, kv heads, L, channels]
    value: Tensor,  # [S, kv heads, L, value channels]
    seen: Tensor | None,  # [..., Q, L], and None for what a causal mask shows
    scale: float | None,
    kind: AttentionKind,
) -> Tensor:
    """Attention in plain torch, with the cap and the sinks of its kind: [S, heads, Q, value channels]."""
    heads, kv_heads = query.shape[1], key.shape[1]
    if kind.is_plain and query.is_cuda and heads != kv_heads and query.shape[-1] > 256:
        # The only kernel for so many channels that does not hold all scores has as many keys as queries.
        key, value = (states.repeat_interleave(heads // kv_heads, 1) for states in (key, value))
        kv_heads = heads
    if kind.is_plain:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=seen, is_causal=seen is None, scale=scale, enable_gqa=heads != kv_heads
        )
    if seen is None:
        place = torch.arange(query.shape[2], device=query.device)
        seen = place[:, None] >= place
    grouped = query.unflatten(1, (kv_heads, heads // kv_heads))  # [S, kv heads, heads of each, Q, channels]
    scores = (grouped @ key.unsqueeze(2).transpose(-1, -2)).flatten(1, 2)  # [S, heads, Q, L]
    kept = torch.promote_types(scores.dtype, torch.float32)
    scores = scores.to(kept) * (scale if scale is not None else query.shape[-1] ** -0.5)
    if kind.softcap is not None:
        scores = (scores / kind.softcap).tanh() * kind.softcap
    scores = scores.masked_fill(~seen, -torch.inf)
    if kind.sinks is not None:
        column = kind.sinks.to(kept)[None, :, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    grouped = weights.to(value.dtype).unflatten(1, (kv_heads, heads // kv_heads))
    mixed: Tensor = grouped @ value.unsqueeze(2)
    return mixed.flatten(1, 2)
