"""Continuous batching over a paged cache, with the policy's own weights: nothing is refitted between updates and rollouts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from ebbtide.errors import UserError
from ebbtide.memory.arena import free_host_bytes
from ebbtide.policy.attention import attention
from ebbtide.policy.model import Loaded, decoder, head_shape, head_weight
from ebbtide.progress import Progress
from ebbtide.rollout.ending import Ending, end_tokens
from ebbtide.rollout.engine import Completion, Request, Sampling, diverged
from ebbtide.rollout.paged.cache import PAGED, Cache, step_for
from ebbtide.rollout.paged.schedule import Blocks, Chunk, Sample, Schedule
from ebbtide.rollout.sampling import choose, uniforms

SHARE = 0.9  # of the memory that is free when generation begins


class PagedEngine:
    def __init__(
        self, loaded: Loaded, batch: int, *, block: int = 16, chunk: int = 8192, blocks: int | None = None, share_prompts: bool = True
    ) -> None:
        """`batch` samples decode at once; `blocks` of `block` tokens are the cache, as many as are useful and fit where that is None."""
        self._model, self._tokenizer = loaded.model, loaded.tokenizer
        self._end_tokens = end_tokens(loaded)
        self._batch, self._block, self._chunk, self._blocks, self._share = batch, block, chunk, blocks, share_prompts
        config = loaded.model.config.get_text_config()
        self._layers = int(config.num_hidden_layers)
        self._heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
        self._channels = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        self.preempted = 0
        """Samples that gave way in the last call."""

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: Sampling, progress: Progress) -> list[list[Completion]]:
        seeds = [seed for request in requests for seed in request.seeds]
        if not seeds:
            return [[] for _ in requests]
        prompts = (
            [(request.prompt, len(request.seeds)) for request in requests]
            if self._share
            else [(request.prompt, 1) for request in requests for _ in request.seeds]
        )
        blocks = Blocks(self._count(prompts, sampling.max_new_tokens))
        schedule = Schedule(prompts, blocks, self._block, batch=self._batch, chunk=self._chunk)
        weight = next(self._model.parameters())
        cache = Cache(self._layers, blocks.count * self._block, self._heads, self._channels, weight.dtype, weight.device)
        run = _Run(self, schedule, cache, sampling, uniforms(seeds, sampling.max_new_tokens, weight.device))
        with attention(self._model, PAGED):
            while not schedule.finished:
                run.step()
                progress(sum(sample.done for sample in schedule.samples), len(schedule.samples))
        self.preempted = schedule.preempted
        assert blocks.free == blocks.count
        done = iter(run.completions[sample.number] for sample in schedule.samples)
        return [[next(done) for _ in request.seeds] for request in requests]

    def _count(self, prompts: Sequence[tuple[Sequence[int], int]], new: int) -> int:
        """Blocks of the cache: enough for all at once, or as many as memory has room for."""
        if self._blocks is not None:
            count = self._blocks
        else:
            running = min(self._batch, sum(samples for _, samples in prompts))
            useful = sum(self._needed(len(prompt)) for prompt, _ in prompts) + running * (self._needed(new) + 1)
            weight = next(self._model.parameters())
            each = 2 * self._layers * self._block * self._heads * self._channels * weight.element_size()
            count = min(useful, int(SHARE * _free_bytes(weight.device)) // each)
        longest = max(self._needed(len(prompt)) for prompt, _ in prompts) + self._needed(new)
        if count < longest:
            raise UserError(
                f"the cache has room for {count * self._block:,} tokens, and one sample may need {longest * self._block:,}: lower `rollout.max_new_tokens` or "
                "`rollout.max_prompt_tokens`, or free memory for generation (`memory.away.generate`, `optimizer.place`)"
            )
        return count

    def _needed(self, tokens: int) -> int:
        return -(-tokens // self._block)


class _Run:
    """One call of `generate`."""

    def __init__(self, engine: PagedEngine, schedule: Schedule, cache: Cache, sampling: Sampling, uniform: Tensor) -> None:
        self._model, self._block, self._schedule, self._cache = engine._model, engine._block, schedule, cache
        self._sampling, self._uniform = sampling, uniform  # [samples, max_new_tokens]
        self._ending = Ending(sampling, engine._tokenizer, engine._end_tokens)
        self.completions: dict[int, Completion] = {}

    def step(self) -> None:
        """One pass through the model."""
        work = self._schedule.next()
        step = step_for(work, self._cache, self._block, self._uniform.device)
        hidden = decoder(self._model)(
            input_ids=step.tokens[None], position_ids=step.positions[None], use_cache=False, paged_step=step
        ).last_hidden_state[0]  # [T, H]
        wanting: list[Sample] = []
        rows: list[int] = []
        place = 0
        for item in work:
            if isinstance(item, Sample):
                wanting.append(item)
                rows.append(place)
                place += 1
                continue
            place += item.last - item.first
            if self._schedule.advance(item):
                firsts = _first_tokens(item)
                wanting += firsts
                rows += [place - 1] * len(firsts)
        if wanting:
            self._sample(wanting, hidden[torch.tensor(rows, device=hidden.device)])

    def _sample(self, samples: Sequence[Sample], hidden: Tensor) -> None:
        weight, bias = head_weight(self._model)
        scale, softcap = head_shape(self._model.config)
        logits = linear(hidden, weight, bias).float()
        if softcap is not None:
            logits = (logits / softcap).tanh() * softcap
        numbers = torch.tensor([[sample.number, len(sample.tokens)] for sample in samples], device=logits.device)
        tokens, logprobs = choose(logits * scale, self._uniform[numbers[:, 0], numbers[:, 1]], self._sampling)
        for sample, token, logprob in zip(samples, tokens.tolist(), logprobs.tolist(), strict=True):
            if not math.isfinite(logprob):
                raise diverged()
            stopped = self._ending.reached(sample.tokens, token)
            done = stopped or len(sample.tokens) + 1 == self._sampling.max_new_tokens
            self._schedule.sampled(sample, token, logprob, done=done)
            if done:
                self.completions[sample.number] = self._ending.completion(sample.tokens, sample.logprobs, stopped=stopped)


def _first_tokens(chunk: Chunk) -> list[Sample]:
    """The samples of a prompt that was just read which have no token yet."""
    return [] if isinstance(chunk.of, Sample) else [sample for sample in chunk.of.samples if not sample.tokens and not sample.done]


def _free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return free_host_bytes() // 2
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
