"""Passes through the model on a GPU: decoding as one CUDA graph for each size of batch, lengths and tables in device memory, tokens drawn where they are next needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor
from torch.nn.functional import linear

from ebbtide.policy.attention import attention
from ebbtide.policy.model import decoder, head_shape, head_weight
from ebbtide.rollout.engine import Sampling
from ebbtide.rollout.paged import sample_kernels
from ebbtide.rollout.paged.attention import PAGED, Cache, room_of
from ebbtide.rollout.paged.attention_kernels import TILE
from ebbtide.rollout.paged.capture import needs_host, uncollected
from ebbtide.rollout.paged.device_pass import Decoding, DevicePass, Reading
from ebbtide.rollout.paged.lean import LeanModel, lean_shape
from ebbtide.rollout.paged.room import DRAWN_AT_ONCE, ROWS_CUT_AT_ONCE, size_for
from ebbtide.rollout.paged.runner import Draw, Drawn
from ebbtide.rollout.paged.schedule import Blocks, Chunk, Group, Sample, Schedule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RING = 3  # steps whose host memory is in use at once


class DeviceRunner:
    """Tokens are under way when it returns: `Drawn.wait` waits for them."""

    def __init__(self, model: PreTrainedModel, batch: int, block: int) -> None:
        self._model, self._batch, self._block = model, batch, block
        self._device = model.device
        self._room = room_of(model.config)
        self._scale, self._softcap = head_shape(model.config)
        # The newest token of the sample in each row; a spare row for padding.
        self._last = torch.zeros(batch + 1, dtype=torch.long, device=self._device)
        self._addresses = torch.zeros((self._room.layers, 2), dtype=torch.long, device=self._device)
        self._graphs: dict[tuple[int, int, bool], _Graph] = {}
        self._pool: Any = None
        self._weights: tuple[int, ...] = ()
        self._widths = (0, 0)
        self._cache: Cache | None = None
        self._open = ExitStack()
        self._lean: LeanModel | None = None
        if lean_shape(model):
            self._lean = LeanModel(model)
            if not self._lean_is_right():
                self._lean = None
        self._captures = not needs_host(model, known=self._lean is not None)

    @property
    def fused(self) -> bool:
        """Whether the model's blocks run with what lies between their matrices fused."""
        return self._lean is not None

    def begin(self, cache: Cache, prompt_blocks: int, own_blocks: int) -> None:
        self._cache = cache
        self._addresses.copy_(torch.tensor([[keys.data_ptr(), values.data_ptr()] for keys, values in cache.layers]))
        weights = tuple(parameter.data_ptr() for parameter in self._model.parameters())
        widths = (max(prompt_blocks, self._widths[0]), max(own_blocks, self._widths[1]))
        if weights != self._weights or widths != self._widths:  # what was captured reads elsewhere
            self._graphs.clear()
            self._pool = torch.cuda.graph_pool_handle()
            self._weights, self._widths = weights, widths
            most = size_for(self._batch)
            length = sum(-(-count // 4) * 4 for count in _fields(most, widths).values())
            self._hosts = [torch.zeros(length, dtype=torch.int32, pin_memory=True) for _ in range(RING)]
            self._on_device = torch.zeros(length, dtype=torch.int32, device=self._device)
            self._results = [torch.zeros(3 * most, pin_memory=True) for _ in range(RING)]
        self._turn = 0
        self._known = [(0, 0)] * self._batch  # admission and blocks of the sample in each row, as the tables have them
        self._prompt_tables = numpy.zeros((self._batch, widths[0]), numpy.int32)
        self._own_tables = numpy.zeros((self._batch, widths[1]), numpy.int32)
        if self._lean is None:
            self._open.enter_context(attention(self._model, PAGED))

    def end(self) -> None:
        self._open.close()
        torch.cuda.current_stream(self._device).synchronize()  # what is under way still reads the cache
        self._cache = None

    @contextmanager
    def trying(self) -> Iterator[None]:
        captures, self._captures = self._captures, False
        try:
            yield
        finally:
            self._captures = captures
            self._graphs.clear()
            self._weights, self._widths = (), (0, 0)  # all is made anew for what comes, which may be shorter

    # Reading

    def read(self, chunks: Sequence[Chunk], draws: Sequence[Sequence[Draw]]) -> Drawn:
        hidden = self._read(chunks)
        places, place = [], 0
        for chunk, mine in zip(chunks, draws, strict=True):
            place += chunk.last - chunk.first
            places += [place - 1] * len(mine)
        flat = [draw for mine in draws for draw in mine]
        result = torch.empty((3, len(flat)), device=self._device)
        for first in range(0, len(flat), DRAWN_AT_ONCE):
            part = flat[first : first + DRAWN_AT_ONCE]
            logits = self._logits(hidden[self._sent(places[first : first + DRAWN_AT_ONCE], torch.long)])
            found = torch.empty((3, len(part)), device=self._device)
            rows = self._sent([self._row(draw.sample) for draw in part], torch.int32)
            numbers = numpy.array([draw.uniform for draw in part])
            coarse = numbers.astype(numpy.float32)
            uniform = self._sent([*coarse.tolist(), *(numbers - coarse).tolist()], torch.float32)
            temperatures = self._sent([draw.sampling.temperature for draw in part], torch.float32)
            self._pick(logits, temperatures, uniform, rows, found, part if any(_cuts(draw.sampling) for draw in part) else None)
            result[:, first : first + len(part)] = found
        return self._under_way(flat, result, torch.empty(result.shape, pin_memory=True))

    def _row(self, sample: Sample) -> int:
        return sample.row if sample.row is not None else self._batch

    def _read(self, chunks: Sequence[Chunk]) -> Tensor:
        """Hidden states [T, H]."""
        size = self._block
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        sequences: list[int] = []
        tiles: list[int] = []
        tables: tuple[list[list[int]], list[list[int]]] = ([], [])
        for number, chunk in enumerate(chunks):
            group = chunk.of if isinstance(chunk.of, Group) else chunk.of.group
            own = chunk.of.own if isinstance(chunk.of, Sample) else None
            start = chunk.first + (len(group.prompt) if own is not None else 0)
            count = chunk.last - chunk.first
            sequences += [len(tokens), count, start, len(group.prompt)]
            for begin in range(0, count, TILE):
                tiles += [number, begin]
            tables[0].append(group.read.blocks)
            tables[1].append(own.blocks if own is not None else [])
            tokens += chunk.tokens
            positions += range(start, start + count)
            slots += (own or group.read).slots(chunk.first, chunk.last, size)
        padded = []
        for lists in tables:
            width = max(1, *map(len, lists))
            padded.append(self._sent([block for row in lists for block in (*row, *[0] * (width - len(row)))], torch.int32).view(-1, width))
        one = Reading(
            self._addresses,
            self._room.heads,
            size,
            self._sent(slots, torch.int32),
            self._sent(tiles, torch.int32).view(-1, 2),
            self._sent(sequences, torch.int32).view(-1, 4),
            *padded,
        )
        return self._forward(self._sent(tokens, torch.long), self._sent(positions, torch.long), one)

    def _sent(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, pin_memory=True).to(self._device, non_blocking=True)

    # Decoding

    def decode(self, draws: Sequence[Draw]) -> Drawn:
        draws = sorted(draws, key=lambda draw: draw.sample.group.number)
        size = size_for(len(draws))
        cut = any(_cuts(draw.sampling) for draw in draws)
        ticket = _Ticket(self._hosts[self._turn % RING], size, self._widths)
        largest = self._fill(ticket, draws)
        graph = self._graph(size, min(16, 1 << (largest - 1).bit_length()), cut)  # groups of like size share one
        graph.ticket.data.copy_(ticket.data, non_blocking=True)
        if self._captures:
            graph.graph.replay()
        else:
            graph.run()
        if cut:
            self._pick(graph.logits, graph.temperature, graph.uniform, graph.ticket["rows"], graph.result, draws)
        host = self._results[self._turn % RING][: 3 * size].view(3, size)
        self._turn += 1
        return self._under_way(draws, graph.result, host)

    def _fill(self, ticket: _Ticket, draws: Sequence[Draw]) -> int:
        """Writes what a step needs to know; the size of the largest group."""
        count, size, known = len(draws), self._block, self._known
        rows: list[int] = []
        tokens: list[int] = []
        own_lengths: list[int] = []
        own_starts: list[int] = []
        slots: list[int] = []
        firsts: list[int] = []
        group = -1
        for place, draw in enumerate(draws):
            sample = draw.sample
            row, own, blocks = sample.row, sample.own.computed, sample.own.blocks
            assert row is not None
            if sample.group.number != group:
                group = sample.group.number
                firsts.append(place)
            if known[row] != (sample.admission, len(blocks)):
                if known[row][0] != sample.admission:
                    read = sample.group.read.blocks
                    self._prompt_tables[row, : len(read)] = read
                self._own_tables[row, : len(blocks)] = blocks
                known[row] = (sample.admission, len(blocks))
            rows.append(row)
            tokens.append(sample.tokens[-1] if len(sample.tokens) == own else -1)  # else it is under way, and in `last`
            own_lengths.append(own)
            own_starts.append(len(sample.group.prompt))
            slots.append(blocks[(own - 1) // size] * size + (own - 1) % size)
        where = numpy.array(rows)
        begins = numpy.array(firsts)
        numbers = numpy.array([draw.uniform for draw in draws])
        values = ticket.numpy()
        values["rows"][:] = self._batch
        values["rows"][:count] = where
        values["tokens"][:count] = tokens
        values["slots"][:count] = slots
        values["own_lengths"][:count] = own_lengths
        values["own_starts"][:count] = own_starts
        values["firsts"][: len(firsts)] = begins
        values["firsts"][len(firsts) :] = count
        values["prompt_lengths"][: len(firsts)] = values["own_starts"][begins]
        coarse = values["uniform"].view(numpy.float32).reshape(2, -1)
        coarse[0, :count] = numbers
        coarse[1, :count] = numbers - coarse[0, :count]
        values["temperature"].view(numpy.float32)[:count] = [draw.sampling.temperature for draw in draws]
        values["own_tables"].reshape(-1, self._widths[1])[:count] = self._own_tables[where]
        values["prompt_tables"].reshape(-1, self._widths[0])[: len(firsts)] = self._prompt_tables[where[begins]]
        return int(numpy.diff([*firsts, count]).max())

    def _graph(self, size: int, samples: int, cut: bool) -> _Graph:
        key = (size, samples, cut)
        if key not in self._graphs:
            padding = _Ticket(torch.zeros(len(self._on_device), dtype=torch.int32), size, self._widths)
            padding.numpy()["rows"].fill(self._batch)
            graph = _Graph(self, _Ticket(self._on_device, size, self._widths), samples, cut)
            graph.ticket.data.copy_(padding.data)
            graph.run()  # compiles and warms up, on padding alone
            if self._captures:
                torch.cuda.current_stream(self._device).synchronize()
                with uncollected(), torch.cuda.graph(graph.graph, pool=self._pool):
                    graph.run()
            self._graphs[key] = graph
        return self._graphs[key]

    # Both

    def _forward(self, tokens: Tensor, positions: Tensor, one: DevicePass) -> Tensor:
        """Hidden states [T, H]."""
        return self._lean(tokens, positions, one) if self._lean is not None else self._whole(tokens, positions, one)

    def _whole(self, tokens: Tensor, positions: Tensor, one: DevicePass) -> Tensor:
        found = decoder(self._model)(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, paged_pass=one
        ).last_hidden_state[0]
        assert isinstance(found, Tensor)
        return found

    def _logits(self, hidden: Tensor) -> Tensor:
        weight, bias = head_weight(self._model)
        return linear(hidden, weight, bias)

    def _pick(
        self, logits: Tensor, temperatures: Tensor, uniform: Tensor, rows: Tensor, result: Tensor, cut_by: Sequence[Draw] | None
    ) -> None:
        least = None
        if cut_by is not None:
            spare = [Sampling(1, 0.0)] * (len(logits) - len(cut_by))
            samplings = [*(draw.sampling for draw in cut_by), *spare]
            top_k = self._sent([min(sampling.top_k, logits.shape[1]) for sampling in samplings], torch.int32)
            top_p = self._sent([sampling.top_p for sampling in samplings], torch.float32)
            min_p = self._sent([sampling.min_p for sampling in samplings], torch.float32)
            parts = (slice(first, first + ROWS_CUT_AT_ONCE) for first in range(0, len(logits), ROWS_CUT_AT_ONCE))
            least = torch.cat(
                [
                    sample_kernels.bounds(
                        logits[part], temperatures[part], top_k[part], top_p[part], min_p[part], self._scale, self._softcap
                    )
                    for part in parts
                ]
            )
        sample_kernels.pick(logits, temperatures, least, uniform, rows, self._last, result, self._scale, self._softcap)

    def _under_way(self, draws: Sequence[Draw], result: Tensor, host: Tensor) -> Drawn:
        host.copy_(result, non_blocking=True)
        there = torch.cuda.Event()
        there.record()
        count = len(draws)

        def wait() -> tuple[list[int], list[float], list[float]]:
            there.synchronize()
            return host[0, :count].view(torch.int32).tolist(), host[1, :count].tolist(), host[2, :count].tolist()

        return Drawn([draw.sample for draw in draws], wait)

    @torch.no_grad()
    def _lean_is_right(self) -> bool:
        """Whether the fused blocks do what the model's own forward does, on a few tokens."""
        schedule = Schedule(Blocks(4 * -(-64 // self._block)), self._block, batch=2, chunk=128)
        vocabulary = len(self._model.get_input_embeddings().weight)
        for length in (37, 5):
            schedule.add([7 * place % vocabulary for place in range(length)], [1])
        chunks = [chunk for chunk in schedule.next() if isinstance(chunk, Chunk)]
        weight = next(self._model.parameters())
        shape = (schedule.blocks.count * self._block, self._room.heads, self._room.channels)
        cache = Cache([torch.empty(shape, dtype=weight.dtype, device=self._device) for _ in range(2 * self._room.layers)])
        self._addresses.copy_(torch.tensor([[keys.data_ptr(), values.data_ptr()] for keys, values in cache.layers]))
        lean = self._read(chunks).float()
        with attention(self._model, PAGED):
            fused, self._lean = self._lean, None
            whole = self._read(chunks).float()
            self._lean = fused
        near = 0.1 if weight.dtype != torch.float32 else 1e-3  # rounding adds up over many layers; another function is further off
        return bool((lean - whole).norm() <= near * whole.norm())


class _Graph:
    """One decoding step for a size of batch: reads its ticket, writes its result."""

    def __init__(self, runner: DeviceRunner, ticket: _Ticket, samples: int, cut: bool) -> None:
        size = ticket.rows
        self._runner, self.ticket, self._cut = runner, ticket, cut
        self.graph = torch.cuda.CUDAGraph()
        self.result = torch.zeros((3, size), device=runner._device)
        self.temperature = ticket["temperature"].view(torch.float32)
        self.uniform = ticket["uniform"].view(torch.float32).view(2, size)
        self._pass = Decoding(
            runner._addresses,
            runner._room.heads,
            runner._block,
            ticket["slots"],
            ticket["firsts"],
            ticket["prompt_tables"].view(size, -1),
            ticket["prompt_lengths"],
            ticket["own_tables"].view(size, -1),
            ticket["own_lengths"],
            ticket["own_starts"],
            samples,
        )
        self.logits: Tensor

    def run(self) -> None:
        runner, ticket = self._runner, self.ticket
        given = ticket["tokens"].long()
        tokens = torch.where(given >= 0, given, runner._last[ticket["rows"].long()])
        positions = (ticket["own_starts"] + ticket["own_lengths"] - 1).clamp(min=0).long()
        logits = runner._logits(runner._forward(tokens, positions, self._pass))
        if self._cut:
            self.logits = logits  # drawn from outside the graph
        else:
            runner._pick(logits, self.temperature, self.uniform, ticket["rows"], self.result, None)


class _Ticket:
    """What a decoding step needs to know, as named stretches of one int32 tensor: filled on the host, sent in one copy, read by a graph."""

    def __init__(self, whole: Tensor, rows: int, widths: tuple[int, int]) -> None:
        self.rows = rows
        self._stretches: dict[str, Tensor] = {}
        place = 0
        for name, count in _fields(rows, widths).items():
            self._stretches[name] = whole[place : place + count]
            place += -(-count // 4) * 4  # so that each is aligned
        self.data = whole[:place]

    def __getitem__(self, name: str) -> Tensor:
        return self._stretches[name]

    def numpy(self) -> dict[str, Any]:
        """On the host: the stretches, as rows of padding, which reads and writes nothing."""
        found = {name: stretch.numpy() for name, stretch in self._stretches.items()}
        for name, value in (("tokens", 0), ("slots", -1), ("own_lengths", 0), ("own_starts", 0), ("prompt_lengths", 0), ("temperature", 0)):
            found[name].fill(value)
        return found


def _fields(rows: int, widths: tuple[int, int]) -> dict[str, int]:
    once = ("rows", "tokens", "slots", "own_lengths", "own_starts", "prompt_lengths", "temperature")
    tables = {"prompt_tables": rows * widths[0], "own_tables": rows * widths[1]}
    return {**dict.fromkeys(once, rows), "uniform": 2 * rows, "firsts": rows + 1, **tables}


def _cuts(sampling: Sampling) -> bool:
    return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0)
