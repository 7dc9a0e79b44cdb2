"""The paged engine: continuous batching over a paged KV cache, with the policy's own weights, so that no weight sync is
needed between an update and the next rollouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from ebbtide.memory.plan import HoldingName
from ebbtide.model.load import LoadedModel
from ebbtide.policy.fused_norm import fuse_norms
from ebbtide.progress import Progress
from ebbtide.rollout.engine import Completion, Request, SamplingParams
from ebbtide.rollout.paged.attention import CacheLayout, cache_layout
from ebbtide.rollout.paged.cache_costs import (
    BLOCK_SIZES,
    PREFILL_CHUNK_TOKENS,
    CacheSize,
    useful_blocks,
)
from ebbtide.rollout.paged.cache_memory import CacheMemory, CacheNeeds
from ebbtide.rollout.paged.cpu_runner import CpuRunner
from ebbtide.rollout.paged.runner import Runner
from ebbtide.rollout.paged.scheduler import Scheduler
from ebbtide.rollout.paged.session import PersistentSession, Session
from ebbtide.rollout.stopping import StopCondition
from ebbtide.system.units import ceil_div


class PagedEngine:
    """Generates with the tensors that are trained; the KV cache is allocated for each call and freed after it."""

    def __init__(
        self,
        loaded: LoadedModel,
        batch: int,
        *,
        block: int | None = None,
        chunk: int | None = None,
        blocks: int | None = None,
        share_prompts: bool = True,
        ahead: bool | None = None,
        longest: tuple[int, int] = (1, 1),
        make_room: Callable[[int], None] = lambda size: None,
    ) -> None:
        """At most `batch` samples decode at once. The KV cache has `blocks` blocks of `block` tokens; None: as many as
        are useful and fit into free memory. At most `chunk` tokens are prefilled in one pass.

        `ahead`: asynchronous scheduling, where a step is scheduled before the tokens of the last one are known, so
        that the GPU never waits for the host; None: on a GPU only. `longest`: the most tokens that a prompt and a
        completion will ever have. CUDA graphs captured for these lengths serve all shorter ones. `make_room` is called
        with the bytes of a KV cache before it is allocated.
        """
        self.tokenizer, self._model, self._batch = loaded.tokenizer, loaded.model, batch
        self._end_tokens = loaded.end_tokens
        device = loaded.model.device
        self._block = block or BLOCK_SIZES[device.type]
        self._share = share_prompts
        self._ahead = device.type == "cuda" if ahead is None else ahead
        layout = cache_layout(loaded.model)
        self._runner = self._build_runner(layout)
        self._memory = CacheMemory(
            loaded.model,
            self._runner,
            layout,
            batch=batch,
            block=self._block,
            chunk=chunk or PREFILL_CHUNK_TOKENS[device.type],
            blocks=blocks,
            longest=longest,
            make_room=make_room,
        )
        self._after_generate: Callable[[], None] = lambda: None
        self.preempted = 0
        """How many times a sample was preempted in the last call."""

    @property
    def is_fused(self) -> bool:
        """Whether the model runs with the fused blocks of training, whose bits log-probs can then have."""
        return self._runner.is_fused

    @property
    def block_size(self) -> int:
        """The tokens that one block of the KV cache holds."""
        return self._block

    def _build_runner(self, layout: CacheLayout) -> Runner:
        if self._model.device.type != "cuda":
            return CpuRunner(self._model, self._block)
        from ebbtide.rollout.paged.cuda_runner import CudaRunner

        runner = CudaRunner(self._model, layout, self._batch, self._block)
        if not runner.is_fused:
            fuse_norms(self._model)
        return runner

    @contextmanager
    def probing(self) -> Iterator[None]:
        """Within this context, generation is a probe: no CUDA graph is captured, no buffer is kept for later, and
        `make_room` is not called."""
        with self._runner.probing(), self._memory.without_making_room():
            yield
        self.preempted = 0

    @contextmanager
    def after_generate(self, callback: Callable[[], None]) -> Iterator[None]:
        """Within this context, `callback` is called whenever the samples of `generate` are done, or a persistent
        session has been suspended. No KV cache is attached then, so that the callback can open a session of its own."""
        self._after_generate = callback
        try:
            yield
        finally:
            self._after_generate = lambda: None

    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, progress: Progress
    ) -> list[list[Completion]]:
        seeds = sum(len(request.seeds) for request in requests)
        if not seeds:
            self.preempted = 0
            return [[] for _ in requests]
        prompts = [(len(request.prompt), len(request.seeds)) for request in requests]
        ended = 0
        with self.session(prompts, sampling.max_new_tokens) as session:
            groups = [session.add(request, sampling) for request in requests]
            while not session.finished:
                ended += sum(state.finish is not None for state in session.step())
                progress(ended, seeds)
            self.preempted = session.preempted
        self._after_generate()
        return [[state.completion() for state in group] for group in groups]

    @contextmanager
    def session(self, prompts: Sequence[tuple[int, int]], new: int) -> Iterator[Session]:
        """Opens a session with a KV cache for `prompts`, pairs of a prompt's length and its number of samples, with at
        most `new` tokens for each sample. An engine has one open session at a time."""
        useful = useful_blocks(list(prompts), new, self._batch, self._block, shared=self._share)
        prompt = max(self._memory.blocks_for(length) for length, _ in prompts)
        own = self._memory.blocks_for(new)
        running = min(self._batch, sum(samples for _, samples in prompts))
        sequences = running + min(running, len(prompts)) if self._share else 2 * running
        with self._open(CacheNeeds(useful, prompt, own, prompt + own, sequences)) as session:
            yield session

    @contextmanager
    def serving_session(self, longest: int) -> Iterator[Session]:
        """Opens a session whose requests are not known yet, as a server's: its KV cache is for as many samples as
        decode at once, each of at most `longest` tokens with its prompt."""
        needed = self._memory.blocks_for(longest)
        # Prompt and completion are each rounded up to whole blocks.
        blocks = self._batch * (needed + 2)
        with self._open(CacheNeeds(blocks, needed, needed, needed + 1, 2 * self._batch)) as session:
            yield session

    @contextmanager
    def turn_session(self, sequences: int, samples: int, prompt: int, new: int) -> Iterator[Session]:
        """Opens a session for sequences of several turns, of which `samples` share a prompt of at most `prompt` tokens.
        A sequence has at most `new` tokens after it. Its KV cache has room for all of them, also for those that wait
        for their environments, as far as memory allows."""
        longest, own = self._memory.blocks_for(prompt), self._memory.blocks_for(new)
        shared = ceil_div(sequences, samples) if self._share else sequences
        useful = shared * longest + sequences * (own + 1)
        with self._open(CacheNeeds(useful, longest, own, longest + own, shared + sequences)) as session:
            yield session

    def call_after_generate(self) -> None:
        """Calls what `after_generate` was given, once a session of rollouts is closed."""
        self._after_generate()

    @contextmanager
    def _open(self, needs: CacheNeeds) -> Iterator[Session]:
        size = self._memory.find_size(needs)
        session = self._session(size)
        with self._memory.counted(size):
            try:
                self._memory.attach(self._memory.allocate(size), needs)
                with torch.no_grad():
                    yield session
            finally:
                self._memory.detach()

    def persistent_session(self, prompts: int, prompt: int, samples: int, new: int, *, keep: bool) -> PersistentSession:
        """Makes a session for partial rollouts: for `prompts` prompts of at most `prompt` tokens, with `samples`
        samples each of at most `new` tokens. With `keep`, its KV cache is kept while it is suspended."""
        longest, own = self._memory.blocks_for(prompt), self._memory.blocks_for(new)
        shared = 1 if self._share else samples
        running = min(self._batch, prompts * samples)
        useful = prompts * shared * longest + running * (own + 1)
        needs = CacheNeeds(useful, longest, own, longest + own, running + min(running, prompts * shared))
        return PersistentSession(
            self._session(self._memory.empty_size),
            self._memory,
            needs,
            keep=keep,
            on_suspend=lambda: self._after_generate(),
        )

    def cache_tensor_bytes(self, blocks: int, sequences: int) -> dict[HoldingName, list[int]]:
        """Returns the bytes of each tensor of a KV cache of `blocks` blocks, and of the states of so many sequences
        where the model's layers have states."""
        states = None if self._memory.empty_size.states is None else sequences
        return self._memory.tensor_bytes(CacheSize(blocks, states))

    def _session(self, size: CacheSize) -> Session:
        scheduler = Scheduler(size, self._block, batch=self._batch, chunk=self._memory.chunk)
        return Session(self._runner, scheduler, self._stop_condition, self._share, self._ahead)

    def _stop_condition(self, sampling: SamplingParams) -> StopCondition:
        return StopCondition(sampling, self.tokenizer, self._end_tokens)
