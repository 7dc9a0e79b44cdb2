"""An engine on transformers' own `generate`, with the very weights that are trained: works for every model, fast for none."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from ebbtide.policy.attention import attention
from ebbtide.policy.model import Loaded
from ebbtide.progress import Progress
from ebbtide.rollout.ending import Ending
from ebbtide.rollout.engine import Completion, Request, Sampling, diverged
from ebbtide.rollout.sampling import choose, uniforms


class HuggingFaceEngine:
    def __init__(self, loaded: Loaded, batch: int) -> None:
        self._model, self._tokenizer, self._attention = loaded.model, loaded.tokenizer, loaded.generate_attention
        self._batch = batch
        self._end_tokens = loaded.end_tokens

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: Sampling, progress: Progress) -> list[list[Completion]]:
        samples = [(index, request.prompt, seed) for index, request in enumerate(requests) for seed in request.seeds]
        # Prompts of like length share a batch, so that little of it is padding.
        order = sorted(range(len(samples)), key=lambda i: len(samples[i][1]))
        batches = [order[start : start + self._batch] for start in range(0, len(order), self._batch)]
        completions: dict[int, Completion] = {}
        for number, members in enumerate(batches):

            def count(position: int, number: int = number) -> None:
                progress(number * sampling.max_new_tokens + position, len(batches) * sampling.max_new_tokens)

            prompts, seeds = [samples[i][1] for i in members], [samples[i][2] for i in members]
            completions.update(zip(members, self._complete(prompts, seeds, sampling, count), strict=True))
        groups: list[list[Completion]] = [[] for _ in requests]
        for place, (index, _, _) in enumerate(samples):
            groups[index].append(completions[place])
        return groups

    def _complete(
        self, prompts: Sequence[list[int]], seeds: Sequence[int], sampling: Sampling, count: Callable[[int], None]
    ) -> list[Completion]:
        device = self._model.device
        longest = max(map(len, prompts))
        pad = 0  # padding is masked: any token will do
        ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)  # [B, L]
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        chooser = _Chooser(uniforms(seeds, sampling.max_new_tokens).to(device), sampling, count)
        ending = Ending(sampling, self._tokenizer, self._end_tokens)
        stops = _Stops(ending, longest, len(prompts))
        ends = [] if sampling.ignore_end else self._end_tokens
        settings = GenerationConfig(max_new_tokens=sampling.max_new_tokens, do_sample=False, eos_token_id=ends or None, pad_token_id=pad)
        with attention(self._model, self._attention), _plain_defaults(self._model):
            self._model.generate(
                ids,
                attention_mask=mask,
                generation_config=settings,
                logits_processor=LogitsProcessorList([chooser]),
                stopping_criteria=StoppingCriteriaList([stops] if sampling.stop else []),
            )
        tokens, logprobs, plain = (torch.stack(columns, 1).tolist() for columns in zip(*chooser.drawn, strict=True))  # each [B][N]
        if not all(map(math.isfinite, itertools.chain(*logprobs))):
            raise diverged()
        return [
            self._completion(ending, tokens[row], logprobs[row], plain[row], ends, stopped_at) for row, stopped_at in enumerate(stops.ended)
        ]

    @staticmethod
    def _completion(
        ending: Ending, tokens: list[int], logprobs: list[float], plain: list[float], end_tokens: Sequence[int], stopped_at: int | None
    ) -> Completion:
        ends = (place + 1 for place, token in enumerate(tokens) if token in end_tokens)
        stop_points = [point for point in (next(ends, None), stopped_at) if point is not None]
        length = min(stop_points, default=len(tokens))
        return ending.completion(tokens[:length], logprobs[:length], plain[:length], stopped=bool(stop_points))


@contextmanager
def _plain_defaults(model: Any) -> Iterator[None]:
    """`generate` without the model's own habits (repetition penalties and the like): they would change what is sampled unseen."""
    before = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = before


class _Chooser(LogitsProcessor):  # type: ignore[misc]
    """Samples inside `generate`: leaves only the chosen token possible, and keeps it with its log-prob."""

    def __init__(self, uniform: Tensor, sampling: Sampling, count: Callable[[int], None]) -> None:
        self._uniform, self._sampling, self._count = uniform, sampling, count  # [B, N]
        self.drawn: list[tuple[Tensor, Tensor, Tensor]] = []  # tokens, log-probs, plain log-probs: [N] of [B] each

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.drawn.append(choose(scores, self._uniform[:, len(self.drawn)], self._sampling))
        self._count(len(self.drawn))
        return torch.full_like(scores, -torch.inf).scatter_(-1, self.drawn[-1][0][:, None], 0.0)


class _Stops(StoppingCriteria):  # type: ignore[misc]
    """Ends a row where its completion ends; `ended` keeps after how many tokens."""

    def __init__(self, ending: Ending, prompt_length: int, rows: int) -> None:
        self._ending, self._prompt_length = ending, prompt_length
        self.ended: list[int | None] = [None] * rows

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        length = input_ids.shape[1] - self._prompt_length
        for row, tokens in enumerate(input_ids[:, -min(length, self._ending.window + 1) :].tolist()):
            if self.ended[row] is None and self._ending.reached(tokens[:-1], tokens[-1]):
                self.ended[row] = length
        return torch.tensor([end is not None for end in self.ended], device=input_ids.device)
