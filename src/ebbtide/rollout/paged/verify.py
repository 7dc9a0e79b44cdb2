"""Checks the paged engine against the model's own forward before it samples anything.

A probe samples several sequences together: a prompt that is longer than every window and is prefilled in chunks, with
several samples that share it, and short ones beside it. Midway one sequence is cancelled and all others are preempted,
so that they go on in other blocks and rows. Their log-probs have to be the model's own; and when the prompts of the
others change, those of a sequence have to stay, to the bit in 16 bits and to 1e-5 nats in float32.

In 16 bits the first comparison sees what is larger than a few times the model's own rounding (`tolerance` in
policy/packed_check.py), and with experts so does the second (`allowed_move`). In exact mode
`why_not_exact_sampler` compares with the trainer, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING

import torch
from transformers import PretrainedConfig

from ebbtide.model.load import LoadedModel
from ebbtide.model.row_adapters import row_adapters
from ebbtide.policy.datum import Datum
from ebbtide.policy.packed_check import allowed_move
from ebbtide.policy.probe import (
    ProbeSequence,
    check_attention,
    probes,
    refuse_broken_model,
)
from ebbtide.progress import no_progress
from ebbtide.rollout.engine import Completion, Engine, Request, SamplingParams
from ebbtide.rollout.paged.attention import paged_cannot_run
from ebbtide.rollout.paged.engine import PagedEngine
from ebbtide.rollout.sampled_check import check_own, plain_logprobs

if TYPE_CHECKING:
    from ebbtide.policy.policy import Policy

NEW = 8  # tokens that are sampled: the first by prefill, the others by decode, the second half after a preemption
CHUNKS = 3  # parts in which the longest prompt is prefilled


def build_verified_engine(
    loaded: LoadedModel,
    batch: int,
    *,
    longest: tuple[int, int],
    samples: int = 1,
    make_room: Callable[[int], None] = lambda size: None,
) -> PagedEngine:
    """Builds an engine for prompts and completions of at most `longest` tokens, with `samples` samples for each prompt.
    It raises if the engine does not compute what the model's own forward computes. `make_room` is called with the bytes
    of a KV cache before it is allocated, except for this check."""
    model, total = loaded.model, sum(longest)
    both = probes(model.config, total, min(len(loaded.tokenizer), loaded.vocabulary_rows))
    check_attention(model, total, both)
    engine = PagedEngine(loaded, batch, longest=longest, make_room=make_room)
    requests = probe_requests(both, samples, row_adapters(model).count)
    sampling = SamplingParams(min(NEW, len(both[0].completion)), ignore_eos=True)
    with refuse_broken_model(lambda why: paged_cannot_run(model.config, why)), engine.probing():
        found = generate_probe(engine, requests, sampling)
        allowed = allowed_move(model, check_own(loaded, requests, found, partial(paged_cannot_run, model.config)))
        for kept in range(1, len(requests)):
            changed = [request if place == kept else _changed(request) for place, request in enumerate(requests)]
            again = generate_probe(engine, changed, sampling)
            _check_kept(model.config, found[kept], again[kept], allowed)
    return engine


def probe_requests(both: tuple[ProbeSequence, ProbeSequence], samples: int, adapters: int) -> list[Request]:
    """A short prompt whose sample is cancelled midway, the long one, with the last of `adapters` adapters, and a short
    one without."""
    long, short = both
    # As many samples for a prompt as a run will have, so that no kernel is compiled only for this check.
    seeds = list(range(max(2, min(samples, 16))))
    return [
        Request(short.tokens[::-1][: len(long.prompt)], [0], adapters),
        Request(long.prompt, seeds, adapters),
        Request(short.prompt, [0], 0),
    ]


def generate_probe(
    engine: PagedEngine, requests: Sequence[Request], sampling: SamplingParams
) -> list[list[Completion]]:
    """Samples requests together, prefilled in chunks. Midway the first is cancelled, so that it has no completions, and
    all others are preempted: they go on in the blocks and rows of other sequences."""
    prompts = [(len(request.prompt), len(request.seeds)) for request in requests]
    with engine.session(prompts, sampling.max_new_tokens) as session:
        session.set_prefill_chunk(min(session.prefill_chunk, 1 + max(length for length, _ in prompts) // CHUNKS))
        cancelled, *groups = [session.add(request, sampling) for request in requests]
        others = [state for group in groups for state in group]
        while min(len(state.tokens) for state in others) < sampling.max_new_tokens // 2:
            session.step()
        session.drain()
        for state in cancelled:
            if state.finish is None:
                session.cancel(state)
        session.preempt_all()
        while not session.finished:
            session.step()
    return [[], *([state.completion() for state in group] for group in groups)]


def _changed(request: Request) -> Request:
    """The request with as many other tokens."""
    return Request([request.prompt[-1]] * len(request.prompt), request.seeds, request.adapter)


def _check_kept(
    config: PretrainedConfig, before: Sequence[Completion], after: Sequence[Completion], allowed: float
) -> None:
    """Checks that log-probs stayed when other sequences changed. What follows the first other token is not compared: it
    is another sequence, whose log-probs were compared with the model's own if it comes from more than rounding."""
    for one, other in zip(before, after, strict=True):
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one.tokens, other.tokens, strict=True)))
        moved = (plain_logprobs(one) - plain_logprobs(other))[:same].abs()
        if not same or not moved.max() <= allowed:
            raise paged_cannot_run(
                config,
                f"log-probs of a sample move by {moved.max() if same else float('inf'):.3g} nats when other prompts of"
                " the batch change: it computes something over all tokens of a batch",
            )


def why_not_exact_sampler(policy: Policy, engine: Engine, samples: int) -> str:
    """Why the log-probs that an engine records are not the trainer's of the same tokens, to the bit; empty if they
    are."""
    if not isinstance(engine, PagedEngine) or not engine.is_fused:
        return "the sampler's fused blocks do not compute what the model's own forward does"
    off = _trainer_distance(policy, engine, samples)
    return f"the trainer's log-probs of a probe are up to {off:.3g} nats from the sampler's" if off else ""


def _trainer_distance(policy: Policy, engine: PagedEngine, samples: int) -> float:
    """The largest difference between an engine's log-probs of what it samples and the trainer's of the same tokens."""
    config, model = policy.config, policy.model
    both = probes(model.config, config.max_sequence_tokens, min(len(policy.tokenizer), policy.vocabulary_rows))
    requests = probe_requests(both, samples, 0)
    sampling = SamplingParams(min(NEW, len(both[0].completion)), config.logprob_temperature, ignore_eos=True)
    with engine.probing():
        found = generate_probe(engine, requests, sampling)
    pairs = [(request, one) for request, group in zip(requests, found, strict=True) for one in group]
    data = [Datum.completion(request.prompt, one.tokens) for request, one in pairs]
    policy.compute_logprobs("probed", data, no_progress)
    trainer = [torch.as_tensor(datum.values["probed"]).cpu() for datum in data]
    sampler = [torch.tensor(one.logprobs) for _, one in pairs]
    return (torch.cat(trainer) - torch.cat(sampler)).abs().max().item()
