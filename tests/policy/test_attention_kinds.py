"""Attention as families have it, on packed sequences: log-probs and gradients are those of transformers' own forward of
each sequence."""

from dataclasses import replace

import pytest
import torch

from ebbtide.errors import UserError
from ebbtide.policy import attention
from ebbtide.policy.datum import Datum
from ebbtide.policy.packing import pack
from ebbtide.policy.policy import Policy
from families import family_model

LONGER = {"rollout.max_prompt_tokens": 8, "rollout.max_new_tokens": 16}
FAMILIES = ("gemma2", "gpt_oss", "mimo_v2_flash", "llama4_text", "deepseek_v3", "gemma3n_text", "gemma4_text")
LENGTHS = (22, 3, 12, 24)  # the windows and chunks of tests/families.py have 5 tokens


def tokens_of(length: int) -> list[int]:
    return [2 + (7 * place + length) % 9 for place in range(length)]


def weights(count: int) -> torch.Tensor:
    return torch.arange(count).sin()


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_log_probs_and_gradients_are_those_of_each_sequence_alone(tiny, name) -> None:
    loaded = family_model(name)
    policy = Policy(loaded, tiny(LONGER))
    policy.verify()
    model, sequences = loaded.model, [tokens_of(length) for length in LENGTHS]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    (batch,) = pack([Datum.completion(one[:2], one[2:]) for one in sequences], budget=100, device=policy.device)
    packed, _ = policy._logprobs(batch, temperature=1.0)
    found = torch.autograd.grad((packed * weights(len(packed))).sum(), trained, allow_unused=True)
    own = []
    for number in batch.members:
        rows = model(torch.tensor([sequences[number]]), use_cache=False).logits[0, 1:-1].log_softmax(-1)
        own.append(rows.gather(-1, torch.tensor(sequences[number][2:])[:, None])[:, 0])
    wanted = torch.cat(own)
    torch.testing.assert_close(packed, wanted, atol=1e-5, rtol=1e-5)
    wanted_grads = torch.autograd.grad((wanted * weights(len(wanted))).sum(), trained, allow_unused=True)
    for mine, theirs in zip(found, wanted_grads, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            scale = theirs.abs().max().clamp(min=1e-3)
            torch.testing.assert_close(mine / scale, theirs / scale, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("gemma2", {"softcap": None}),
        ("gemma2", {"window": None}),
        ("gpt_oss", {"sinks": None}),
        ("mimo_v2_flash", {"sinks": None}),
        ("llama4_text", {"chunk": None}),
    ],
)
def test_what_is_left_out_shows(tiny, monkeypatch, name, left_out) -> None:
    """The models above would tell."""
    loaded = family_model(name)
    policy = Policy(loaded, tiny(LONGER))
    (batch,) = pack([Datum.completion([3], tokens_of(20))], budget=100, device=policy.device)
    right, _ = policy._logprobs(batch, temperature=1.0)
    whole = attention.requested_kind
    monkeypatch.setattr(attention, "requested_kind", lambda *given: replace(whole(*given), **left_out))
    wrong, _ = policy._logprobs(batch, temperature=1.0)
    assert (right - wrong).abs().max() > 1e-3
    with pytest.raises(UserError):
        policy.verify()


def test_queries_that_llama_4_scales_by_their_places_in_a_row_are_scaled_by_their_positions(tiny, monkeypatch) -> None:
    loaded = family_model("llama4_text")
    policy = Policy(loaded, tiny(LONGER))
    (batch,) = pack([Datum.completion([3], tokens_of(length)) for length in (20, 9)], budget=100, device=policy.device)
    right, _ = policy._logprobs(batch, temperature=1.0)
    monkeypatch.setattr(attention, "scaled_by_position", lambda module, query, positions: query)
    wrong, _ = policy._logprobs(batch, temperature=1.0)
    assert (right - wrong).abs().max() > 1e-3
