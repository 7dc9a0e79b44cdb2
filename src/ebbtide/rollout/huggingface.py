"""The engine on transformers' own `generate`, with the weights that are trained: it works for every model and is fast
for none."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from ebbtide.model.load import LoadedModel
from ebbtide.policy.attention import scales_by_place, use_attention
from ebbtide.progress import Progress
from ebbtide.rollout.engine import Completion, Request, SamplingParams, diverged_error
from ebbtide.rollout.sampling import sample_tokens, uniforms
from ebbtide.rollout.stopping import StopCondition


class HuggingFaceEngine:
    def __init__(self, loaded: LoadedModel, batch: int) -> None:
        self._model, self._tokenizer, self._attention = loaded.model, loaded.tokenizer, loaded.generate_attention
        self._batch = batch
        self._pads = not scales_by_place(loaded.model.config.get_text_config())
        self._end_tokens = loaded.end_tokens

    @torch.no_grad()
    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, progress: Progress
    ) -> list[list[Completion]]:
        samples = [(index, request.prompt, seed) for index, request in enumerate(requests) for seed in request.seeds]
        # Prompts of similar length share a batch, so that there is little padding.
        order = sorted(range(len(samples)), key=lambda i: len(samples[i][1]))
        alike = [order] if self._pads else _of_equal_length(order, [len(prompt) for _, prompt, _ in samples])
        batches = [some[start : start + self._batch] for some in alike for start in range(0, len(some), self._batch)]
        completions: dict[int, Completion] = {}
        for number, members in enumerate(batches):

            def report(position: int, number: int = number) -> None:
                progress(number * sampling.max_new_tokens + position, len(batches) * sampling.max_new_tokens)

            prompts, seeds = [samples[i][1] for i in members], [samples[i][2] for i in members]
            completions.update(zip(members, self._complete(prompts, seeds, sampling, report), strict=True))
        groups: list[list[Completion]] = [[] for _ in requests]
        for number, (index, _, _) in enumerate(samples):
            groups[index].append(completions[number])
        return groups

    def _complete(
        self,
        prompts: Sequence[list[int]],
        seeds: Sequence[int],
        sampling: SamplingParams,
        report: Callable[[int], None],
    ) -> list[Completion]:
        device = self._model.device
        longest = max(map(len, prompts))
        pad = 0  # padding is masked: any token will do
        ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)  # [B, L]
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        sampler = _TokenSampler(uniforms(seeds, sampling.max_new_tokens).to(device), sampling, report)
        stop_condition = StopCondition(sampling, self._tokenizer, self._end_tokens)
        stops = _StopCriteria(stop_condition, longest, len(prompts))
        ends = sampling.end_tokens(self._end_tokens)
        settings = GenerationConfig(
            max_new_tokens=sampling.max_new_tokens, do_sample=False, eos_token_id=ends or None, pad_token_id=pad
        )
        with use_attention(self._model, self._attention), _plain_defaults(self._model):
            self._model.generate(
                ids,
                attention_mask=mask,
                generation_config=settings,
                logits_processor=LogitsProcessorList([sampler]),
                stopping_criteria=StoppingCriteriaList([stops] if sampling.stop else []),
            )
        # Each is [B][N].
        tokens, logprobs, plain = (torch.stack(columns, 1).tolist() for columns in zip(*sampler.sampled, strict=True))
        if not all(map(math.isfinite, itertools.chain(*logprobs))):
            raise diverged_error()
        return [
            self._completion(stop_condition, tokens[row], logprobs[row], plain[row], ends, stopped_at)
            for row, stopped_at in enumerate(stops.ended)
        ]

    @staticmethod
    def _completion(
        stop_condition: StopCondition,
        tokens: list[int],
        logprobs: list[float],
        plain: list[float],
        end_tokens: Sequence[int],
        stopped_at: int | None,
    ) -> Completion:
        ends = (index + 1 for index, token in enumerate(tokens) if token in end_tokens)
        stop_points = [point for point in (next(ends, None), stopped_at) if point is not None]
        length = min(stop_points, default=len(tokens))
        return stop_condition.completion(tokens[:length], logprobs[:length], plain[:length], stopped=bool(stop_points))


def _of_equal_length(order: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Splits indices that are sorted by their lengths."""
    return [list(some) for _, some in itertools.groupby(order, key=lambda index: lengths[index])]


@contextmanager
def _plain_defaults(model: Any) -> Iterator[None]:
    """Runs `generate` without the model's own generation config: its repetition penalty and the like would silently
    change what is sampled."""
    before = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = before


class _TokenSampler(LogitsProcessor):  # type: ignore[misc]
    """Samples inside `generate`: it masks all tokens but the sampled one, and keeps that with its log-probs."""

    def __init__(self, uniform: Tensor, sampling: SamplingParams, report: Callable[[int], None]) -> None:
        self._uniform, self._sampling, self._report = uniform, sampling, report  # [B, N]
        self.sampled: list[tuple[Tensor, Tensor, Tensor]] = []  # tokens, log-probs, plain log-probs: [N] of [B] each

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.sampled.append(sample_tokens(scores, self._uniform[:, len(self.sampled)], self._sampling))
        self._report(len(self.sampled))
        return torch.full_like(scores, -torch.inf).scatter_(-1, self.sampled[-1][0][:, None], 0.0)


class _StopCriteria(StoppingCriteria):  # type: ignore[misc]
    """Ends a row where its completion ends; `ended` has the number of its tokens then."""

    def __init__(self, stop_condition: StopCondition, prompt_length: int, rows: int) -> None:
        self._stop_condition, self._prompt_length = stop_condition, prompt_length
        self.ended: list[int | None] = [None] * rows

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        length = input_ids.shape[1] - self._prompt_length
        for row, tokens in enumerate(input_ids[:, -min(length, self._stop_condition.window + 1) :].tolist()):
            if self.ended[row] is None and self._stop_condition.is_reached(tokens[:-1], tokens[-1]):
                self.ended[row] = length
        return torch.tensor([end is not None for end in self.ended], device=input_ids.device)
