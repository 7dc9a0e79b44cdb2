"""What is computed next: which prompts are read, which samples decode, and who gives way when blocks run out. No torch.

The cache is cut into blocks of so many tokens. A prompt's keys and values lie in blocks of its own, computed once for all samples of its group; each sample has
blocks for the tokens it adds. When blocks run out, the sample that began last gives its blocks back and is read again later, from its tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


class Blocks:
    """Which blocks of the cache are free."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        assert count <= len(self._free)
        return [self._free.pop() for _ in range(count)]

    def give_back(self, blocks: list[int]) -> None:
        self._free += reversed(blocks)
        blocks.clear()


@dataclass(eq=False)
class Stretch:
    """Tokens whose keys and values are in the cache, or will be: those before `computed` are."""

    blocks: list[int] = field(default_factory=list)
    computed: int = 0

    def slots(self, first: int, last: int, size: int) -> list[int]:
        """Where in the cache its tokens `first` to `last` lie."""
        return [self.blocks[place // size] * size + place % size for place in range(first, last)]


@dataclass(eq=False)
class Group:
    """A prompt and its samples."""

    number: int
    prompt: Sequence[int]
    samples: list[Sample] = field(default_factory=list)
    read: Stretch = field(default_factory=Stretch)

    @property
    def is_read(self) -> bool:
        return self.read.computed == len(self.prompt)


@dataclass(eq=False)
class Sample:
    number: int
    group: Group
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    own: Stretch = field(default_factory=Stretch)
    """Of its own tokens. The last of them is never computed: it is the next step's input."""
    runs: bool = False
    done: bool = False


@dataclass(frozen=True)
class Chunk:
    """Tokens `first` to `last` of a prompt, or of a sample's own, that are read in one go."""

    of: Group | Sample
    first: int
    last: int

    @property
    def tokens(self) -> Sequence[int]:
        return (self.of.prompt if isinstance(self.of, Group) else self.of.tokens)[self.first : self.last]


class Schedule:
    """`next()` gives what to compute; `advance()` and `sampled()` are told what came of it."""

    def __init__(self, prompts: Iterable[tuple[Sequence[int], int]], blocks: Blocks, size: int, *, batch: int, chunk: int) -> None:
        """For each prompt, how many samples; `batch` samples at most decode at once, `chunk` tokens at most are read in one go."""
        self.blocks, self._size, self._batch, self._chunk = blocks, size, batch, chunk
        self.groups: list[Group] = []
        self.samples: list[Sample] = []
        for number, (prompt, count) in enumerate(prompts):
            group = Group(number, prompt)
            group.samples = [Sample(len(self.samples) + i, group) for i in range(count)]
            self.groups.append(group)
            self.samples += group.samples
        self._waiting: deque[Sample] = deque(self.samples)
        self._running: list[Sample] = []
        self.preempted = 0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def finished(self) -> bool:
        return not self._waiting and not self._running

    def next(self) -> list[Chunk] | list[Sample]:
        """Chunks to read, or samples to decode by one token each."""
        self._admit()
        chunks = self._chunks()
        return chunks or self._decoding()

    def advance(self, chunk: Chunk) -> bool:
        """A chunk's keys and values are in the cache; whether that completes a prompt that samples wait for."""
        stretch = chunk.of.read if isinstance(chunk.of, Group) else chunk.of.own
        stretch.computed = chunk.last
        return isinstance(chunk.of, Group) and chunk.of.is_read

    def sampled(self, sample: Sample, token: int, logprob: float, *, done: bool) -> None:
        """A sample's next token; with it the token before it is in the cache, unless it is the first."""
        sample.own.computed = len(sample.tokens)
        sample.tokens.append(token)
        sample.logprobs.append(logprob)
        if done:
            self.cancel(sample)

    def cancel(self, sample: Sample) -> None:
        """It is over, wherever it was."""
        sample.done = True
        (self._running if sample.runs else self._waiting).remove(sample)
        self._let_go(sample)

    # Who runs

    def _admit(self) -> None:
        """Samples that wait begin, in order, while there is room for what they need now and one more block for each that runs."""
        while self._waiting and len(self._running) < self._batch:
            sample = self._waiting[0]
            group = sample.group
            prompt = 0 if group.read.blocks else self._needed(len(group.prompt))
            own = self._needed(max(1, len(sample.tokens)))
            if prompt + own + len(self._running) > self.blocks.free:
                return
            if prompt:
                group.read.blocks = self.blocks.take(prompt)
            sample.own.blocks = self.blocks.take(own)
            sample.runs = True
            self._running.append(self._waiting.popleft())

    def _chunks(self) -> list[Chunk]:
        """What must be read before those that run can decode: prompts, and the own tokens of samples that had given way."""
        found, room = [], self._chunk
        seen: set[int] = set()
        for sample in self._running:
            group = sample.group
            if not group.is_read:
                if group.number not in seen and room:
                    seen.add(group.number)
                    last = min(len(group.prompt), group.read.computed + room)
                    found.append(Chunk(group, group.read.computed, last))
                    room -= last - group.read.computed
            elif room and sample.own.computed < len(sample.tokens) - 1:
                last = min(len(sample.tokens) - 1, sample.own.computed + room)
                found.append(Chunk(sample, sample.own.computed, last))
                room -= last - sample.own.computed
        return found

    def _decoding(self) -> list[Sample]:
        """Those that run, each with a place for its last token; the ones that began last give way to the others."""
        ready = []
        for sample in list(self._running):
            while sample.runs and len(sample.own.blocks) < self._needed(len(sample.tokens)):
                if self.blocks.free:
                    sample.own.blocks += self.blocks.take(1)
                else:
                    self._preempt()
            ready.append(sample)
        return [sample for sample in ready if sample.runs]

    def _preempt(self) -> None:
        """The sample that began last gives its blocks back and waits: it may be the very one that wants some."""
        last = self._running.pop()
        self.preempted += 1
        self._let_go(last)
        self._waiting.appendleft(last)

    def _let_go(self, sample: Sample) -> None:
        """Its blocks, and its prompt's once nobody who runs reads them."""
        self.blocks.give_back(sample.own.blocks)
        sample.own.computed, sample.runs = 0, False
        group = sample.group
        if not any(other.runs for other in group.samples):
            self.blocks.give_back(group.read.blocks)
            group.read.computed = 0

    def _needed(self, tokens: int) -> int:
        return -(-tokens // self._size)
