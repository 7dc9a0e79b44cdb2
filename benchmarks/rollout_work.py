"""What rollout.py and rollout_vllm.py generate, and the least time that it can take."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from common import Row

from ebbtide.rollout.engine import Request, SamplingParams

if TYPE_CHECKING:
    from ebbtide.model.load import LoadedModel
    from ebbtide.rollout.paged.engine import PagedEngine

BANDWIDTH, COMPUTE = 4.8e12, 989e12  # bytes and FLOP a second of an H200

Work = Sequence[tuple[Request, SamplingParams]]


def grpo_work(prompts: int, new: int = 256, vocabulary: int = 150_000) -> Work:
    """Prompts of 126 tokens with 8 samples each."""
    chance, sampling = random.Random(0), SamplingParams(new, ignore_eos=True)
    return [
        (Request([chance.randrange(5, vocabulary) for _ in range(126)], [8 * n + i for i in range(8)]), sampling)
        for n in range(prompts)
    ]


def lengths_work(longest: int = 1024) -> Work:
    """256 prompts of 100 to 1,024 tokens with as many new ones: nano-vllm's benchmark. With a smaller `longest` all are
    shorter, down to 1, for a warm-up with as many rows."""
    chance, least = random.Random(2711), min(100, longest // 8)
    prompts = [[chance.randint(5, 10_000) for _ in range(chance.randint(least, longest))] for _ in range(256)]
    return [
        (Request(prompt, [n]), SamplingParams(chance.randint(least, longest), 0.6, ignore_eos=True))
        for n, prompt in enumerate(prompts)
    ]


def new_tokens(work: Work) -> int:
    return sum(len(request.seeds) * sampling.max_new_tokens for request, sampling in work)


def bound(loaded: LoadedModel, work: Work) -> float:
    """Seconds that the workload takes where nothing but memory and matrix units limit it: weights are read once a step,
    of a mixture all experts, and keys and values once for each sample or, of a prompt, for its group."""
    from ebbtide.rollout.paged.attention import model_cache_costs

    config = loaded.model.config
    steps = max(sampling.max_new_tokens for _, sampling in work)
    own = sum(len(request.seeds) * sampling.max_new_tokens**2 // 2 for request, sampling in work)
    prompts = sum(len(request.prompt) * sampling.max_new_tokens for request, sampling in work)
    read = sum(len(request.prompt) for request, _ in work)
    named = dict(loaded.model.named_parameters())
    experts: int = sum(weight.numel() for name, weight in named.items() if ".experts." in name)
    share: float = getattr(config, "num_experts_per_tok", 1) / getattr(config, "num_experts", 1) if experts else 1.0
    weights = weight_numbers(loaded)
    multiplied = weights - experts * (1 - share)
    cached = model_cache_costs(config).bytes_per_token(2) * (own + prompts)
    return (steps * 2 * weights + cached) / BANDWIDTH + 2 * multiplied * read / COMPUTE


def weight_numbers(loaded: LoadedModel) -> int:
    """The numbers that a step reads: all but an embedding that is not the head as well."""
    embedding: torch.Tensor = loaded.model.get_input_embeddings().weight
    weights: int = sum(parameter.numel() for parameter in loaded.model.parameters())
    tied = loaded.model.get_output_embeddings().weight is embedding
    return weights - (0 if tied else embedding.numel())


def timed(engine: PagedEngine, work: Work) -> float:
    _wait()
    start = time.perf_counter()
    with engine.session(
        [(len(request.prompt), len(request.seeds)) for request, _ in work], max(s.max_new_tokens for _, s in work)
    ) as session:
        told = [session.add(request, sampling) for request, sampling in work]
        while not session.finished:
            session.step()
    _wait()
    taken = time.perf_counter() - start
    assert all(len(one.tokens) == one.sampling.max_new_tokens for group in told for one in group)
    return taken


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def speeds(label: str, work: Work, seconds: Sequence[float], least: float | None = None) -> list[Row]:
    """The rows of a workload that took so long; `least`: its bound."""
    taken = statistics.median(seconds)
    rows = [Row(label, "tokens a second", new_tokens(work) / taken, "tok/s")]
    if least is not None:
        rows.append(Row(label, "of the bound", 100 * least / taken, "%"))
    apart = 100 * (max(seconds) / min(seconds) - 1)
    return [*rows, Row(label, "seconds", taken, "s"), Row(label, "slowest off the fastest", apart, "%")]
