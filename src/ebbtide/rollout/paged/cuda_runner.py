"""The model runner for a GPU: decode replays one CUDA graph for each batch size, lengths and block tables are read from
device memory, and tokens are sampled on the device, where the next step reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor

from ebbtide.model.attention_kernels import TILE
from ebbtide.model.load import decoder, logit_scaling
from ebbtide.model.output_head import head_product
from ebbtide.model.row_adapters import row_adapters
from ebbtide.model.state_layers import StatePass, state_layers
from ebbtide.policy.attention import use_attention
from ebbtide.rollout.engine import SamplingParams
from ebbtide.rollout.paged import sample_kernels
from ebbtide.rollout.paged.attention import PAGED, CacheLayout, KVCache
from ebbtide.rollout.paged.attn_metadata import PassMetadata, PrefillMetadata
from ebbtide.rollout.paged.cache_costs import LOGIT_ROWS_AT_ONCE, SORTED_ROWS_AT_ONCE, CacheSize, graph_batch_size
from ebbtide.rollout.paged.cuda_graphs import needs_host_sync, waits_for_device
from ebbtide.rollout.paged.decode_graph import DecodeGraph, DecodeInputs
from ebbtide.rollout.paged.decode_kernels import MANY, reads_together
from ebbtide.rollout.paged.fused_model import FusedModel, can_fuse
from ebbtide.rollout.paged.runner import PendingTokens, SampleOp
from ebbtide.rollout.paged.scheduler import PrefillChunk, ScheduledSample, Scheduler
from ebbtide.rollout.paged.state_kernels import AddressedSlots
from ebbtide.rollout.paged.state_memory import state_rows
from ebbtide.system.units import ceil_div

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RING = 3  # decode steps whose pinned host buffers are in use at once


class CudaRunner:
    """Its calls return while the tokens are in flight: `PendingTokens.wait` waits for them."""

    def __init__(self, model: PreTrainedModel, layout: CacheLayout, batch: int, block: int) -> None:
        """`layout`: what the layers have in the KV cache."""
        self._model, self._batch, self._block = model, batch, block
        self._device = model.device
        self._layout = layout
        self._scale, self._softcap = logit_scaling(model.config)
        # The newest token of the sample in each row, and one more row for padding.
        self._last_tokens = torch.zeros(batch + 1, dtype=torch.long, device=self._device)
        self._addresses = torch.zeros((1 + max(layout.sources, default=-1), 2), dtype=torch.long, device=self._device)
        self._graphs: dict[tuple[int, int, bool], DecodeGraph] = {}
        self._compiled: set[tuple[int, int, bool]] = set()
        self._pool: Any = None
        self._weights: tuple[int, ...] = ()
        self._widths = (0, 0)
        self._cache: KVCache | None = None
        self._open = ExitStack()
        self._adapters = row_adapters(model)
        self._states = AddressedSlots(layers, self._device) if (layers := state_layers(model).layers) else None
        self._padding_state = 0
        self._fused = FusedModel(model) if can_fuse(model) else None
        if self._fused is not None and not self._fused_matches_model():
            self._fused = None
        self._captures = not needs_host_sync(model)
        self._may_wait = self._fused is None  # the fused blocks' capture is tested

    @property
    def is_fused(self) -> bool:
        """Whether the model runs with the fused blocks of training."""
        return self._fused is not None

    def attach_cache(self, cache: KVCache, prompt_blocks: int, own_blocks: int) -> None:
        self._cache = cache
        self._addresses.copy_(torch.tensor(cache.addresses()))
        if self._states is not None:
            self._padding_state = self._states.attach(cache.states)
        weights = tuple(parameter.data_ptr() for parameter in self._model.parameters())
        widths = (max(prompt_blocks, self._widths[0]), max(own_blocks, self._widths[1]))
        if weights != self._weights or widths != self._widths:  # the captured graphs read other addresses
            self._graphs.clear()
            if widths != self._widths:  # and kernels are compiled for them
                self._compiled.clear()
            self._pool = torch.cuda.graph_pool_handle()
            if self._fused is not None:
                self._fused.fill_tables(sum(widths) * self._block)
            self._weights, self._widths = weights, widths
            most = graph_batch_size(self._batch)
            length = DecodeInputs.length(most, widths)
            self._host_inputs = [torch.zeros(length, dtype=torch.int32, pin_memory=True) for _ in range(RING)]
            self._device_inputs = torch.zeros(length, dtype=torch.int32, device=self._device)
            self._host_results = [torch.zeros(3 * most, pin_memory=True) for _ in range(RING)]
        self._step = 0
        # The admission number and the number of blocks of the sample in each row, as the tables have them.
        self._known = [(0, 0)] * self._batch
        self._prompt_tables = numpy.zeros((self._batch, widths[0]), numpy.int32)
        self._own_tables = numpy.zeros((self._batch, widths[1]), numpy.int32)
        if self._fused is None:
            self._open.enter_context(use_attention(self._model, PAGED))

    def detach_cache(self) -> None:
        self._open.close()
        torch.cuda.current_stream(self._device).synchronize()  # passes in flight still read the cache
        self._cache = None

    @contextmanager
    def probing(self) -> Iterator[None]:
        captures, self._captures = self._captures, False
        try:
            yield
        finally:
            self._captures = captures
            self._graphs.clear()
            self._weights, self._widths = (), (0, 0)  # later tables may be narrower than the probe's

    # Prefill

    def prefill(self, chunks: Sequence[PrefillChunk], ops: Sequence[Sequence[SampleOp]]) -> PendingTokens:
        hidden = self._prefill(chunks)
        last_tokens, end = [], 0
        for chunk, chunk_ops in zip(chunks, ops, strict=True):
            end += chunk.last - chunk.first
            last_tokens += [end - 1] * len(chunk_ops)
        flat = [op for chunk_ops in ops for op in chunk_ops]
        result = torch.empty((3, len(flat)), device=self._device)
        for first in range(0, len(flat), LOGIT_ROWS_AT_ONCE):
            part = flat[first : first + LOGIT_ROWS_AT_ONCE]
            logits = self._logits(hidden[self._to_device(last_tokens[first : first + LOGIT_ROWS_AT_ONCE], torch.long)])
            found = torch.empty((3, len(part)), device=self._device)
            rows = self._to_device([self._row(op.sample) for op in part], torch.int32)
            numbers = numpy.array([op.uniform for op in part])
            coarse = numbers.astype(numpy.float32)
            uniform = self._to_device([*coarse.tolist(), *(numbers - coarse).tolist()], torch.float32)
            temperatures = self._to_device([op.sampling.temperature for op in part], torch.float32)
            scales = self._to_device([self._logit_scale(op.sampling) for op in part], torch.float32)
            cut_by = part if any(_cuts(op.sampling) for op in part) else None
            self._sample(logits, temperatures, scales, uniform, rows, found, cut_by)
            result[:, first : first + len(part)] = found
        return self._pending(flat, result, torch.empty(result.shape, pin_memory=True))

    def _row(self, sample: ScheduledSample) -> int:
        return sample.row if sample.row is not None else self._batch

    def _prefill(self, chunks: Sequence[PrefillChunk]) -> Tensor:
        """Returns the hidden states [T, H] of all tokens of the chunks."""
        size = self._block
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        adapters: list[int] = []
        sequences: list[int] = []
        tiles: list[int] = []
        tables: tuple[list[list[int]], list[list[int]]] = ([], [])
        for number, chunk in enumerate(chunks):
            group = chunk.group
            own = chunk.owner.block_table if isinstance(chunk.owner, ScheduledSample) else None
            start = chunk.first + (len(group.prompt) if own is not None else 0)
            count = chunk.last - chunk.first
            sequences += [len(tokens), count, start, len(group.prompt)]
            for begin in range(0, count, TILE):
                tiles += [number, begin]
            tables[0].append(group.block_table.blocks)
            tables[1].append(own.blocks if own is not None else [])
            tokens += chunk.tokens
            positions += range(start, start + count)
            slots += (own or group.block_table).slots(chunk.first, chunk.last, size)
            adapters += [group.adapter] * count
        padded = []
        for lists in tables:
            width = max(1, *map(len, lists))
            table = [block for row in lists for block in (*row, *[0] * (width - len(row)))]
            padded.append(self._to_device(table, torch.int32).view(-1, width))
        at = self._to_device(positions, torch.long)
        metadata = PrefillMetadata(
            self._addresses,
            self._layout,
            size,
            self._to_device(slots, torch.int32),
            self._to_device(adapters, torch.int32),
            at,
            self._to_device(tiles, torch.int32).view(-1, 2),
            self._to_device(sequences, torch.int32).view(-1, 4),
            *padded,
            states=self._state_pass(chunks),
        )
        return self._forward(self._to_device(tokens, torch.long), at, metadata)

    def _state_pass(self, chunks: Sequence[PrefillChunk]) -> StatePass | None:
        if self._states is None:
            return None
        return StatePass(*state_rows(chunks, lambda values: self._to_device(values, torch.long)), self._states)

    def _to_device(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        """Copies values to the device without waiting for it."""
        return torch.tensor(values, dtype=dtype, pin_memory=True).to(self._device, non_blocking=True)

    # Decode

    def decode(self, ops: Sequence[SampleOp]) -> PendingTokens:
        ops = sorted(ops, key=lambda op: op.sample.group.number)
        size = graph_batch_size(len(ops))
        cut = any(_cuts(op.sampling) for op in ops)
        inputs = DecodeInputs(self._host_inputs[self._step % RING], size, self._widths)
        largest = self._fill(inputs, ops)
        # Groups for which `decode` has the same programs share a graph.
        graph = self._graph(size, 1 if reads_together(largest, self._layout.queries_per_key) else MANY, cut)
        graph.inputs.data.copy_(inputs.data, non_blocking=True)
        if self._captures:
            graph.replay()
        else:
            graph.run()
        if cut:
            given = graph.temperature, graph.scale, graph.uniform, graph.inputs["rows"]
            self._sample(graph.logits, *given, graph.result, ops)
        host = self._host_results[self._step % RING][: 3 * size].view(3, size)
        self._step += 1
        return self._pending(ops, graph.result, host)

    def _fill(self, inputs: DecodeInputs, ops: Sequence[SampleOp]) -> int:
        """Writes the inputs of a decode step. Returns the number of samples of the largest group."""
        count, size, known = len(ops), self._block, self._known
        rows: list[int] = []
        tokens: list[int] = []
        own_lengths: list[int] = []
        own_starts: list[int] = []
        slots: list[int] = []
        firsts: list[int] = []
        groups: list[int] = []
        group = -1
        for place, op in enumerate(ops):
            sample = op.sample
            row, own, blocks = sample.row, sample.block_table.computed, sample.block_table.blocks
            assert row is not None
            if sample.group.number != group:
                group = sample.group.number
                firsts.append(place)
            groups.append(len(firsts) - 1)
            if known[row] != (sample.admission, len(blocks)):
                if known[row][0] != sample.admission:
                    read = sample.group.block_table.blocks
                    self._prompt_tables[row, : len(read)] = read
                self._own_tables[row, : len(blocks)] = blocks
                known[row] = (sample.admission, len(blocks))
            rows.append(row)
            tokens.append(sample.tokens[-1] if len(sample.tokens) == own else -1)  # -1: in flight, read `_last_tokens`
            own_lengths.append(own)
            own_starts.append(len(sample.group.prompt))
            slots.append(blocks[(own - 1) // size] * size + (own - 1) % size)
        where = numpy.array(rows)
        begins = numpy.array(firsts)
        numbers = numpy.array([op.uniform for op in ops])
        values = inputs.numpy(self._padding_state)
        values["rows"][:] = self._batch
        values["rows"][:count] = where
        values["tokens"][:count] = tokens
        values["slots"][:count] = slots
        values["adapters"][:count] = [op.sample.group.adapter for op in ops]
        values["own_lengths"][:count] = own_lengths
        values["own_starts"][:count] = own_starts
        if self._states is not None:
            before, after = zip(*(op.sample.newest_token.states for op in ops), strict=True)
            values["read_states"][:count], values["write_states"][:count] = before, after
        values["firsts"][: len(firsts)] = begins
        values["firsts"][len(firsts) :] = count
        values["prompt_lengths"][: len(firsts)] = values["own_starts"][begins]
        coarse = values["uniform"].view(numpy.float32).reshape(2, -1)
        coarse[0, :count] = numbers
        coarse[1, :count] = numbers - coarse[0, :count]
        values["temperature"].view(numpy.float32)[:count] = [op.sampling.temperature for op in ops]
        values["groups"][:count] = groups
        values["scale"].view(numpy.float32)[:count] = [self._logit_scale(op.sampling) for op in ops]
        values["own_tables"].reshape(-1, self._widths[1])[:count] = self._own_tables[where]
        values["prompt_tables"].reshape(-1, self._widths[0])[: len(firsts)] = self._prompt_tables[where[begins]]
        return int(numpy.diff([*firsts, count]).max())

    def _graph(self, size: int, samples: int, cut: bool) -> DecodeGraph:
        """Returns the graph of a batch of `size` rows and groups of at most `samples` samples, captured once. With
        `cut`, sampling leaves tokens out and is not part of the graph."""
        key = (size, samples, cut)
        if key not in self._graphs:
            padding = DecodeInputs(torch.zeros(len(self._device_inputs), dtype=torch.int32), size, self._widths)
            padding.numpy(self._padding_state)["rows"].fill(self._batch)
            inputs = DecodeInputs(self._device_inputs, size, self._widths)
            metadata = inputs.metadata(self._addresses, self._layout, self._block, samples, self._states)
            sample = None if cut else self._sample
            graph = DecodeGraph(inputs, metadata, self._last_tokens, self._decode_logits, sample)
            if key not in self._compiled:
                graph.warm_up(padding)
                self._compiled.add(key)
            if self._captures and self._may_wait:
                self._captures, self._may_wait = not waits_for_device(graph.run), False
            if self._captures:
                graph.capture(self._pool)
            self._graphs[key] = graph
        return self._graphs[key]

    # Prefill and decode

    def _forward(self, tokens: Tensor, positions: Tensor, metadata: PassMetadata) -> Tensor:
        """Returns the hidden states [T, H]."""
        with self._adapters.chosen(metadata.adapters):
            if self._fused is not None:
                return self._fused(tokens, positions, metadata)
            return self._model_forward(tokens, positions, metadata)

    def _model_forward(self, tokens: Tensor, positions: Tensor, metadata: PassMetadata) -> Tensor:
        hidden = decoder(self._model)(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, paged_pass=metadata
        ).last_hidden_state[0]
        assert isinstance(hidden, Tensor)
        return hidden

    def _decode_logits(self, tokens: Tensor, positions: Tensor, metadata: PassMetadata) -> Tensor:
        """Returns the logits [T, V] of all tokens of a pass."""
        return self._logits(self._forward(tokens, positions, metadata))

    def _logit_scale(self, sampling: SamplingParams) -> float:
        """What logits are multiplied with, as in training; greedy log-probs are at temperature 1."""
        return self._scale / (sampling.temperature or 1.0)

    def _logits(self, hidden: Tensor) -> Tensor:
        return head_product(self._model, hidden)

    def _sample(
        self,
        logits: Tensor,
        temperatures: Tensor,
        scales: Tensor,
        uniform: Tensor,
        rows: Tensor,
        result: Tensor,
        cut_by: Sequence[SampleOp] | None = None,
    ) -> None:
        """Samples a token for each row of logits into `result` [3, B]. `cut_by`: the ops of these rows, where some of
        them leave tokens out by top-k, top-p or min-p."""
        least = None
        if cut_by is not None:
            spare = [SamplingParams(1, 0.0)] * (len(logits) - len(cut_by))
            samplings = [*(op.sampling for op in cut_by), *spare]
            top_k = self._to_device([min(sampling.top_k, logits.shape[1]) for sampling in samplings], torch.int32)
            top_p = self._to_device([sampling.top_p for sampling in samplings], torch.float32)
            min_p = self._to_device([sampling.min_p for sampling in samplings], torch.float32)
            parts = (slice(first, first + SORTED_ROWS_AT_ONCE) for first in range(0, len(logits), SORTED_ROWS_AT_ONCE))
            least = torch.cat(
                [
                    sample_kernels.logit_thresholds(
                        logits[part],
                        temperatures[part],
                        top_k[part],
                        top_p[part],
                        min_p[part],
                        self._scale,
                        self._softcap,
                    )
                    for part in parts
                ]
            )
        sample_kernels.sample_tokens(
            logits, temperatures, scales, least, uniform, rows, self._last_tokens, result, self._scale, self._softcap
        )

    def _pending(self, ops: Sequence[SampleOp], result: Tensor, host: Tensor) -> PendingTokens:
        host.copy_(result, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        count = len(ops)

        def wait() -> tuple[list[int], list[float], list[float]]:
            copied.synchronize()
            return host[0, :count].view(torch.int32).tolist(), host[1, :count].tolist(), host[2, :count].tolist()

        return PendingTokens([op.sample for op in ops], wait)

    @torch.no_grad()
    def _fused_matches_model(self) -> bool:
        """Tells whether the fused blocks compute what the model's own forward does, on a few tokens."""
        scheduler = Scheduler(CacheSize(4 * ceil_div(64, self._block)), self._block, batch=2, chunk=128)
        vocabulary = len(self._model.get_input_embeddings().weight)
        for length, adapter in ((37, self._adapters.count), (5, 0)):
            scheduler.add([7 * index % vocabulary for index in range(length)], [1], adapter)
        chunks = [chunk for chunk in scheduler.schedule() if isinstance(chunk, PrefillChunk)]
        shapes = self._layout.shapes(scheduler.allocator.num_blocks * self._block)
        tensors = [torch.empty(shape, dtype=self._model.dtype, device=self._device) for shape in shapes]
        cache = KVCache(tensors, self._layout)
        self._addresses.copy_(torch.tensor(cache.addresses()))
        by_fused = self._prefill(chunks).float()
        with use_attention(self._model, PAGED):
            fused, self._fused = self._fused, None
            by_model = self._prefill(chunks).float()
            self._fused = fused
        # Rounding adds up over many layers; a block that computes something else is further off.
        tolerance = 0.1 if self._model.dtype != torch.float32 else 1e-3
        return bool((by_fused - by_model).norm() <= tolerance * by_model.norm())


def _cuts(sampling: SamplingParams) -> bool:
    """Tells whether sampling leaves some tokens out, by top-k, top-p or min-p."""
    return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0)
