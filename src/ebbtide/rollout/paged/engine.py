"""Continuous batching over a paged cache, with the policy's own weights: nothing is refitted between updates and rollouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ebbtide.errors import UserError
from ebbtide.memory.host import free_host_bytes
from ebbtide.memory.limit import free_bytes
from ebbtide.policy.model import Loaded
from ebbtide.progress import Progress
from ebbtide.rollout.ending import Ending
from ebbtide.rollout.engine import Completion, Request, Sampling, diverged
from ebbtide.rollout.paged.attention import Cache, room_of
from ebbtide.rollout.paged.plain import PlainRunner
from ebbtide.rollout.paged.room import BLOCKS, CHUNKS, blocks_for, useful_blocks
from ebbtide.rollout.paged.runner import Draw, Drawn, Runner
from ebbtide.rollout.paged.schedule import Blocks, Sample, Schedule
from ebbtide.rollout.sampling import Uniforms

Finish = Literal["stop", "length"]


@dataclass(eq=False)
class Told:
    """A sample as its asker sees it."""

    sample: Sample
    sampling: Sampling
    ending: Ending
    uniform: Uniforms
    logprobs: list[float] = field(default_factory=list)
    plain_logprobs: list[float] = field(default_factory=list)
    finish: Finish | None = None
    """None while it goes on, and where it was cancelled."""

    @property
    def tokens(self) -> list[int]:
        return self.sample.tokens

    def completion(self) -> Completion:
        assert self.finish is not None
        return self.ending.completion(self.tokens, self.logprobs, self.plain_logprobs, stopped=self.finish == "stop")


class PagedEngine:
    def __init__(
        self,
        loaded: Loaded,
        batch: int,
        *,
        block: int | None = None,
        chunk: int | None = None,
        blocks: int | None = None,
        share_prompts: bool = True,
        ahead: bool | None = None,
        longest: tuple[int, int] = (1, 1),
    ) -> None:
        """`batch` samples decode at once; `blocks` of `block` tokens are the cache, as many as are useful and fit where that is None.

        `ahead`: a step is planned before the last one's tokens are known, so that a device never waits for the host; None: on a device.
        `longest`: tokens of a prompt and of a completion that will come at some time: what is captured for them serves all that are shorter.
        """
        self.tokenizer, self._model, self._batch = loaded.tokenizer, loaded.model, batch
        self._end_tokens = loaded.end_tokens
        device = loaded.model.device
        self._block = block or BLOCKS[device.type]
        self._chunk = chunk or CHUNKS[device.type]
        self._blocks, self._share = blocks, share_prompts
        self._ahead = device.type == "cuda" if ahead is None else ahead
        self._longest = tuple(map(self._needed, longest))
        self._room = room_of(loaded.model.config)
        self._runner = self._build_runner()
        self.preempted = 0
        """Samples that gave way in the last call."""
        self.afterwards: Callable[[], None] = lambda: None
        """Called when its own samples are done."""
        self.beforehand: Callable[[int], None] = lambda size: None
        """Called before a cache of so many bytes is made."""

    @property
    def block(self) -> int:
        """Tokens of a block."""
        return self._block

    def _build_runner(self) -> Runner:
        if self._model.device.type != "cuda":
            return PlainRunner(self._model, self._block)
        from ebbtide.rollout.paged.device import DeviceRunner

        return DeviceRunner(self._model, self._batch, self._block)

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Inside this block, what is generated is a try: nothing of it stays."""
        with self._runner.trying():
            yield
        self.preempted = 0

    def generate(self, requests: Sequence[Request], sampling: Sampling, progress: Progress) -> list[list[Completion]]:
        seeds = sum(len(request.seeds) for request in requests)
        if not seeds:
            self.preempted = 0
            return [[] for _ in requests]
        prompts = [(len(request.prompt), len(request.seeds)) for request in requests]
        ended = 0
        with self.session(prompts, sampling.max_new_tokens) as session:
            told = [session.add(request, sampling) for request in requests]
            while not session.finished:
                ended += sum(one.finish is not None for one in session.step())
                progress(ended, seeds)
            self.preempted = session.preempted
        self.afterwards()
        return [[one.completion() for one in group] for group in told]

    @contextmanager
    def session(self, prompts: Sequence[tuple[int, int]], new: int) -> Iterator[Session]:
        """Room for prompts of these lengths with so many samples each, of `new` tokens at most. Sessions of one engine follow each other."""
        useful = useful_blocks(list(prompts), new, self._batch, self._block, shared=self._share)
        longest = max(self._needed(length) for length, _ in prompts)
        with self._open(useful, longest, self._needed(new), longest + self._needed(new)) as session:
            yield session

    @contextmanager
    def standing_session(self, longest: int) -> Iterator[Session]:
        """Room for as many samples as decode at once, whatever they will be, of `longest` tokens at most with their prompts."""
        needed = self._needed(longest)
        with self._open(self._batch * (needed + 2), needed, needed, needed + 1) as session:  # prompt and completion each round up
            yield session

    @contextmanager
    def _open(self, useful: int, prompt: int, new: int, together: int) -> Iterator[Session]:
        """All in blocks: how many are useful, and of the longest prompt, of the longest completion, and of both in one sample."""
        count = self._count(useful, together)
        session = self._session(count)
        try:
            self._begin(self._tensors(count), prompt, new)
            with torch.no_grad():
                yield session
        finally:
            self._runner.end()

    def lasting_session(self, prompts: int, prompt: int, samples: int, new: int, *, keep: bool) -> LastingSession:
        """Room for so many prompts of at most `prompt` tokens, with `samples` each of at most `new`; with `keep`, its cache outlasts its rests."""
        return LastingSession(self, prompts, prompt, samples, new, keep)

    def sizes(self, blocks: int) -> list[int]:
        """Bytes of each tensor of a cache of so many blocks."""
        weight = next(self._model.parameters())
        each = blocks * self._block * self._room.bytes(weight.dtype.itemsize) // (2 * self._room.layers)
        return [each] * (2 * self._room.layers)

    def _session(self, blocks: int) -> Session:
        schedule = Schedule(Blocks(blocks), self._block, batch=self._batch, chunk=self._chunk)
        return Session(self._runner, schedule, self._ending, self._share, self._ahead)

    def _begin(self, tensors: Sequence[Tensor], prompt: int, new: int) -> None:
        self._runner.begin(Cache(tensors), max(prompt, self._longest[0]), max(new, self._longest[1]))

    def _tensors(self, blocks: int) -> list[Tensor]:
        """Of a cache: keys and values of each layer in turn."""
        self.beforehand(sum(self.sizes(blocks)))
        weight = next(self._model.parameters())
        shape = (blocks * self._block, self._room.heads, self._room.channels)
        return [torch.empty(shape, dtype=weight.dtype, device=weight.device) for _ in range(2 * self._room.layers)]

    def _exchanged(self, tensors: list[Tensor], used: Sequence[int], blocks: int) -> list[Tensor]:
        """Those of a cache of so many blocks that begins with the `used` ones of another, which is emptied tensor by tensor: never are two whole ones in memory."""
        made = []
        self.beforehand(max(0, sum(self.sizes(blocks)) - sum(tensor.nbytes for tensor in tensors)))
        while tensors:
            old = tensors.pop(0)
            new = old.new_empty((blocks * self._block, *old.shape[1:]))
            if used:
                by_block = new.view(blocks, self._block, *new.shape[1:])
                source = old.view(-1, *by_block.shape[1:])
                torch.index_select(source, 0, torch.tensor(used, device=old.device), out=by_block[: len(used)])
            made.append(new)
            del old, new
        return made

    def _ending(self, sampling: Sampling) -> Ending:
        return Ending(sampling, self.tokenizer, self._end_tokens)

    def _count(self, useful: int, longest: int, taken: int = 0) -> int:
        """Blocks of the cache: all that are useful, or as many as memory has room for, and at least for the longest sample. `taken` bytes are given up for it."""
        count = self._blocks
        if count is None:
            weight = next(self._model.parameters())
            free = _free_bytes(weight.device) + taken
            count = min(useful, self._room.blocks(weight.dtype.itemsize, self._block, self._chunk, self._batch, free))
        if count < longest:
            raise UserError(
                f"the cache has room for {count * self._block:,} tokens, and one sample may need {longest * self._block:,}: lower `rollout.max_new_tokens` or "
                "`rollout.max_prompt_tokens` (`max_length` of `ebbtide serve`), or how many are generated at once "
                f"(`rollout.batch`, or `batch` of `ebbtide serve`: now {self._batch:,}), or free memory for generation "
                "(`memory.away.generate`, `optimizer.place`)"
            )
        return count

    def _needed(self, tokens: int) -> int:
        return blocks_for(tokens, self._block)


class Session:
    """Prompts come in at any time; every step moves all that can move by one pass through the model."""

    def __init__(self, runner: Runner, schedule: Schedule, ending: Callable[[Sampling], Ending], share_prompts: bool, ahead: bool) -> None:
        self._runner, self._schedule, self._make_ending, self._share, self._ahead = runner, schedule, ending, share_prompts, ahead
        self._told: dict[int, Told] = {}
        self._under_way: Drawn | None = None

    @property
    def finished(self) -> bool:
        return self._schedule.finished

    @property
    def preempted(self) -> int:
        return self._schedule.preempted

    @property
    def free_blocks(self) -> int:
        return self._schedule.blocks.free

    @property
    def blocks(self) -> int:
        return self._schedule.blocks.count

    @property
    def waiting(self) -> int:
        return self._schedule.waiting

    def add(self, request: Request, sampling: Sampling) -> list[Told]:
        ending = self._make_ending(sampling)
        count, limit = len(request.seeds), sampling.max_new_tokens
        samples = (
            self._schedule.add(request.prompt, [limit] * count)
            if self._share
            else [sample for _ in request.seeds for sample in self._schedule.add(request.prompt, [limit])]
        )
        told = [Told(sample, sampling, ending, Uniforms(seed)) for sample, seed in zip(samples, request.seeds, strict=True)]
        self._told |= {one.sample.number: one for one in told}
        return told

    def put_back(self, told: Told, tokens: Sequence[int], logprobs: Sequence[float], plain: Sequence[float], finish: Finish | None) -> None:
        """A sample that was just added is one that had come so far."""
        told.tokens[:], told.logprobs[:], told.plain_logprobs[:] = tokens, logprobs, plain
        told.sample.asked, told.finish = len(tokens), finish
        if finish is not None:
            self.cancel(told)

    def settle(self) -> None:
        """Nothing is under way any more: all tokens that were asked for are known."""
        if self._under_way is not None:
            self._take(self._under_way)
            self._under_way = None

    def forget(self) -> None:
        """What is under way is given up."""
        for sample in self._under_way.samples if self._under_way is not None else []:
            sample.asked = len(sample.tokens)
        self._under_way = None

    def cancel(self, told: Told) -> None:
        self._schedule.cancel(told.sample)
        self._told.pop(told.sample.number, None)

    def step(self) -> list[Told]:
        """One pass through the model; those that have another token now."""
        work = self._schedule.next()
        before, drawn = self._under_way, None
        if work and isinstance(work[0], Sample):
            drawn = self._runner.decode([self._draw(sample) for sample in work if isinstance(sample, Sample)])
        elif work:
            chunks = [chunk for chunk in work if not isinstance(chunk, Sample)]
            drawn = self._runner.read(chunks, [[self._draw(sample) for sample in self._schedule.ask_first(chunk)] for chunk in chunks])
        if self._ahead and drawn is not None:
            self._under_way = drawn
            return self._take(before) if before is not None else []
        self._under_way = None
        return [one for step in (before, drawn) if step is not None for one in self._take(step)]

    def _draw(self, sample: Sample) -> Draw:
        told = self._told[sample.number]
        return Draw(sample, told.sampling, told.uniform[sample.asked - 1])

    def _take(self, drawn: Drawn) -> list[Told]:
        found = []
        for sample, token, logprob, plain in zip(drawn.samples, *drawn.wait(), strict=True):
            if sample.done:  # it had ended when this was asked for
                continue
            if not math.isfinite(logprob):
                raise diverged()
            told = self._told[sample.number]
            told.logprobs.append(logprob)
            told.plain_logprobs.append(plain)
            if told.ending.reached(sample.tokens, token):
                told.finish = "stop"
            elif len(sample.tokens) + 1 == sample.limit:
                told.finish = "length"
            self._schedule.sampled(sample, token, done=told.finish is not None)
            if told.finish is not None:
                del self._told[sample.number]
            found.append(told)
        return found


class LastingSession:
    """A session that rests while others use the device: its samples then go on where they were, from what was kept of the cache or read again."""

    def __init__(self, engine: PagedEngine, prompts: int, prompt: int, samples: int, new: int, keep: bool) -> None:
        self._engine, self._keep = engine, keep
        self._prompt, self._new = engine._needed(prompt), engine._needed(new)
        shared = 1 if engine._share else samples
        self._useful = prompts * shared * self._prompt + min(engine._batch, prompts * samples) * (self._new + 1)
        self._session = engine._session(0)
        self.kept: list[Tensor] = []
        """Blocks in use while it rests, by layer: keys and values in turn."""

    @property
    def session(self) -> Session:
        """To add to, at any time."""
        return self._session

    @contextmanager
    def awake(self) -> Iterator[Session]:
        """What was kept must be on the device. What goes wrong inside costs what was kept, and no token that was known."""
        engine, session, schedule = self._engine, self._session, self._session._schedule
        together = self._prompt + self._new
        count = engine._count(self._useful, together, sum(tensor.nbytes for tensor in self.kept))
        if schedule.blocks.count - schedule.blocks.free > count:  # there is less memory now than what was kept fills
            schedule.rest()
            self.kept.clear()
        tensors = self.kept or engine._tensors(0)
        self.kept = []
        tensors = engine._exchanged(tensors, schedule.move_to(Blocks(count)), count)
        try:
            engine._begin(tensors, self._prompt, self._new)
            with torch.no_grad():
                yield session
                session.settle()
        except BaseException:
            session.forget()
            schedule.rest()
            raise
        finally:
            engine._runner.end()
        if not self._keep:
            schedule.rest()
        used = schedule.blocks.count - schedule.blocks.free
        self.kept = engine._exchanged(tensors, schedule.move_to(Blocks(used)), used) if used else []
        engine.afterwards()


def _free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return free_host_bytes() // 2
    return free_bytes(device)
