"""Chooses tokens: one uniform number per sample and position decides, by the inverse of the cumulative distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from ebbtide.rollout.engine import Sampling

PAGE = 64  # numbers drawn at once


class Uniforms:
    """Numbers in [0, 1), the same for a seed on every device, drawn as they are asked for."""

    def __init__(self, seed: int) -> None:
        self._generator = numpy.random.Generator(numpy.random.Philox(seed))
        self._drawn = self._generator.random(PAGE)

    def __getitem__(self, place: int) -> float:
        while place >= len(self._drawn):
            self._drawn = numpy.concatenate([self._drawn, self._generator.random(PAGE)])
        return float(self._drawn[place])


def uniforms(seeds: Sequence[int], positions: int) -> Tensor:
    """[samples, positions]: row i depends on seeds[i] alone."""
    return torch.tensor([[numbers[place] for place in range(positions)] for numbers in map(Uniforms, seeds)], dtype=torch.float64)


def choose(logits: Tensor, uniform: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor]:
    """From fp32 logits [B, V] and one number per row [B]: the tokens [B], and their log-probs [B] at the temperature (greedy: at 1), and at 1.

    The log-probs are over the whole vocabulary, also where top-k, top-p and min-p cut the choice: that is what a trainer computes as well.
    """
    plain = logits
    if sampling.temperature == 0:
        tokens = logits.argmax(-1)
    else:
        logits = logits / sampling.temperature
        parts = whole_parts(_truncated(logits, sampling)).cumsum(-1)  # [B, V]
        target = (uniform * parts[:, -1]).long()  # [B], below the last sum
        # Logits that are not finite point nowhere: they are kept within bounds here, and the engine finds their log-probs.
        tokens = torch.searchsorted(parts, target[:, None], right=True)[:, 0].clamp(0, logits.shape[-1] - 1)
    logprobs, plain_logprobs = (values.gather(-1, tokens[:, None])[:, 0] - values.logsumexp(-1) for values in (logits, plain))
    return tokens, logprobs, plain_logprobs


def whole_parts(logits: Tensor) -> Tensor:
    """Probabilities [B, V] as whole numbers, which add up to the same sum in any order: the same choice on every device and in every batch.

    2^50 parts resolve the rarest of 152k tokens, which a sum in float32 would drop.
    """
    return (logits.double().softmax(-1) * 2**50).long()


def _truncated(logits: Tensor, sampling: Sampling) -> Tensor:
    """-inf for what top-k, top-p and min-p leave out, each of what the ones before it left."""
    if 0 < sampling.top_k < logits.shape[-1]:
        weakest = logits.topk(sampling.top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < weakest, -math.inf)
    if sampling.top_p < 1:
        ordered = logits.sort(-1, descending=True).values
        parts = whole_parts(ordered)
        before = parts.cumsum(-1) - parts  # of all that is likelier
        weakest = ordered.masked_fill(before >= sampling.top_p * parts.sum(-1, keepdim=True), math.inf).amin(-1, keepdim=True)
        logits = logits.masked_fill(logits < weakest, -math.inf)  # those as likely as the last one stay with it
    if sampling.min_p > 0:
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(sampling.min_p), -math.inf)
    return logits
