"""What is computed next: which prompts are read, which samples decode, and who gives way when blocks run out. No torch.

The cache is cut into blocks of so many tokens. A prompt's keys and values lie in blocks of its own, computed once for all samples of its group; each sample has
blocks for the tokens it adds. When blocks run out, the sample that began last gives its blocks back and is read again later, from its tokens.

A device works on one step while the host plans the next: a sample's newest token may be under way. What is planned depends on how many tokens were asked for,
not on which they are; a sample that turns out to have ended costs one step too many, and what comes of that is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


def most_blocks(groups: int, prompt: int, samples: int, new: int, size: int) -> int:
    """That so many groups can fill, of a prompt and samples of at most so many tokens each, in blocks of `size` tokens."""
    return groups * (-(-prompt // size) + samples * -(-new // size))


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
    limit: int
    """Tokens at most."""
    tokens: list[int] = field(default_factory=list)
    asked: int = 0
    """How many of its tokens were sampled or are being sampled: the last of them may not be known yet."""
    own: Stretch = field(default_factory=Stretch)
    """Of its own tokens. The last of them is never computed: it is the next step's input."""
    row: int | None = None
    """Its place among those that run."""
    admission: int = 0
    """Another number whenever it begins to run."""
    done: bool = False

    @property
    def runs(self) -> bool:
        return self.row is not None


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
    """`add()` takes prompts at any time; `next()` gives what to compute, and `sampled()` is told what came of it, one step later at the latest."""

    def __init__(self, blocks: Blocks, size: int, *, batch: int, chunk: int) -> None:
        """`batch` samples at most decode at once, `chunk` tokens at most are read in one go."""
        self.blocks, self._size, self._batch, self._chunk = blocks, size, batch, chunk
        self.groups: dict[int, Group] = {}
        """Those that have not ended."""
        self._waiting: deque[Sample] = deque()
        self._running: list[Sample] = []
        self._rows = list(range(batch - 1, -1, -1))
        self._added = self._admitted = 0
        self.preempted = 0

    def add(self, prompt: Sequence[int], limits: Sequence[int]) -> list[Sample]:
        """A prompt with samples of at most so many tokens each."""
        if not limits:
            return []
        group = Group(self._added, prompt)
        group.samples = [Sample(self._added + i, group, limit) for i, limit in enumerate(limits)]
        self._added += len(limits)
        self.groups[group.number] = group
        self._waiting += group.samples
        return list(group.samples)

    def needed(self, tokens: int) -> int:
        """Blocks for so many tokens."""
        return -(-tokens // self._size)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def finished(self) -> bool:
        return not self._waiting and not self._running

    def next(self) -> list[Chunk] | list[Sample]:
        """Chunks to read, or samples to decode by one token each; nothing while all that is left is under way."""
        self._admit()
        return self._chunks() or self._decoding()

    def ask_first(self, chunk: Chunk) -> list[Sample]:
        """Asks for the first tokens that follow from a chunk: of the samples of a prompt that it completes."""
        if isinstance(chunk.of, Sample) or not chunk.of.is_read:
            return []
        found = [sample for sample in chunk.of.samples if not sample.asked and not sample.done]
        for sample in found:
            sample.asked = 1
        return found

    def sampled(self, sample: Sample, token: int, *, done: bool) -> None:
        """A sample's next token is known."""
        sample.tokens.append(token)
        if done:
            self.cancel(sample)

    def cancel(self, sample: Sample) -> None:
        """It is over, wherever it was."""
        if sample.done:
            return
        sample.done = True
        if sample.runs:
            self._running.remove(sample)
            self._let_go(sample)
        else:
            self._waiting.remove(sample)
        if all(other.done for other in sample.group.samples):
            del self.groups[sample.group.number]

    def rest(self) -> None:
        """All give their blocks back and wait, in the order in which they came."""
        for sample in self._running:
            self._let_go(sample)
        self._waiting = deque(sorted([*self._running, *self._waiting], key=lambda sample: sample.number))
        self._running = []

    def move_to(self, blocks: Blocks) -> list[int]:
        """Into another cache: gives the blocks of this one that are in use, in the order in which they lie in the other."""
        groups = list(self.groups.values())
        stretches = [group.read for group in groups] + [sample.own for group in groups for sample in group.samples]
        used = [block for stretch in stretches for block in stretch.blocks]
        for stretch in stretches:
            stretch.blocks = blocks.take(len(stretch.blocks))
        self.blocks = blocks
        return used

    # Who runs

    def _admit(self) -> None:
        """Samples that wait begin, in order, while there is room for what they need now and one more block for each that runs.

        Where many wait, they begin several at a time: reading one prompt takes almost as long as reading eight.
        """
        if len(self._rows) < min(len(self._waiting), max(1, self._batch // 8)):
            return
        while self._waiting and self._rows:
            sample = self._waiting[0]
            if sample.asked > len(sample.tokens):
                return  # its newest token is under way, and nobody would know where
            group = sample.group
            prompt = 0 if group.read.blocks else self.needed(len(group.prompt))
            own = self.needed(max(1, sample.asked))
            if prompt + own + len(self._running) > self.blocks.free:
                return
            if prompt:
                group.read.blocks = self.blocks.take(prompt)
            sample.own.blocks = self.blocks.take(own)
            sample.row = self._rows.pop()
            self._admitted += 1
            sample.admission = self._admitted
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
            elif room and sample.own.computed < sample.asked - 1:
                last = min(sample.asked - 1, sample.own.computed + room)
                found.append(Chunk(sample, sample.own.computed, last))
                room -= last - sample.own.computed
        for chunk in found:
            (chunk.of.read if isinstance(chunk.of, Group) else chunk.of.own).computed = chunk.last
        return found

    def _decoding(self) -> list[Sample]:
        """Those that run and may have another token, each with a place for its last one; the ones that began last give way to the others."""
        ready = []
        for sample in [sample for sample in self._running if sample.asked < sample.limit]:
            while sample.runs and len(sample.own.blocks) * self._size < sample.asked:
                if self.blocks.free:
                    sample.own.blocks += self.blocks.take(1)
                else:
                    self._preempt()
            ready.append(sample)
        ready = [sample for sample in ready if sample.runs]
        for sample in ready:
            sample.own.computed = sample.asked
            sample.asked += 1
        return ready

    def _preempt(self) -> None:
        """The sample that began last gives its blocks back and waits: it may be the very one that wants some."""
        last = self._running.pop()
        self.preempted += 1
        self._let_go(last)
        self._waiting.appendleft(last)

    def _let_go(self, sample: Sample) -> None:
        """Its blocks, and its prompt's once nobody who runs reads them."""
        assert sample.row is not None
        self._rows.append(sample.row)
        self.blocks.give_back(sample.own.blocks)
        sample.own.computed, sample.row = 0, None
        group = sample.group
        if not any(other.runs for other in group.samples):
            self.blocks.give_back(group.read.blocks)
            group.read.computed = 0
