"""What a family does between its tokens is computed, or refused in a sentence before the first step: never left out."""

import pytest
import torch
from transformers import AutoConfig

from ebbtide.errors import UserError
from ebbtide.policy.datum import Datum, trajectory
from ebbtide.policy.policy import Policy
from families import family_model, own_logprobs

LONGER = {"rollout.max_prompt_tokens": 8, "rollout.max_new_tokens": 16}


def filled(policy: Policy, *lengths: int) -> list[Datum]:
    """Sequences of so many tokens, with log-probs of all but their first three."""
    tokens = [[2 + 5 * place % 9 for place in range(length)] for length in lengths]
    items = [trajectory(each[:3], each[3:], [0.0] * (len(each) - 3)) for each in tokens]
    policy.compute_logprobs("old_logprobs", items, lambda done, of: None)
    return items


def check(item: Datum, loaded) -> None:
    wanted = own_logprobs(loaded, item.tokens[:3], item.tokens[3:])
    torch.testing.assert_close(item.values["old_logprobs"], wanted, atol=1e-4, rtol=1e-4)


def test_a_window_that_only_the_layer_knows_is_kept_to(tiny) -> None:
    """Qwen2-MoE passes attention a mask, not its window."""
    loaded = family_model("qwen2_moe")
    policy = Policy(loaded, tiny(LONGER))
    policy.verify()
    for item in filled(policy, 22, 12):
        check(item, loaded)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("phimoe", "`phimoe`.*PhimoeAttention of layer 0 needs a mask other than the causal one"),
        (
            "minimax_m3_vl_text",
            "`minimax_m3_vl_text`.*MiniMaxM3VLAttention of layer 1 passes attention `block_indices`",
        ),
        ("doge", "`doge`.*DogeAttention of layer 0 passes attention a mask of its own"),
        ("bloom", "`bloom`.*do not use transformers' attention registry"),
    ],
)
def test_what_attention_does_not_compute_is_refused(tiny, name, said) -> None:
    """In bfloat16 and with weights as small as new ones, where all of it looks like rounding."""
    loaded = family_model(name, torch.bfloat16, spread=0.0)
    with pytest.raises(UserError, match=said):
        Policy(loaded, tiny({**LONGER, "model.dtype": "bfloat16"})).verify()


def test_a_window_that_no_sequence_reaches_stands_in_nobodys_way(tiny) -> None:
    loaded = family_model("phimoe")
    policy = Policy(loaded, tiny({"rollout.max_prompt_tokens": 3, "rollout.max_new_tokens": 2}))
    policy.verify()
    (item,) = filled(policy, 5)
    check(item, loaded)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("falcon_h1", "in layer 0, a FalconH1DecoderLayer, its FalconH1Mixer passes a state from token to token"),
        ("zaya", "in layer 0, a ZayaDecoderLayer, its .* convolves over neighbouring tokens"),
        ("lfm2", "in layer 0, a Lfm2DecoderLayer, its Lfm2ShortConv convolves over neighbouring tokens"),
    ],
)
def test_layers_in_which_packed_sequences_would_mix_are_refused(tiny, monkeypatch, name, said) -> None:
    """If nobody knew that these layers have states. Falcon-H1 and Zaya attend in every layer, and have a state or a
    convolution beside; in bfloat16 it looks like rounding."""
    monkeypatch.setattr("ebbtide.model.state_layers.has_state", lambda module: False)
    loaded = family_model(name, torch.bfloat16, spread=0.0)
    with pytest.raises(UserError, match=said):
        Policy(loaded, tiny({"model.dtype": "bfloat16"})).verify()


@pytest.mark.parametrize("name", ["phi3", "llama"])
def test_a_rope_that_follows_the_longest_sequence_is_refused_where_one_may_be_too_long(tiny, name) -> None:
    loaded = family_model(name)  # it changes past 16 tokens
    said = (
        rf"rope of `{name}` changes .* more than 16 tokens, and this run allows 17: lower `rollout.max_prompt_tokens`"
    )
    with pytest.raises(UserError, match=said):
        Policy(loaded, tiny({"rollout.max_prompt_tokens": 8, "rollout.max_new_tokens": 9})).verify()
    policy = Policy(loaded, tiny({"rollout.max_prompt_tokens": 8, "rollout.max_new_tokens": 8}))
    policy.verify()
    for item in filled(policy, 16, 5, 9):  # a neighbour of the full length changes nothing
        check(item, loaded)


@pytest.mark.parametrize(
    ("changes", "longest", "length"),
    [
        ({}, 1000, 80),
        ({}, 10, 10),
        ({"sliding_window": 512}, 1000, 528),
        ({"sliding_window": 512}, 520, 520),
        ({"sliding_window": 4096}, 1000, 80),  # no sequence goes so far
        ({"sliding_window": 128, "index_block_size": [64, 700], "max_window_layers": 900}, 1000, 716),
        ({"mamba_chunk_size": 256, "mamba_d_conv": 4}, 1000, 272),
        ({"conv_L_cache": 100, "conv_dim": 900, "conv_bias": True}, 1000, 116),
        ({"linear_conv_kernel_dim": 100}, 1000, 116),
    ],
)
def test_the_probe_goes_past_every_window_that_a_sequence_can_go_past(changes, longest, length) -> None:
    from ebbtide.policy.probe import probes

    long, short = probes(AutoConfig.for_model("mistral", **{"sliding_window": None, **changes}), longest, rows=14)
    assert len(long.tokens) == length
    assert 1 <= len(long.completion) <= 8
    assert len(short.tokens) == 5
    assert max(long.tokens + short.tokens) < 14


def test_a_window_too_far_away_for_a_probe_is_still_noticed(tiny, monkeypatch) -> None:
    """By what its mask was made for: the probe does not go past it, and sequences may."""
    monkeypatch.setattr("ebbtide.policy.probe.MOST", 8)
    config = tiny({"rollout.max_prompt_tokens": 8, "rollout.max_new_tokens": 32})
    Policy(family_model("qwen2_moe", sliding_window=30), config).verify()
    with pytest.raises(UserError, match="PhimoeAttention of layer 0 needs a mask other than the causal one"):
        Policy(family_model("phimoe", sliding_window=30), config).verify()


def test_a_model_that_fails_on_packed_sequences_is_refused_with_what_it_said(tiny) -> None:
    loaded = family_model("llama")

    def fail(*_: object) -> None:
        raise IndexError("no such thing")

    loaded.model.model.layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(UserError, match=r"`llama` cannot be run on packed sequences \(IndexError: no such thing\)"):
        Policy(loaded, tiny()).verify()
