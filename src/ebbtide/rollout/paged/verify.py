"""Checks the paged engine against the model's own forward before it samples anything."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PretrainedConfig

from ebbtide.model.load import LoadedModel
from ebbtide.model.row_adapters import row_adapters
from ebbtide.policy.attention_calls import AttentionCall
from ebbtide.policy.probe import (
    TOLERANCE,
    ProbeSequence,
    check_attention,
    own_logprobs,
    probes,
    refuse_broken_model,
)
from ebbtide.rollout.engine import Request, SamplingParams
from ebbtide.rollout.paged.attention import paged_cannot_run
from ebbtide.rollout.paged.engine import PagedEngine

# The allowed difference, in units of TOLERANCE: decode rounds differently from a forward of whole sequences, in every
# layer. In bfloat16 the difference was 0.03 to 0.06 nats in measured runs.
ALLOWED = 2.5
NEW = 4  # tokens that are sampled: the first by prefill, the others by decode


def build_verified_engine(
    loaded: LoadedModel,
    batch: int,
    *,
    longest: tuple[int, int],
    samples: int = 1,
    make_room: Callable[[int], None] = lambda size: None,
    exact: bool = False,
) -> PagedEngine:
    """Builds an engine for prompts and completions of at most `longest` tokens, with `samples` samples for each prompt.
    It raises if the engine does not compute what the model's own forward computes. `make_room` is called with the bytes
    of a KV cache before it is allocated, except for this check. `exact`: see `PagedEngine`."""
    model, total = loaded.model, sum(longest)
    both = probes(model.config, total, min(len(loaded.tokenizer), loaded.vocabulary_rows))
    _check_cache(check_attention(model, total, both), model.config)
    engine = PagedEngine(loaded, batch, longest=longest, make_room=make_room, exact=exact)
    new = min(NEW, len(both[0].completion))
    # As many samples for a prompt as a run will have, so that no kernel is compiled only for this check.
    adapters = row_adapters(model)
    used = adapters.count, 0  # the last of several adapters, and none
    requests = [Request(both[0].prompt, list(range(min(samples, 16))), used[0]), Request(both[1].prompt, [0], used[1])]
    with refuse_broken_model(lambda why: paged_cannot_run(model.config, why)), engine.probing():
        found = [
            group[0] for group in engine.generate(requests, SamplingParams(new, ignore_eos=True), lambda done, of: None)
        ]
    sequences = [ProbeSequence(probe.prompt, sample.tokens) for probe, sample in zip(both, found, strict=True)]
    own = []
    for sequence, adapter in zip(sequences, used, strict=True):
        with adapters.chosen(torch.tensor([adapter], device=model.device)):
            own.append(own_logprobs(model, loaded.generate_attention, sequence))
    sampled = torch.tensor([logprob for sample in found for logprob in sample.plain_logprobs])
    difference = (torch.cat(own).cpu() - sampled).abs().mean().item()
    if not difference <= ALLOWED * TOLERANCE[model.dtype]:
        why = f"its log-probs are {difference:.3g} nats from the model's own on average, which is more than rounding"
        raise paged_cannot_run(model.config, why)
    return engine


def _check_cache(calls: list[AttentionCall], config: PretrainedConfig) -> None:
    """Checks that each layer calls attention once."""
    layers = int(config.get_text_config().num_hidden_layers)
    if sorted(call.layer for call in calls if call.layer is not None) != list(range(layers)):
        raise paged_cannot_run(config, f"its {layers} layers do not call attention once each")
