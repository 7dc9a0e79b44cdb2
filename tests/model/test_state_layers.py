"""Layers with states, run on packed sequences: each sequence has the log-probs and gradients that it has alone."""

import pytest
import torch

from ebbtide.model.load import decoder
from ebbtide.model.state_layers import missing_kernels, similar_lengths, state_layers
from ebbtide.policy.attention import PACKED, use_attention
from families import family_model
from state_families import KINDS, STATES

LENGTHS = [13, 1, 20, 2]


def _hidden(model, sequences: list[torch.Tensor]) -> torch.Tensor:
    lengths = [len(one) for one in sequences]
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    with use_attention(model, PACKED):
        return decoder(model)(
            input_ids=torch.cat(sequences)[None],
            position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
            use_cache=False,
            cu_seq_lens_q=starts,
            cu_seq_lens_k=starts,
            max_length_q=max(lengths),
            max_length_k=max(lengths),
        ).last_hidden_state[0]


def _sequences(rows: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, rows, (length,), generator=generator) for length in LENGTHS]


@pytest.mark.parametrize("name", STATES)
def test_packed_sequences_have_the_numbers_that_they_have_alone(name) -> None:
    model = family_model(name).model
    sequences = _sequences(model.config.vocab_size)
    weights = [one for one in model.parameters() if one.requires_grad]
    assert state_layers(model).layers
    own = torch.cat([decoder(model)(one[None], use_cache=False).last_hidden_state[0] for one in sequences])
    factors = torch.arange(own.numel()).sin().view_as(own)
    wanted = torch.autograd.grad((own * factors).sum(), weights, allow_unused=True)
    found = _hidden(model, sequences)
    torch.testing.assert_close(found, own, atol=2e-5, rtol=2e-5)
    gradients = torch.autograd.grad((found * factors).sum(), weights, allow_unused=True)
    for one, other in zip(gradients, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert (one - other).norm() <= 2e-5 * other.norm() + 1e-6


@pytest.mark.parametrize("name", KINDS)
def test_another_sequence_changes_no_bit(name) -> None:
    model = family_model(name).model
    state_layers(model)
    first, *rest = _sequences(model.config.vocab_size)
    with torch.no_grad():
        before = _hidden(model, [first, *rest])[: len(first)]
        after = _hidden(model, [first, *(3 + (one + 2) % 5 for one in rest)])[: len(first)]
    assert torch.equal(before, after)


def test_a_models_own_forward_stays_its_own() -> None:
    loaded = family_model("qwen3_5_text")
    tokens = _sequences(loaded.model.config.vocab_size)[0][None]
    with torch.no_grad():
        before = loaded.model(tokens, use_cache=False).logits
        layers = state_layers(loaded.model)
        assert state_layers(loaded.model) is layers
        _hidden(loaded.model, _sequences(loaded.model.config.vocab_size))
        assert torch.equal(loaded.model(tokens, use_cache=False).logits, before)
        assert torch.equal(loaded.model(tokens, use_cache=True).logits, before)


def test_a_model_without_states_is_left_alone() -> None:
    model = family_model("gemma2").model
    assert not state_layers(model).layers
    assert not decoder(model)._forward_pre_hooks


def test_sequences_of_similar_lengths_are_padded_together() -> None:
    lengths = [10, 100, 9, 90, 95, 50, 1]
    groups = similar_lengths(lengths)
    assert sorted(number for group in groups for number in group) == list(range(len(lengths)))
    assert groups == [[1, 4, 3, 5], [0, 2], [6]]
    for group in groups:
        longest = max(lengths[number] for number in group)
        assert longest * len(group) <= 1.25 * sum(lengths[number] for number in group)


def test_padded_groups_give_what_single_sequences_give(monkeypatch) -> None:
    """As on a GPU."""
    model = family_model("qwen3_5_text").model
    layers = state_layers(model)
    sequences = _sequences(model.config.vocab_size)
    alone = _hidden(model, sequences)
    for layer in layers.layers:
        monkeypatch.setattr(layer, "_alone", False)
    monkeypatch.setattr("ebbtide.model.state_layers.PADDED", 3.0)
    torch.testing.assert_close(_hidden(model, sequences), alone, atol=1e-5, rtol=1e-5)


def test_slow_layers_on_a_gpu_are_told_of(monkeypatch) -> None:
    model = family_model("qwen3_5_text").model
    assert not missing_kernels(model)  # on a CPU there are none
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    monkeypatch.setattr("ebbtide.model.state_layers.find_spec", lambda name: None)
    assert "ebbtide[fla]" in missing_kernels(model)
    monkeypatch.setattr("ebbtide.model.state_layers.find_spec", lambda name: object())
    monkeypatch.setattr("ebbtide.model.state_layers.has_wrong_gradients", lambda device: True)
    assert "tilelang" in missing_kernels(model)
    monkeypatch.setattr("ebbtide.model.state_layers.has_wrong_gradients", lambda device: False)
    assert not missing_kernels(model)
