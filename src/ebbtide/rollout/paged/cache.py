"""Keys and values of the tokens that are being decoded, and the attention that reads them, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from ebbtide.policy.attention import refuse_extras
from ebbtide.rollout.paged.schedule import Chunk, Group, Sample

PAGED = "ebbtide_paged"


class Cache:
    """Per layer, `slots` places for the keys and the values of one token each."""

    def __init__(self, layers: int, slots: int, heads: int, channels: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (layers, slots, heads, channels)
        self.keys, self.values = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))


@dataclass(frozen=True)
class Step:
    """One pass through the model: T new tokens of S sequences, end to end."""

    cache: Cache
    tokens: Tensor  # [T]
    positions: Tensor  # [T]: in their sequences
    slots: Tensor  # [T]: where their keys and values go
    queries: Tensor  # [S, Q]: the new tokens of each sequence, by place; T where there is none
    context: Tensor  # [S, L]: the slots of all tokens of each sequence, the new ones among them
    seen: Tensor  # [S, Q, L]: which of them each new token attends to, but for a window


def step_for(work: Sequence[Chunk] | Sequence[Sample], cache: Cache, size: int, device: torch.device) -> Step:
    """What is read or decoded, as tensors."""
    chunks = [item if isinstance(item, Chunk) else Chunk(item, len(item.tokens) - 1, len(item.tokens)) for item in work]
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    contexts: list[list[int]] = []
    lengths: list[int] = []
    for chunk in chunks:
        if isinstance(chunk.of, Group):
            before, own = [], chunk.of.read
        else:
            prompt = chunk.of.group
            before, own = prompt.read.slots(0, len(prompt.prompt), size), chunk.of.own
        new = own.slots(chunk.first, chunk.last, size)
        tokens += chunk.tokens
        positions += range(len(before) + chunk.first, len(before) + chunk.last)
        slots += new
        contexts.append(before + own.slots(0, chunk.first, size) + new)
        lengths.append(len(new))
    queries, place = [], 0
    for length in lengths:
        queries.append([*range(place, place + length), *[len(tokens)] * (max(lengths) - length)])
        place += length
    longest = max(map(len, contexts))
    first = torch.tensor([len(context) - length for context, length in zip(contexts, lengths, strict=True)], device=device)  # [S]
    last_seen = first[:, None, None] + torch.arange(max(lengths), device=device)[:, None]  # [S, Q, 1]
    return Step(
        cache,
        torch.tensor(tokens, device=device),
        torch.tensor(positions, device=device),
        torch.tensor(slots, device=device),
        torch.tensor(queries, device=device),
        torch.tensor([context + [0] * (longest - len(context)) for context in contexts], device=device),
        torch.arange(longest, device=device) <= last_seen,
    )


def paged_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, T, channels]
    key: Tensor,  # [1, kv heads, T, channels]
    value: Tensor,  # [1, kv heads, T, channels]
    attention_mask: None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    *,
    paged_step: Step,
    **_: Any,
) -> tuple[Tensor, None]:
    """Writes the new keys and values, and attends to all of their sequences: [1, T, heads, channels]."""
    refuse_extras(module, softcap, s_aux)
    step, layer = paged_step, int(module.layer_idx)  # type: ignore[arg-type]
    keys, values = step.cache.keys[layer], step.cache.values[layer]
    keys[step.slots] = key[0].transpose(0, 1)
    values[step.slots] = value[0].transpose(0, 1)
    tokens = query[0].transpose(0, 1)  # [T, heads, channels]
    rows = torch.cat([tokens, torch.zeros_like(tokens[:1])])[step.queries]  # [S, Q, heads, channels]
    seen = step.seen
    if sliding_window is not None:
        far = seen.flip(-1).long().cumsum(-1).flip(-1) > sliding_window  # keys that so many later ones stand before
        seen = seen & ~far
    mixed = scaled_dot_product_attention(
        rows.transpose(1, 2),
        keys[step.context].transpose(1, 2),
        values[step.context].transpose(1, 2),
        attn_mask=seen[:, None],
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    ).transpose(1, 2)  # [S, Q, heads, channels]
    return mixed[step.queries < len(tokens)].unsqueeze(0), None


AttentionInterface.register(PAGED, paged_attention)
