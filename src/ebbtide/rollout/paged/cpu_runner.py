"""The model runner for the CPU, in plain torch: the reference that cuda_runner.py is tested against."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ebbtide.model.attention_kind import AttentionKind, attend
from ebbtide.model.load import decoder, logit_scaling
from ebbtide.model.output_head import head_product
from ebbtide.model.row_adapters import row_adapters
from ebbtide.model.state_layers import StatePass, TensorSlots
from ebbtide.policy.attention import use_attention
from ebbtide.rollout.paged.attention import PAGED, KVCache
from ebbtide.rollout.paged.runner import PendingTokens, SampleOp
from ebbtide.rollout.paged.scheduler import PrefillChunk, PromptGroup
from ebbtide.rollout.paged.state_memory import state_rows
from ebbtide.rollout.sampling import sample_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class CpuRunner:
    """Its calls are synchronous: a step's tokens are known when they return."""

    is_fused = False

    def __init__(self, model: PreTrainedModel, block: int) -> None:
        self._model, self._block = model, block
        self._adapters = row_adapters(model)
        self._cache: KVCache | None = None
        self._last: dict[int | None, int] = {}  # the newest token of the sample in each row

    def attach_cache(self, cache: KVCache, prompt_blocks: int, own_blocks: int) -> None:
        self._cache = cache

    def detach_cache(self) -> None:
        self._cache = None

    def probing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def prefill(self, chunks: Sequence[PrefillChunk], ops: Sequence[Sequence[SampleOp]]) -> PendingTokens:
        hidden = self._forward(chunks, [token for chunk in chunks for token in chunk.tokens])
        last_tokens, end = [], 0
        for chunk, chunk_ops in zip(chunks, ops, strict=True):
            end += chunk.last - chunk.first
            last_tokens += [end - 1] * len(chunk_ops)
        return self._sample(
            hidden[torch.tensor(last_tokens, dtype=torch.long, device=hidden.device)],
            [op for chunk_ops in ops for op in chunk_ops],
        )

    def decode(self, ops: Sequence[SampleOp]) -> PendingTokens:
        samples = [op.sample for op in ops]
        tokens = [
            sample.tokens[-1] if len(sample.tokens) == sample.block_table.computed else self._last[sample.row]
            for sample in samples
        ]
        return self._sample(
            self._forward(
                [sample.newest_token for sample in samples],
                tokens,
            ),
            ops,
        )

    def _forward(self, chunks: Sequence[PrefillChunk], tokens: Sequence[int]) -> Tensor:
        """Returns the hidden states [T, H]."""
        assert self._cache is not None
        states_pass = self._state_pass(chunks) if self._cache.states else None
        metadata = _Pass(chunks, self._cache, self._block, self._model.device, states_pass)
        with use_attention(self._model, PAGED), self._adapters.chosen(metadata.adapters):
            hidden = decoder(self._model)(
                input_ids=torch.tensor([tokens], device=self._model.device),
                position_ids=metadata.positions()[None],
                use_cache=False,
                paged_pass=metadata,
            ).last_hidden_state[0]
        assert isinstance(hidden, Tensor)
        return hidden

    def _state_pass(self, chunks: Sequence[PrefillChunk]) -> StatePass:
        assert self._cache is not None
        rows, order = state_rows(chunks, lambda values: torch.tensor(values, device=self._model.device))
        return StatePass(rows, order, TensorSlots(self._cache.states))

    def _sample(self, hidden: Tensor, ops: Sequence[SampleOp]) -> PendingTokens:
        scale, softcap = logit_scaling(self._model.config)
        logits = head_product(self._model, hidden).float()
        if softcap is not None:
            logits = (logits / softcap).tanh() * softcap
        logits = logits * scale
        found = [torch.zeros(len(ops), dtype=dtype) for dtype in (torch.long, torch.float32, torch.float32)]
        for sampling in {op.sampling for op in ops}:
            rows = torch.tensor([row for row, op in enumerate(ops) if op.sampling == sampling])
            uniform = torch.tensor(
                [ops[row].uniform for row in rows.tolist()], dtype=torch.float64, device=hidden.device
            )
            for values, chosen in zip(
                found, sample_tokens(logits[rows.to(hidden.device)], uniform, sampling), strict=True
            ):
                values[rows] = chosen.cpu()
        tokens, logprobs, plain = (values.tolist() for values in found)
        self._last |= {op.sample.row: token for op, token in zip(ops, tokens, strict=True)}
        return PendingTokens([op.sample for op in ops], lambda: (tokens, logprobs, plain))


class _Pass:
    """The attention metadata of one pass: T new tokens of S sequences, one after the other."""

    def __init__(
        self,
        chunks: Sequence[PrefillChunk],
        cache: KVCache,
        size: int,
        device: torch.device,
        states: StatePass | None,
    ) -> None:
        self._cache, self.states = cache, states
        positions: list[int] = []
        slots: list[int] = []
        contexts: list[list[int]] = []
        lengths: list[int] = []
        adapters: list[int] = []
        for chunk in chunks:
            if isinstance(chunk.owner, PromptGroup):
                before, own = [], chunk.owner.block_table
            else:
                prompt = chunk.owner.group
                before, own = prompt.block_table.slots(0, len(prompt.prompt), size), chunk.owner.block_table
            new = own.slots(chunk.first, chunk.last, size)
            positions += range(len(before) + chunk.first, len(before) + chunk.last)
            slots += new
            contexts.append(before + own.slots(0, chunk.first, size) + new)
            lengths.append(len(new))
            adapters += [chunk.group.adapter] * len(new)
        queries, start = [], 0
        for length in lengths:
            queries.append([*range(start, start + length), *[len(slots)] * (max(lengths) - length)])
            start += length
        longest = max(map(len, contexts))
        # [S]: the position of each sequence's first new token
        first = torch.tensor(
            [len(context) - length for context, length in zip(contexts, lengths, strict=True)], device=device
        )
        self._positions = torch.tensor(positions, device=device)  # [T]
        self.adapters = torch.tensor(adapters, device=device)  # [T]
        self._slots = torch.tensor(slots, device=device)  # [T]: where the new keys and values are written
        # [S, Q]: the indices of each sequence's new tokens, padded with T
        self._queries = torch.tensor(queries, device=device)
        # [S, L]: the slots of all tokens of each sequence, the new ones among them
        self._context = torch.tensor([context + [0] * (longest - len(context)) for context in contexts], device=device)
        # [S, Q, 1] and [L]: the positions of the new tokens and of all tokens
        self._last_seen = first[:, None, None] + torch.arange(max(lengths), device=device)[:, None]
        self._column = torch.arange(longest, device=device)

    def positions(self) -> Tensor:
        return self._positions

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, kind: AttentionKind
    ) -> Tensor:
        keys, values = self._cache.layers[layer]
        if layer in self._cache.layout.own:
            keys[self._slots] = key
            values[self._slots] = value
        rows = torch.cat([query, torch.zeros_like(query[:1])])[self._queries]  # [S, Q, heads, channels]
        mixed = attend(
            rows.transpose(1, 2),
            keys[self._context].transpose(1, 2),
            values[self._context].transpose(1, 2),
            kind.sees(self._last_seen, self._column)[:, None],
            scale,
            kind,
        ).transpose(1, 2)  # [S, Q, heads, value channels]
        return mixed[self._queries < len(query)]
