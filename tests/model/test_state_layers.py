"""Layers with states, run on packed sequences: each sequence has the log-probs and gradients that it has alone."""

import pytest
import torch

from ebbtide.model.load import decoder
from ebbtide.model.packed_batches import PackedBatches, PutInRows, TakeFromRows, similar_lengths
from ebbtide.model.state_layers import missing_kernels, state_layers
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
    layers, weights = state_layers(model), [*model.model.parameters()]
    sequences, found = _sequences(model.config.vocab_size), []
    monkeypatch.setattr("ebbtide.model.packed_batches.PADDED", 3.0)
    for alone in (True, False):
        for layer in layers.layers:
            monkeypatch.setattr(layer, "_alone", alone)
        hidden = _hidden(model, sequences)
        factors = torch.arange(hidden.numel()).sin().view_as(hidden)
        found.append([hidden, *torch.autograd.grad((hidden * factors).sum(), weights)])
    assert layers.batches(torch.device("cpu")).sizes == [(4, 20)]
    for ours, wanted in zip(found[1], found[0], strict=True):
        assert (ours - wanted).norm() <= 2e-5 * wanted.norm() + 1e-6


@pytest.mark.parametrize("lengths", [[5], [3, 3], [1, 9, 8, 2, 40, 8]])
def test_tokens_come_back_from_their_places(lengths) -> None:
    batches = PackedBatches.of(lengths, torch.device("cpu"))
    x = torch.randn((sum(lengths), 3), requires_grad=True)
    rows = PutInRows.apply(x, batches.tokens, batches.places)
    assert len(rows) == sum(count * longest for count, longest in batches.sizes)
    starts, place = torch.tensor([0, *lengths]).cumsum(0), 0
    for members, (count, longest) in zip(similar_lengths(lengths), batches.sizes, strict=True):
        batch = rows[place : place + count * longest].view(count, longest, 3)
        place += count * longest
        for row, member in zip(batch, members, strict=True):
            assert torch.equal(row[: lengths[member]], x[starts[member] : starts[member + 1]])
    back = TakeFromRows.apply(2 * rows, batches.places)
    assert torch.equal(back, 2 * x)
    grad = torch.randn_like(x)
    assert torch.equal(torch.autograd.grad(back, x, grad)[0], 2 * grad)


def test_which_delta_nets_have_kernels() -> None:
    """It is asked when the weights may be sharded, which no layer can run with."""
    sizes = {"linear_key_head_dim": 32, "linear_value_head_dim": 16}
    for name, dtype, changes, have in (
        ("qwen3_5_text", torch.bfloat16, sizes, True),
        ("qwen3_5_text", torch.float32, sizes, False),
        ("qwen3_5_text", torch.bfloat16, {**sizes, "linear_key_head_dim": 24}, False),
        ("olmo_hybrid", torch.bfloat16, sizes, True),
        ("lfm2", torch.bfloat16, {}, False),
    ):
        model = family_model(name, dtype, **changes).model.to("meta")
        assert {layer.has_delta_kernels for layer in state_layers(model).layers} == {have}


def test_slow_layers_on_a_gpu_are_told_of(monkeypatch) -> None:
    model = family_model("qwen3_5_text").model  # in 32 bits, with heads of 8 channels
    assert not missing_kernels(model)  # on a CPU there are none
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    monkeypatch.setattr("ebbtide.model.state_layers.find_spec", lambda name: None)
    assert "ebbtide[fla]" in missing_kernels(model)
    monkeypatch.setattr("ebbtide.model.state_layers.find_spec", lambda name: object())
    monkeypatch.setattr("ebbtide.model.state_layers.has_wrong_gradients", lambda device: True)
    assert "tilelang" in missing_kernels(model)
    monkeypatch.setattr("ebbtide.model.state_layers.kernels_compute", lambda *given: True)
    assert not missing_kernels(model)
    monkeypatch.undo()
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    monkeypatch.setattr("ebbtide.model.state_layers.find_spec", lambda name: object())
    monkeypatch.setattr("ebbtide.model.state_layers.has_wrong_gradients", lambda device: False)
    assert not missing_kernels(model)
