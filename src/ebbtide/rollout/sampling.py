"""Samples tokens: one uniform number for each sample and position, and the inverse of the cumulative distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from ebbtide.rollout.engine import SamplingParams

PAGE = 64  # numbers generated at once


class Uniforms:
    """Uniform numbers in [0, 1), the same for a seed on every device, generated when they are needed."""

    def __init__(self, seed: int) -> None:
        self._generator = numpy.random.Generator(numpy.random.Philox(seed))
        self._drawn = self._generator.random(PAGE)

    def __getitem__(self, position: int) -> float:
        while position >= len(self._drawn):
            self._drawn = numpy.concatenate([self._drawn, self._generator.random(PAGE)])
        return float(self._drawn[position])


def uniforms(seeds: Sequence[int], positions: int) -> Tensor:
    """Returns uniform numbers [samples, positions], where row i depends on seeds[i] alone."""
    return torch.tensor(
        [[numbers[position] for position in range(positions)] for numbers in map(Uniforms, seeds)], dtype=torch.float64
    )


def sample_tokens(logits: Tensor, uniform: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor, Tensor]:
    """Samples from fp32 logits [B, V] by one uniform number per row [B]. Returns the tokens [B], their log-probs [B] at
    the temperature (greedy: at 1), and their log-probs [B] at 1.

    The log-probs are over the whole vocabulary, also where top-k, top-p and min-p leave tokens out: the trainer
    computes the same.
    """
    plain = logits
    if sampling.temperature == 0:
        tokens = logits.argmax(-1)
    else:
        logits = logits / sampling.temperature
        parts = integer_probs(_truncated(logits, sampling)).cumsum(-1)  # [B, V]
        target = (uniform * parts[:, -1]).long()  # [B], below the last sum
        # Logits that are not finite can give an index out of range: it is clamped here, and the engine sees that the
        # log-probs are not finite.
        tokens = torch.searchsorted(parts, target[:, None], right=True)[:, 0].clamp(0, logits.shape[-1] - 1)
    logprobs, plain_logprobs = (
        values.gather(-1, tokens[:, None])[:, 0] - values.logsumexp(-1) for values in (logits, plain)
    )
    return tokens, logprobs, plain_logprobs


def integer_probs(logits: Tensor) -> Tensor:
    """Returns probabilities [B, V] as integers, which add up to the same sum in any order: so the same token is sampled
    on every device and in every batch.

    2^50 parts resolve the rarest of 152k tokens, which a sum in float32 would drop.
    """
    return (logits.double().softmax(-1) * 2**50).long()


def _truncated(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Masks with -inf what top-k, then top-p, then min-p leave out."""
    if 0 < sampling.top_k < logits.shape[-1]:
        weakest = logits.topk(sampling.top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < weakest, -math.inf)
    if sampling.top_p < 1:
        ordered = logits.sort(-1, descending=True).values
        parts = integer_probs(ordered)
        before = parts.cumsum(-1) - parts  # the sum over all likelier tokens
        weakest = ordered.masked_fill(before >= sampling.top_p * parts.sum(-1, keepdim=True), math.inf).amin(
            -1, keepdim=True
        )
        logits = logits.masked_fill(logits < weakest, -math.inf)  # tokens as likely as the last one stay too
    if sampling.min_p > 0:
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(sampling.min_p), -math.inf)
    return logits
