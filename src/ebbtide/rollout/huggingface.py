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
from transformers import PreTrainedTokenizerBase as Tokenizer

from ebbtide.errors import UserError
from ebbtide.policy.attention import attention
from ebbtide.policy.model import Loaded
from ebbtide.progress import Progress
from ebbtide.rollout.engine import Completion, Request, Sampling
from ebbtide.rollout.sampling import choose, uniforms


class HuggingFaceEngine:
    def __init__(self, loaded: Loaded, batch: int) -> None:
        self._model, self._tokenizer, self._attention = loaded.model, loaded.tokenizer, loaded.generate_attention
        self._batch = batch
        self._end_tokens = _end_tokens(loaded)

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
        pad = self._tokenizer.pad_token_id or 0  # padding is masked: any token will do
        ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)  # [B, L]
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        chooser = _Chooser(uniforms(seeds, sampling.max_new_tokens, device), sampling, count)
        stops = _StopTexts(sampling.stop, self._tokenizer, self._end_tokens, longest, len(prompts))
        settings = GenerationConfig(
            max_new_tokens=sampling.max_new_tokens, do_sample=False, eos_token_id=self._end_tokens or None, pad_token_id=pad
        )
        with attention(self._model, self._attention), _plain_defaults(self._model):
            self._model.generate(
                ids,
                attention_mask=mask,
                generation_config=settings,
                logits_processor=LogitsProcessorList([chooser]),
                stopping_criteria=StoppingCriteriaList([stops] if sampling.stop else []),
            )
        tokens = torch.stack(chooser.tokens, 1).tolist()  # [B][N]
        logprobs = torch.stack(chooser.logprobs, 1).tolist()
        if not all(map(math.isfinite, itertools.chain(*logprobs))):
            raise UserError(
                "the model's logits are not finite: its weights have diverged. Lower `optimizer.lr`, lengthen `optimizer.warmup_steps`, "
                "or set `optimizer.clip_norm`; metrics.jsonl shows when it began"
            )
        return [
            self._completion(row_tokens, row_logprobs, stops.ended[row], sampling)
            for row, (row_tokens, row_logprobs) in enumerate(zip(tokens, logprobs, strict=True))
        ]

    def _completion(self, tokens: list[int], logprobs: list[float], stopped_at: int | None, sampling: Sampling) -> Completion:
        ends = (place + 1 for place, token in enumerate(tokens) if token in self._end_tokens)
        end_token_at = next(ends, None)
        stop_points = [point for point in (end_token_at, stopped_at) if point is not None]
        length = min(stop_points, default=len(tokens))
        text = self._tokenizer.decode(tokens[:length], skip_special_tokens=True)
        cut = min((place for place in map(text.find, sampling.stop) if place >= 0), default=len(text))
        return Completion(tokens[:length], logprobs[:length], "stop" if stop_points else "length", text[:cut])


def _end_tokens(loaded: Loaded) -> list[int]:
    """Every token that ends a completion: a chat model has its end of turn beside its end of text."""
    named = loaded.model.generation_config.eos_token_id if loaded.model.generation_config is not None else None
    found = set(named if isinstance(named, list) else [named])
    found.add(loaded.tokenizer.eos_token_id)
    return sorted(token for token in found if token is not None)


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
        self.tokens: list[Tensor] = []  # [N] of [B]
        self.logprobs: list[Tensor] = []  # [N] of [B]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        tokens, logprobs = choose(scores, self._uniform[:, len(self.tokens)], self._sampling)
        self.tokens.append(tokens)
        self.logprobs.append(logprobs)
        self._count(len(self.tokens))
        return torch.full_like(scores, -torch.inf).scatter_(-1, tokens[:, None], 0.0)


class _StopTexts(StoppingCriteria):  # type: ignore[misc]
    """Ends a row when a stop text stands at the end of its completion; `ended` keeps after how many tokens."""

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer, end_tokens: Sequence[int], prompt_length: int, rows: int) -> None:
        self._texts, self._tokenizer, self._end_tokens, self._prompt_length = texts, tokenizer, set(end_tokens), prompt_length
        # A token is a byte at least; a few more, as the first ones of a window may decode otherwise than in their place.
        self._window = max((len(text.encode()) for text in texts), default=0) + 8
        self._open = set(range(rows))
        self.ended: list[int | None] = [None] * rows

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        length = input_ids.shape[1] - self._prompt_length
        tails = input_ids[:, -min(self._window, length) :].tolist()
        for row in sorted(self._open):
            text = self._tokenizer.decode(tails[row], skip_special_tokens=False)
            if any(stop in text for stop in self._texts):
                self.ended[row] = length
            if self.ended[row] is not None or tails[row][-1] in self._end_tokens:
                self._open.remove(row)
        return torch.tensor([end is not None for end in self.ended], device=input_ids.device)
