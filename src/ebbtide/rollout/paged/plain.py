"""Passes through the model in plain torch, for the CPU: the reference of device.py."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from ebbtide.policy.attention import attention
from ebbtide.policy.model import decoder, head_shape, head_weight
from ebbtide.rollout.paged.attention import PAGED, Cache
from ebbtide.rollout.paged.runner import Draw, Drawn
from ebbtide.rollout.paged.schedule import Chunk, Group
from ebbtide.rollout.sampling import choose

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PlainRunner:
    """Computes at once: a step's tokens are known when it returns."""

    def __init__(self, model: PreTrainedModel, block: int) -> None:
        self._model, self._block = model, block
        self._cache: Cache | None = None
        self._last: dict[int | None, int] = {}  # newest token of the sample in each row

    def begin(self, cache: Cache, prompt_blocks: int, own_blocks: int) -> None:
        self._cache = cache

    def end(self) -> None:
        self._cache = None

    def trying(self) -> AbstractContextManager[None]:
        return nullcontext()

    def read(self, chunks: Sequence[Chunk], draws: Sequence[Sequence[Draw]]) -> Drawn:
        hidden = self._forward(chunks, [token for chunk in chunks for token in chunk.tokens])
        rows, place = [], 0
        for chunk, mine in zip(chunks, draws, strict=True):
            place += chunk.last - chunk.first
            rows += [place - 1] * len(mine)
        return self._drawn(hidden[torch.tensor(rows, dtype=torch.long, device=hidden.device)], [draw for mine in draws for draw in mine])

    def decode(self, draws: Sequence[Draw]) -> Drawn:
        samples = [draw.sample for draw in draws]
        tokens = [sample.tokens[-1] if len(sample.tokens) == sample.own.computed else self._last[sample.row] for sample in samples]
        return self._drawn(
            self._forward([Chunk(sample, sample.own.computed - 1, sample.own.computed) for sample in samples], tokens), draws
        )

    def _forward(self, chunks: Sequence[Chunk], tokens: Sequence[int]) -> Tensor:
        """Hidden states [T, H]."""
        assert self._cache is not None
        one = _Pass(chunks, self._cache, self._block, self._model.device)
        with attention(self._model, PAGED):
            found = decoder(self._model)(
                input_ids=torch.tensor([tokens], device=self._model.device),
                position_ids=one.positions[None],
                use_cache=False,
                paged_pass=one,
            ).last_hidden_state[0]
        assert isinstance(found, Tensor)
        return found

    def _drawn(self, hidden: Tensor, draws: Sequence[Draw]) -> Drawn:
        weight, bias = head_weight(self._model)
        scale, softcap = head_shape(self._model.config)
        logits = linear(hidden, weight, bias).float()
        if softcap is not None:
            logits = (logits / softcap).tanh() * softcap
        logits = logits * scale
        found = [torch.zeros(len(draws), dtype=dtype) for dtype in (torch.long, torch.float32, torch.float32)]
        for sampling in {draw.sampling for draw in draws}:
            rows = torch.tensor([row for row, draw in enumerate(draws) if draw.sampling == sampling])
            uniform = torch.tensor([draws[row].uniform for row in rows.tolist()], dtype=torch.float64, device=hidden.device)
            for values, chosen in zip(found, choose(logits[rows.to(hidden.device)], uniform, sampling), strict=True):
                values[rows] = chosen.cpu()
        tokens, logprobs, plain = (values.tolist() for values in found)
        self._last |= {draw.sample.row: token for draw, token in zip(draws, tokens, strict=True)}
        return Drawn([draw.sample for draw in draws], lambda: (tokens, logprobs, plain))


class _Pass:
    """T new tokens of S sequences, end to end."""

    def __init__(self, chunks: Sequence[Chunk], cache: Cache, size: int, device: torch.device) -> None:
        self._cache = cache
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
            positions += range(len(before) + chunk.first, len(before) + chunk.last)
            slots += new
            contexts.append(before + own.slots(0, chunk.first, size) + new)
            lengths.append(len(new))
        queries, place = [], 0
        for length in lengths:
            queries.append([*range(place, place + length), *[len(slots)] * (max(lengths) - length)])
            place += length
        longest = max(map(len, contexts))
        first = torch.tensor([len(context) - length for context, length in zip(contexts, lengths, strict=True)], device=device)  # [S]
        last_seen = first[:, None, None] + torch.arange(max(lengths), device=device)[:, None]  # [S, Q, 1]
        self.positions = torch.tensor(positions, device=device)  # [T]
        self._slots = torch.tensor(slots, device=device)  # [T]: where their keys and values go
        self._queries = torch.tensor(queries, device=device)  # [S, Q]: the new tokens of each sequence, by place; T where there is none
        self._context = torch.tensor(  # [S, L]: the slots of all tokens of each sequence, the new ones among them
            [context + [0] * (longest - len(context)) for context in contexts], device=device
        )
        self._seen = (
            torch.arange(longest, device=device) <= last_seen
        )  # [S, Q, L]: which of them each new token attends to, but for a window

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        keys, values = self._cache.layers[layer]
        keys[self._slots] = key
        values[self._slots] = value
        rows = torch.cat([query, torch.zeros_like(query[:1])])[self._queries]  # [S, Q, heads, channels]
        seen = self._seen
        if window is not None:
            seen = seen & (seen.flip(-1).long().cumsum(-1).flip(-1) <= window)  # but for keys that so many later ones stand before
        mixed = scaled_dot_product_attention(
            rows.transpose(1, 2),
            keys[self._context].transpose(1, 2),
            values[self._context].transpose(1, 2),
            attn_mask=seen[:, None],
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        ).transpose(1, 2)  # [S, Q, heads, channels]
        return mixed[self._queries < len(query)]
