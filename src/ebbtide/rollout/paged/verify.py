"""The paged engine, tried against the model's own forward before it samples anything."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from ebbtide.policy.model import Loaded
from ebbtide.policy.probe import TOLERANCE, Asked, Probe, examine, own_logprobs, probes, refusing
from ebbtide.rollout.engine import Request, Sampling
from ebbtide.rollout.paged.attention import not_paged, room_of
from ebbtide.rollout.paged.engine import PagedEngine

# Of TOLERANCE: decoding rounds otherwise than a forward of whole sequences, in every layer. In bfloat16 both were 0.03
# to 0.06 nats apart in measured runs.
ALLOWED = 2.5
NEW = 4  # tokens that are sampled: the first when the prompt is read, the others by decoding


def verified_engine(loaded: Loaded, batch: int, *, longest: tuple[int, int], samples: int = 1) -> PagedEngine:
    """An engine for prompts and completions of at most `longest` tokens, `samples` of a prompt, that is known to
    compute what the model's own forward computes."""
    model, total = loaded.model, sum(longest)
    both = probes(model.config, total, min(len(loaded.tokenizer), loaded.rows))
    _check_cache(examine(model, total, both), model.config)
    engine = PagedEngine(loaded, batch, longest=longest)
    new = min(NEW, len(both[0].completion))
    # As many samples of a prompt as there will be, so that no kernel is compiled for this alone.
    asked = [Request(both[0].prompt, list(range(min(samples, 16)))), Request(both[1].prompt, [0])]
    with refusing(lambda why: not_paged(model.config, why)), engine.trying():
        found = [group[0] for group in engine.generate(asked, Sampling(new, ignore_end=True), lambda done, of: None)]
    sequences = [Probe(one.prompt, sample.tokens) for one, sample in zip(both, found, strict=True)]
    own = [own_logprobs(model, loaded.generate_attention, one) for one in sequences]
    sampled = torch.tensor([logprob for sample in found for logprob in sample.plain_logprobs])
    difference = (torch.cat(own).cpu() - sampled).abs().mean().item()
    if not difference <= ALLOWED * TOLERANCE[model.dtype]:
        off = f"its log-probs are {difference:.3g} nats from the model's own on average, which is more than rounding"
        raise not_paged(model.config, off)
    return engine


def _check_cache(asked: list[Asked], config: PretrainedConfig) -> None:
    """That each layer has one key and one value of a token to keep, of the sizes that the cache has."""
    room = room_of(config)
    if sorted(call.layer for call in asked if call.layer is not None) != list(range(room.layers)):
        raise not_paged(config, f"its {room.layers} layers do not attend once each")
    for call in asked:
        if (call.heads, *call.channels) != (room.heads, room.channels, room.channels):
            raise not_paged(
                config,
                f"layer {call.layer} has keys and values of {call.heads} heads with "
                f"{call.channels[0]} and {call.channels[1]} channels, "
                f"and the cache has room for {room.heads} with {room.channels} each",
            )
