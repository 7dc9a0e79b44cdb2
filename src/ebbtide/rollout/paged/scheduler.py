"""The scheduler of the paged engine: it decides which prompts are prefilled, which samples decode, and which are
preempted when blocks run out. It imports no torch.

The KV cache is cut into blocks of a fixed number of tokens. A prompt has a block table of its own, prefilled once for
all samples of its group; each sample has another one for the tokens it adds. When blocks run out, the sample that was
admitted last is preempted: its blocks are freed, and its tokens are prefilled again later (recompute, not swap).

A sample whose turn is over can be parked until its environment has answered. It leaves the batch and keeps its blocks,
so that only what is new is prefilled when it continues. Parked samples are the first to give up their blocks when
others need them.

A model whose layers pass a state from token to token also has state slots: a prompt has one, with the state after it,
and so has each sample, as long as they have blocks. A state cannot go back by a token as a KV cache can, so a sample
whose state is ahead of its tokens gives its blocks up.

The GPU works on one step while the host schedules the next, so a sample's newest token may still be in flight. The
schedule depends on how many tokens were scheduled, not on which they are. A sample that turns out to have ended costs
one step too many, and the token of that step is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ebbtide.rollout.paged.block_table import BlockTable, UsedCache, allocators
from ebbtide.rollout.paged.cache_costs import CacheSize
from ebbtide.system.units import ceil_div


@dataclass(eq=False)
class PromptGroup:
    """A prompt and its samples."""

    number: int
    prompt: Sequence[int]
    samples: list[ScheduledSample] = field(default_factory=list)
    block_table: BlockTable = field(default_factory=BlockTable)
    adapter: int = 0
    """The adapter that its keys and values are computed with. A group is of one request, so that a prompt that was
    prefilled with one adapter never serves a sample of another."""

    @property
    def is_prefilled(self) -> bool:
        return self.block_table.computed == len(self.prompt)


@dataclass(eq=False)
class ScheduledSample:
    """One sample of a prompt, as the scheduler sees it."""

    number: int
    group: PromptGroup
    max_tokens: int
    """The most tokens that it may have."""
    tokens: list[int] = field(default_factory=list)
    num_scheduled: int = 0
    """How many of its tokens were scheduled: the last of them may still be in flight."""
    block_table: BlockTable = field(default_factory=BlockTable)
    """The block table of its own tokens. The newest token is not in the KV cache: it is the next step's input."""
    row: int | None = None
    """Its row of the decode batch, None while it waits."""
    admission: int = 0
    """A new number each time it is admitted."""
    done: bool = False

    @property
    def is_running(self) -> bool:
        return self.row is not None

    @property
    def newest_token(self) -> PrefillChunk:
        """The token that a decode step is given: the last of those in the KV cache after that step."""
        return PrefillChunk(self, self.block_table.computed - 1, self.block_table.computed)

    @property
    def has_blocks(self) -> bool:
        return bool(self.block_table.blocks)


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens `first` to `last` (excluded) of a prompt, or of a sample's own, that are prefilled in one pass."""

    owner: PromptGroup | ScheduledSample
    first: int
    last: int

    @property
    def group(self) -> PromptGroup:
        return self.owner if isinstance(self.owner, PromptGroup) else self.owner.group

    @property
    def states(self) -> tuple[int | None, int]:
        """The state slot that it continues from, None at the start of a prompt, and the one it writes to."""
        before = self.owner.block_table if self.first else self.group.block_table
        begins = self.first == 0 and isinstance(self.owner, PromptGroup)
        return None if begins else before.state[0], self.owner.block_table.state[0]

    @property
    def tokens(self) -> Sequence[int]:
        return (self.owner.prompt if isinstance(self.owner, PromptGroup) else self.owner.tokens)[self.first : self.last]


class Scheduler:
    """Prompts are added at any time; each step is scheduled, run by the caller, and its tokens are recorded one step
    later at the latest."""

    def __init__(self, size: CacheSize, block: int, *, batch: int, chunk: int) -> None:
        """Blocks of the KV cache hold `block` tokens, at most `batch` samples decode at once, and at most `chunk`
        tokens are prefilled in one pass."""
        self.allocator, self._states = allocators(size)
        self.block_size, self._batch, self.chunk = block, batch, chunk
        self.groups: dict[int, PromptGroup] = {}
        """The groups that have not ended."""
        self._waiting: deque[ScheduledSample] = deque()
        self._running: list[ScheduledSample] = []
        self._parked: list[ScheduledSample] = []
        self._rows = list(range(batch - 1, -1, -1))
        self._added = self._admitted = 0
        self.preempted = 0
        self.recomputed = 0
        """Tokens of unfinished samples whose keys and values were given up, to be prefilled again."""

    def add(self, prompt: Sequence[int], limits: Sequence[int], adapter: int = 0) -> list[ScheduledSample]:
        """Adds a prompt with one sample for each of `limits`, the most tokens that it may have. `adapter`: see
        `Request`."""
        if not limits:
            return []
        group = PromptGroup(self._added, prompt, adapter=adapter)
        group.samples = [ScheduledSample(self._added + i, group, limit) for i, limit in enumerate(limits)]
        self._added += len(limits)
        self.groups[group.number] = group
        self._waiting += group.samples
        return list(group.samples)

    def blocks_for(self, tokens: int) -> int:
        """Returns the blocks that `tokens` tokens need."""
        return ceil_div(tokens, self.block_size)

    @property
    def used_size(self) -> CacheSize:
        """How much of the KV cache is in use."""
        states = None if self._states is None else self._states.num_used
        return CacheSize(self.allocator.num_used, states)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def finished(self) -> bool:
        """Whether nothing is left to run; samples may be parked."""
        return not self._waiting and not self._running

    def schedule(self) -> list[PrefillChunk] | list[ScheduledSample]:
        """Schedules a step: chunks to prefill, or samples to decode by one token each. It is empty while every token
        that is left is in flight."""
        self._admit()
        return self._schedule_prefill() or self._schedule_decode()

    def schedule_first_tokens(self, chunk: PrefillChunk) -> list[ScheduledSample]:
        """Schedules the first token of each sample whose prompt this chunk completes."""
        if isinstance(chunk.owner, ScheduledSample) or not chunk.owner.is_prefilled:
            return []
        ready = [sample for sample in chunk.owner.samples if not sample.num_scheduled and not sample.done]
        for sample in ready:
            sample.num_scheduled = 1
        return ready

    def append_token(self, sample: ScheduledSample, token: int, *, done: bool) -> None:
        """Records a sample's next token."""
        sample.tokens.append(token)
        if done:
            self.cancel(sample)

    def cancel(self, sample: ScheduledSample) -> None:
        """Ends a sample, whether it runs or waits."""
        if sample.done:
            return
        sample.done = True
        if sample.is_running:
            self._running.remove(sample)
            self._free_row(sample)
        elif sample in self._parked:
            self._parked.remove(sample)
        else:
            self._waiting.remove(sample)
        self._free_blocks(sample)
        if all(other.done for other in sample.group.samples):
            del self.groups[sample.group.number]

    def park(self, sample: ScheduledSample) -> None:
        """Takes a sample whose turn is over out of the batch. A token of it that is still in flight does not count."""
        if sample.is_running:
            self._running.remove(sample)
            self._free_row(sample)
        else:  # it was preempted while its last token was in flight
            self._waiting.remove(sample)
        sample.num_scheduled = len(sample.tokens)
        self._parked.append(sample)

    def unpark(self, sample: ScheduledSample, tokens: Sequence[int], limit: int) -> None:
        """Continues a parked sample after tokens that were not sampled, up to `limit` tokens in all. It is admitted
        before samples that have not begun: it may hold blocks, which are free once it has ended."""
        self._parked.remove(sample)
        sample.tokens += tokens
        sample.num_scheduled, sample.max_tokens = len(sample.tokens), limit
        if self._states is not None and sample.block_table.computed >= sample.num_scheduled:
            self._free_blocks(sample)  # the state knows the very token that is fed next
        place = next((index for index, other in enumerate(self._waiting) if not other.tokens), len(self._waiting))
        self._waiting.insert(place, sample)

    def preempt_all(self) -> None:
        """Preempts all running samples, which `preempted` does not count, and frees all blocks. All then wait in the
        order in which they were added, except those that are parked."""
        for sample in self._running:
            self._free_row(sample)
        self._waiting = deque(sorted([*self._running, *self._waiting], key=lambda sample: sample.number))
        self._running = []
        for sample in [*self._waiting, *self._parked]:
            self._free_blocks(sample)

    def move_to(self, size: CacheSize) -> UsedCache:
        """Moves all block tables to another KV cache. Returns what of this one is in use, in the order in which it lies
        in the other."""
        blocks, states = allocators(size)
        groups = list(self.groups.values())
        tables = [group.block_table for group in groups] + [
            sample.block_table for group in groups for sample in group.samples
        ]
        used = UsedCache(
            [block for table in tables for block in table.blocks], [slot for table in tables for slot in table.state]
        )
        for table in tables:
            table.blocks = blocks.allocate(len(table.blocks))
            table.state = states.allocate(len(table.state)) if states is not None else []
        self.allocator, self._states = blocks, states
        return used

    # Admission, prefill, decode and preemption

    def _admit(self) -> None:
        """Admits waiting samples in order, while there are blocks for what they need now and one more for each that
        runs. Others give up theirs only if nothing would run otherwise.

        Where many wait, several are admitted at a time: prefilling one prompt takes almost as long as prefilling eight.
        """
        if len(self._rows) < min(len(self._waiting), max(1, self._batch // 8)):
            return
        while self._waiting and self._rows:
            sample = self._waiting[0]
            if sample.num_scheduled > len(sample.tokens):
                return  # its newest token is still in flight, in the row that it had before
            group = sample.group
            while True:
                prompt = 0 if group.block_table.blocks else self.blocks_for(len(group.prompt))
                own = self.blocks_for(max(1, sample.num_scheduled)) - len(sample.block_table.blocks)
                if prompt + own + len(self._running) <= self.allocator.num_free and self._has_slots(sample):
                    break
                if self._running or not self._reclaim(sample):
                    return
            if prompt:
                group.block_table.blocks = self.allocator.allocate(prompt)
            sample.block_table.blocks += self.allocator.allocate(own)
            self._give_slots(sample)
            sample.row = self._rows.pop()
            self._admitted += 1
            sample.admission = self._admitted
            self._running.append(self._waiting.popleft())

    def _tables_without_slot(self, sample: ScheduledSample) -> list[BlockTable]:
        return [table for table in (sample.group.block_table, sample.block_table) if not table.state]

    def _has_slots(self, sample: ScheduledSample) -> bool:
        """Tells whether there are state slots for a sample and its prompt, if they need them."""
        return self._states is None or len(self._tables_without_slot(sample)) <= self._states.num_free

    def _give_slots(self, sample: ScheduledSample) -> None:
        if self._states is not None:
            for table in self._tables_without_slot(sample):
                table.state = self._states.allocate(1)

    def _schedule_prefill(self) -> list[PrefillChunk]:
        """Schedules what must be prefilled before the running samples can decode: their prompts, and the own tokens of
        samples that were preempted."""
        chunks, budget = [], self.chunk
        seen: set[int] = set()
        for sample in self._running:
            group = sample.group
            if not group.is_prefilled:
                if group.number not in seen and budget:
                    seen.add(group.number)
                    last = min(len(group.prompt), group.block_table.computed + budget)
                    chunks.append(PrefillChunk(group, group.block_table.computed, last))
                    budget -= last - group.block_table.computed
            elif budget and sample.block_table.computed < sample.num_scheduled - 1:
                last = min(sample.num_scheduled - 1, sample.block_table.computed + budget)
                chunks.append(PrefillChunk(sample, sample.block_table.computed, last))
                budget -= last - sample.block_table.computed
        for chunk in chunks:
            chunk.owner.block_table.computed = chunk.last
        return chunks

    def _schedule_decode(self) -> list[ScheduledSample]:
        """Schedules the running samples that may have another token, each with a slot for its newest one. Where blocks
        run out, parked samples give up theirs, and then the samples admitted last are preempted."""
        ready = []
        for sample in [sample for sample in self._running if sample.num_scheduled < sample.max_tokens]:
            while sample.is_running and len(sample.block_table.blocks) * self.block_size < sample.num_scheduled:
                if self.allocator.num_free:
                    sample.block_table.blocks += self.allocator.allocate(1)
                elif not self._reclaim(sample):
                    self._preempt()
            ready.append(sample)
        ready = [sample for sample in ready if sample.is_running]
        for sample in ready:
            sample.block_table.computed = sample.num_scheduled
            sample.num_scheduled += 1
        return ready

    def _preempt(self) -> None:
        """Preempts the sample that was admitted last. It may be the very one that needs a block."""
        last = self._running.pop()
        self.preempted += 1
        self._free_row(last)
        self._free_blocks(last)
        self._waiting.appendleft(last)

    def _reclaim(self, needed_by: ScheduledSample) -> bool:
        """Frees the blocks of the sample that was parked last, or else of the last one that waits with some. Returns
        whether there was one."""
        for sample in (*reversed(self._parked), *reversed(self._waiting)):
            if sample.has_blocks and sample is not needed_by:
                self._free_blocks(sample)
                return True
        return False

    def _free_row(self, sample: ScheduledSample) -> None:
        assert sample.row is not None
        self._rows.append(sample.row)
        sample.row = None

    def _free_blocks(self, sample: ScheduledSample) -> None:
        """Frees a sample's blocks, and its prompt's blocks once no other sample has any."""
        group = sample.group
        self.recomputed += 0 if sample.done else sample.block_table.computed
        self._release(sample.block_table)
        if group.block_table.blocks and not any(other.has_blocks for other in group.samples):
            self.recomputed += 0 if all(other.done for other in group.samples) else group.block_table.computed
            self._release(group.block_table)

    def _release(self, table: BlockTable) -> None:
        self.allocator.release(table.blocks)
        if self._states is not None:
            self._states.release(table.state)
        table.computed = 0
