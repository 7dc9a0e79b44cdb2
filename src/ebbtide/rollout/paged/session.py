"""The sessions of the paged engine: `Session`, a queue of requests over one KV cache, and `PersistentSession`, which is
suspended between the steps of a run, for partial rollouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ebbtide.memory.plan import HoldingName
from ebbtide.rollout.engine import Completion, Request, SamplingParams, diverged_error
from ebbtide.rollout.paged.block_table import UsedCache
from ebbtide.rollout.paged.cache_costs import CacheSize
from ebbtide.rollout.paged.cache_memory import CacheMemory, CacheNeeds
from ebbtide.rollout.paged.runner import PendingTokens, Runner, SampleOp
from ebbtide.rollout.paged.scheduler import ScheduledSample, Scheduler
from ebbtide.rollout.sampling import Uniforms
from ebbtide.rollout.stopping import StopCondition

Finish = Literal["stop", "length"]


@dataclass(eq=False)
class SampleState:
    """A sample as the caller of a session sees it."""

    sample: ScheduledSample
    sampling: SamplingParams
    stop_condition: StopCondition
    uniforms: Uniforms
    logprobs: list[float] = field(default_factory=list)
    plain_logprobs: list[float] = field(default_factory=list)
    finish: Finish | None = None
    """None while it is generated, and where it was cancelled."""
    is_parked_after: bool = False
    """Whether it is parked when its turn is over, to continue after the answer of an environment (`Session.append`)."""
    turn_start: int = 0
    """The index of the first token of this turn. Log-probs are those of this turn alone."""

    @property
    def tokens(self) -> list[int]:
        """All of its tokens after the prompt: of all turns, with what was appended between them."""
        return self.sample.tokens

    @property
    def recent_tokens(self) -> list[int]:
        """The last tokens of this turn, as many as a stop condition looks at."""
        return self.tokens[max(self.turn_start, len(self.tokens) - self.stop_condition.window) :]

    def completion(self) -> Completion:
        """What was sampled in this turn, which is over."""
        assert self.finish is not None
        return self.stop_condition.completion(
            self.tokens[self.turn_start :], self.logprobs, self.plain_logprobs, stopped=self.finish == "stop"
        )


class Session:
    """A queue of requests over one KV cache: requests can be added at any time, and every step is one pass through the
    model, a prefill or a decode of all samples that can run."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        stop_condition: Callable[[SamplingParams], StopCondition],
        share_prompts: bool,
        ahead: bool,
    ) -> None:
        self._runner, self._scheduler, self._stop_condition = runner, scheduler, stop_condition
        self._share, self._ahead = share_prompts, ahead
        self._states: dict[int, SampleState] = {}
        self._in_flight: PendingTokens | None = None
        self._overrun: set[int] = set()  # parked samples with a token in flight that was scheduled before they were

    @property
    def finished(self) -> bool:
        """Whether no sample can run: all have ended, or wait for what `append` will give them."""
        return self._scheduler.finished

    @property
    def preempted(self) -> int:
        return self._scheduler.preempted

    @property
    def recomputed(self) -> int:
        """Tokens whose keys and values were given up for others, to be prefilled again."""
        return self._scheduler.recomputed

    @property
    def num_free_blocks(self) -> int:
        return self._scheduler.allocator.num_free

    @property
    def used_size(self) -> CacheSize:
        """How much of its KV cache is in use."""
        return self._scheduler.used_size

    @property
    def num_blocks(self) -> int:
        return self._scheduler.allocator.num_blocks

    @property
    def max_tokens(self) -> int:
        """Tokens that its KV cache has room for."""
        return self.num_blocks * self._scheduler.block_size

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting

    def add(self, request: Request, sampling: SamplingParams, *, turns: bool = False) -> list[SampleState]:
        """Adds a prompt with its samples. With `turns`, a sample whose completion is over can continue (`append`), and
        has to be cancelled when it has ended."""
        ending = self._stop_condition(sampling)
        count, limit = len(request.seeds), sampling.max_new_tokens
        samples = (
            self._scheduler.add(request.prompt, [limit] * count, request.adapter)
            if self._share
            else [
                sample
                for _ in request.seeds
                for sample in self._scheduler.add(request.prompt, [limit], request.adapter)
            ]
        )
        states = [
            SampleState(sample, sampling, ending, Uniforms(seed), is_parked_after=turns)
            for sample, seed in zip(samples, request.seeds, strict=True)
        ]
        self._states |= {state.sample.number: state for state in states}
        return states

    def append(self, state: SampleState, tokens: Sequence[int], seed: int, max_new_tokens: int) -> None:
        """Appends tokens that were not sampled, such as what an environment says, to a sample whose turn is over, and
        begins its next turn. Only these tokens are prefilled, as long as the sample has its blocks."""
        assert state.is_parked_after
        assert state.finish is not None
        state.turn_start, state.uniforms, state.finish = len(state.tokens) + len(tokens), Uniforms(seed), None
        state.logprobs, state.plain_logprobs = [], []
        self._scheduler.unpark(state.sample, tokens, state.turn_start + max_new_tokens)

    def restore_sample(
        self,
        state: SampleState,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        plain: Sequence[float],
        finish: Finish | None,
    ) -> None:
        """Restores what a sample had generated in an earlier session; it must just have been added to this one."""
        state.tokens[:], state.logprobs[:], state.plain_logprobs[:] = tokens, logprobs, plain
        state.sample.num_scheduled, state.finish = len(tokens), finish
        if finish is not None:
            self.cancel(state)

    def drain(self) -> None:
        """Waits for the pass that is in flight and collects its tokens."""
        if self._in_flight is not None:
            self._collect(self._in_flight)
            self._in_flight = None

    def discard_in_flight(self) -> None:
        """Discards the pass that is in flight: its tokens count as never sampled."""
        for sample in self._in_flight.samples if self._in_flight is not None else []:
            sample.num_scheduled = len(sample.tokens)
        self._in_flight = None
        self._overrun.clear()

    def cancel(self, state: SampleState) -> None:
        self._scheduler.cancel(state.sample)
        self._states.pop(state.sample.number, None)

    def preempt_all(self) -> None:
        """Preempts all samples that run, so that no block is in use; `preempted` does not count them."""
        self._scheduler.preempt_all()

    @property
    def prefill_chunk(self) -> int:
        """Tokens that are prefilled in one pass, at most."""
        return self._scheduler.chunk

    def set_prefill_chunk(self, tokens: int) -> None:
        """Sets how many tokens are prefilled in one pass."""
        self._scheduler.chunk = tokens

    def move_to_cache(self, size: CacheSize) -> UsedCache:
        """Moves all block tables to another KV cache. Returns what of the old one is in use, in the order in which it
        lies at the front of the new one."""
        return self._scheduler.move_to(size)

    def step(self) -> list[SampleState]:
        """Runs one pass through the model and returns the samples that got another token."""
        work = self._scheduler.schedule()
        before, pending = self._in_flight, None
        if work and isinstance(work[0], ScheduledSample):
            pending = self._runner.decode(
                [self._sample_op(sample) for sample in work if isinstance(sample, ScheduledSample)]
            )
        elif work:
            chunks = [chunk for chunk in work if not isinstance(chunk, ScheduledSample)]
            pending = self._runner.prefill(
                chunks,
                [
                    [self._sample_op(sample) for sample in self._scheduler.schedule_first_tokens(chunk)]
                    for chunk in chunks
                ],
            )
        if self._ahead and pending is not None:
            self._in_flight = pending
            return self._collect(before) if before is not None else []
        self._in_flight = None
        return [state for step in (before, pending) if step is not None for state in self._collect(step)]

    def _sample_op(self, sample: ScheduledSample) -> SampleOp:
        state = self._states[sample.number]
        return SampleOp(sample, state.sampling, state.uniforms[sample.num_scheduled - 1 - state.turn_start])

    def _collect(self, pending: PendingTokens) -> list[SampleState]:
        """Waits for the tokens of a pass and appends them to their samples."""
        found = []
        for sample, token, logprob, plain in zip(pending.samples, *pending.wait(), strict=True):
            if sample.done:  # the sample had ended, which was not known yet when this token was scheduled
                continue
            if sample.number in self._overrun:  # the same for a turn
                self._overrun.remove(sample.number)
                continue
            if not math.isfinite(logprob):
                raise diverged_error()
            state = self._states[sample.number]
            state.logprobs.append(logprob)
            state.plain_logprobs.append(plain)
            if state.stop_condition.is_reached(state.recent_tokens, token):
                state.finish = "stop"
            elif len(sample.tokens) + 1 == sample.max_tokens:
                state.finish = "length"
            parked = state.finish is not None and state.is_parked_after
            self._scheduler.append_token(sample, token, done=state.finish is not None and not parked)
            if parked:
                if sample.num_scheduled > len(sample.tokens):
                    self._overrun.add(sample.number)
                self._scheduler.park(sample)
            elif state.finish is not None:
                del self._states[sample.number]
            found.append(state)
        return found


class PersistentSession:
    """A session for partial rollouts: it is suspended while other phases use the GPU, and its samples then continue
    where they were, from the kept KV cache or by prefilling their tokens again."""

    def __init__(
        self, session: Session, memory: CacheMemory, needs: CacheNeeds, *, keep: bool, on_suspend: Callable[[], None]
    ) -> None:
        """`session` has no KV cache yet. With `keep`, its KV cache is kept while it is suspended. `on_suspend` is
        called whenever it has been suspended."""
        self._session, self._memory, self._needs = session, memory, needs
        self._keep, self._on_suspend = keep, on_suspend
        self.kept: dict[HoldingName, list[Tensor]] = {}
        """What is in use while the session is suspended: of the KV cache the keys, then the values of each layer, and
        the states beside it."""

    def kept_of(self, name: HoldingName) -> list[Tensor]:
        """Returns the tensors of one holding that are kept while the session is suspended."""
        return self.kept.get(name, [])

    @property
    def session(self) -> Session:
        """The session itself; requests can be added to it at any time, also while it is suspended."""
        return self._session

    @contextmanager
    def resumed(self) -> Iterator[Session]:
        """Resumes the session for the time of this context. The kept KV cache must be on the device. An error inside
        loses the kept cache, but no token that was collected."""
        session, memory = self._session, self._memory
        kept = [tensor for tensors in self.kept.values() for tensor in tensors]
        size = memory.find_size(self._needs, reusable=sum(tensor.nbytes for tensor in kept))
        session.set_prefill_chunk(memory.chunk)
        if not session.used_size.fits(size):  # the kept cache no longer fits into memory
            session.preempt_all()
            kept.clear()
        tensors = kept or memory.allocate(session.used_size)
        self.kept = {}
        with memory.counted(size):
            tensors = memory.resize(tensors, session.move_to_cache(size), size)
            try:
                memory.attach(tensors, self._needs)
                with torch.no_grad():
                    yield session
                    session.drain()
            except BaseException:
                session.discard_in_flight()
                session.preempt_all()
                raise
            finally:
                memory.detach()
            if not self._keep:
                session.preempt_all()
            used = session.used_size
            kept = memory.resize(tensors, session.move_to_cache(used), used) if used.blocks else []
            tensors.clear()
        self.kept = memory.by_holding(kept)
        self._on_suspend()
