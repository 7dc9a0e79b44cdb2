"""Fused blocks: what transformers' own compute, and the same bits whatever is kept, offloaded or recomputed."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from blocks import Setup, errors_in_bfloat16
from conftest import FAMILIES
from ebbtide.config.memory import ActivationsConfig
from ebbtide.errors import UserError
from ebbtide.model.joined_weights import joined
from ebbtide.model.load import layers_of
from ebbtide.model.shape import find_shape
from ebbtide.policy import fuse, fused_block, fused_costs
from ebbtide.policy.activation_costs import ActivationPolicy
from ebbtide.policy.activation_plan import PlacedBlocks, measure_saved_bytes
from ebbtide.policy.attention import PACKED, use_attention
from ebbtide.policy.block_activations import ActivationChoice
from ebbtide.policy.fuse import own_forwards, saved_names
from ebbtide.policy.fused_experts import Experts
from ebbtide.policy.packing import pack
from ebbtide.policy.reference import use_weights

pytestmark = pytest.mark.usefixtures("fused_on_cpu")


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_are_those_of_the_models_own_blocks(name) -> None:
    own, fused = Setup(name), Setup(name, fused=True)
    assert fused.kept.keys() == own.kept.keys()
    for weight, grad in own.kept.items():
        torch.testing.assert_close(fused.kept[weight], grad, rtol=1e-4, atol=1e-6 * float(grad.abs().max() + 1))


@pytest.mark.parametrize("name", FAMILIES)
def test_log_probs_are_those_of_the_models_own_blocks(name) -> None:
    setup = Setup(name, fused=True)
    (batch,) = pack(setup.sequences, budget=10_000, device=setup.policy.device)
    with torch.no_grad():
        fused, _ = setup.policy._logprobs(batch, 1.0)
        with own_forwards(setup.model):
            own, _ = setup.policy._logprobs(batch, 1.0)
    torch.testing.assert_close(fused, own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_further_from_float32_than_the_models_own_blocks_in_bfloat16(name) -> None:
    own, fused = errors_in_bfloat16(name)
    assert fused.mean() <= 1.05 * own.mean()
    assert fused.max(1).values.mean() <= 1.1 * own.max(1).values.mean()


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "qwen3_moe"])
def test_every_name_alone_and_any_mix_give_the_same_bits(name) -> None:
    setup, generator = Setup(name, fused=True), random.Random(0)
    names = saved_names(setup.blocks[0])
    for one in names:
        assert setup.with_choice([one]).drain()[0] > 0
        if one != "block_input":
            assert setup.with_choice(recompute=[one]).drain()[0] == 0
    for _ in range(12):
        places = {one: generator.choice(["keep", "offload", "recompute"]) for one in names if one != "block_input"}
        places["block_input"] = generator.choice(["keep", "offload"])
        chosen = {wanted: [one for one in names if places[one] == wanted] for wanted in ("offload", "recompute")}
        setup.with_choice(
            chosen["offload"],
            chosen["recompute"],
            recompute_blocks=generator.choice([None, 0, 1, 3]),
            keep_last=generator.choice([0, 1, 2]),
            room=generator.choice([2**13, 2**22]),
        )


def test_transformers_own_blocks_can_recompute_in_some_blocks() -> None:
    setup = Setup("qwen3")
    for count in (0, 1, 3, 9):
        setup.with_choice(recompute=["mlp_norm"], recompute_blocks=count)
        setup.with_choice(["block_input"], ["core_attn", "mlp_act"], recompute_blocks=count)


def test_a_sliding_window_is_kept(make_windowed) -> None:
    own, fused = make_windowed(fused=False), make_windowed(fused=True)
    assert fused.policy._fused is not None
    assert {block.window for block in fused.policy._fused.blocks} == {3}
    for weight, grad in own.kept.items():
        torch.testing.assert_close(fused.kept[weight], grad, rtol=1e-4, atol=1e-6)


@pytest.fixture
def make_windowed(monkeypatch):
    from ebbtide.policy import policy

    before = policy.Policy.__init__

    def narrow(self, loaded, *arguments):
        loaded.model.config.sliding_window = 3
        before(self, loaded, *arguments)

    monkeypatch.setattr(policy.Policy, "__init__", narrow)
    return lambda *, fused: Setup("mistral", fused=fused)


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe"])
def test_parameters_stay_the_models_own_and_lie_side_by_side(name) -> None:
    setup, fused = Setup(name), Setup(name, fused=True)
    for (theirs, before), (ours, now) in zip(
        setup.model.named_parameters(), fused.model.named_parameters(), strict=True
    ):
        assert theirs == ours
        assert torch.equal(before, now)
        assert now.is_contiguous()
    attention = layers_of(fused.model)[0].self_attn
    weights = [one.weight for one in (attention.q_proj, attention.k_proj, attention.v_proj)]
    whole = joined(weights)
    assert whole is not None
    assert torch.equal(whole, torch.cat(weights))
    assert all(one.data_ptr() + one.nbytes == other.data_ptr() for one, other in pairwise(weights))
    assert joined([weights[0].clone(), weights[1]]) is None


def test_apart_or_side_by_side_gives_the_same_gradients() -> None:
    setup = Setup("qwen2", fused=True)
    for parameter in setup.model.parameters():
        parameter.data = parameter.data.clone()
    assert all(torch.equal(grad, setup.kept[weight]) for weight, grad in setup.grads().items())


def test_other_weights_are_used_for_a_while() -> None:
    setup = Setup("qwen3", fused=True)
    others = {name: weight.detach() * 1.1 for name, weight in setup.model.named_parameters()}
    (batch,) = pack(setup.sequences, budget=10_000, device=setup.policy.device)
    with torch.no_grad():
        now, _ = setup.policy._logprobs(batch, 1.0)
        with use_weights(setup.model, others):
            found, _ = setup.policy._logprobs(batch, 1.0)
        again, _ = setup.policy._logprobs(batch, 1.0)
        for name, weight in setup.model.named_parameters():
            weight.copy_(others[name])
        wanted, _ = setup.policy._logprobs(batch, 1.0)
    assert not torch.equal(found, now)
    assert torch.equal(found, wanted)
    assert torch.equal(again, now)


def test_a_frozen_weight_has_no_gradient() -> None:
    setup = Setup("qwen3", fused=True)
    frozen = [name for name, _ in setup.model.named_parameters() if "q_proj" in name or "norm" in name]
    for name in frozen:
        setup.model.get_parameter(name).requires_grad_(False)
    found = setup.grads()
    assert found.keys() == setup.kept.keys() - set(frozen)
    assert all(torch.equal(grad, setup.kept[name]) for name, grad in found.items())


def test_a_second_backward_is_refused() -> None:
    setup = Setup("qwen3", fused=True)
    (batch,) = pack(setup.sequences, budget=10_000, device=setup.policy.device)
    logprobs, _ = setup.policy._logprobs(batch, 1.0)
    logprobs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="only once"):
        logprobs.sum().backward()


def test_calls_without_packed_sequences_run_the_models_own_blocks() -> None:
    setup = Setup("qwen3", fused=True)
    tokens = torch.randint(11, (2, 6))
    with torch.no_grad():
        found = setup.model(tokens).logits
        with own_forwards(setup.model):
            own = setup.model(tokens).logits
    assert torch.equal(found, own)
    assert setup.model.generate(tokens, max_new_tokens=3, do_sample=False).shape == (2, 9)


@pytest.mark.parametrize("name", FAMILIES)
def test_bytes_are_foretold(name) -> None:
    setup = Setup(name, "bfloat16", fused=True)
    shape = find_shape(setup.policy.config.model)
    blocks = PlacedBlocks(setup.blocks, setup.policy._fused)
    measured = measure_saved_bytes(blocks, ActivationChoice(), setup.policy._probe)
    sums = 4 * shape.heads  # of attention, which the plain one does not have
    foretold = fused_costs.saved_bytes(shape, 2)
    assert measured == foretold | {"attn_proj": foretold["attn_proj"] - sums}


def test_why_a_model_is_not_fused(monkeypatch) -> None:
    setup = Setup("qwen3")
    weight = next(setup.model.parameters())
    assert fuse.why_not_fused(setup.model, weight) == ""
    monkeypatch.setattr(fuse, "has_flash", lambda *_: False)
    assert "no flash attention" in fuse.why_not_fused(setup.model, weight)
    monkeypatch.setattr(fuse, "has_flash", lambda *_: True)
    setup.blocks[1].mlp.act_fn = torch.nn.ReLU()
    assert "its block 1 has an activation function" in fuse.why_not_fused(setup.model, weight)
    setup.blocks[0].self_attn.extra = torch.nn.Linear(2, 2)
    assert "other weights" in fuse.why_not_fused(setup.model, weight)
    setup.model.config.model_type = "strange"
    assert "strange" in fuse.why_not_fused(setup.model, weight)


SIZES = {"block_input": 10, "core_attn": 20, "attn_proj": 10, "mlp_norm": 10, "mlp_act": 50}


def test_what_presets_and_lists_mean() -> None:
    def choose(carried=0.0, **given) -> ActivationPolicy:
        return fused_costs.choose(ActivationsConfig(**given), SIZES, carried, layers=10)

    rest = frozenset(SIZES) - {"block_input"}
    assert choose() == ActivationPolicy()
    assert choose(preset="recompute") == ActivationPolicy(recompute=rest)
    assert choose(preset="offload") == ActivationPolicy(frozenset({"block_input"}), rest)
    assert choose(preset="recompute", recompute_blocks=4).recompute_blocks == 4
    assert choose(recompute=["mlp_norm", "attn_norm"]) == ActivationPolicy(recompute=frozenset({"mlp_norm"}))
    assert choose(preset="balanced", carried=100.0) == ActivationPolicy(frozenset(SIZES))
    halved = choose(preset="balanced", carried=20.0)
    assert sum(SIZES[name] for name in halved.offload) == 20
    assert (halved.recompute, halved.recompute_blocks) == ({"mlp_act"}, 6)  # 10 x 80 - 6 x 50 = 10 x 50
    limited = choose(preset="balanced", recompute_blocks=4)
    assert (limited.recompute, limited.recompute_blocks) == ({"mlp_act"}, 4)
    listed = choose(preset="balanced", recompute=["attn_proj"])
    assert (listed.recompute, listed.recompute_blocks) == ({"mlp_act", "attn_proj"}, None)
    kept = choose(preset="balanced", carried=0.0, keep=["mlp_act"])
    assert (kept.recompute, kept.recompute_blocks) == ({"core_attn"}, 10)
    with pytest.raises(UserError, match="`attn_norm`, which a fused block never saves"):
        choose(offload=["attn_norm"])
    with pytest.raises(UserError, match="recomputed from their inputs"):
        choose(recompute=["block_input"])


def test_what_the_link_does_not_carry_is_recomputed() -> None:
    both = ActivationPolicy(frozenset({"mlp_act", "core_attn", "block_input"}))
    assert fused_costs.fit_link(both, SIZES, 80) == both
    assert fused_costs.fit_link(both, SIZES, 30) == ActivationPolicy(
        frozenset({"core_attn", "block_input"}), frozenset({"mlp_act"})
    )
    assert fused_costs.fit_link(both, SIZES, 0).offload == {"block_input"}


def test_the_attention_of_fused_blocks_needs_the_packed_one() -> None:
    setup = Setup("qwen3", fused=True)
    assert setup.policy._fused is not None
    named = {"cu_seq_lens_q": torch.tensor([0, 2])}
    hidden = torch.zeros(1, 2, 32)
    assert not setup.policy._fused.runs(hidden, named)
    with use_attention(setup.model, PACKED):
        assert setup.policy._fused.runs(hidden, named)
        assert not setup.policy._fused.runs(hidden, {})
        assert not setup.policy._fused.runs(hidden, named | {"past_key_values": object()})


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fused_blocks_are_checked_before_they_are_used(name, dtype, monkeypatch) -> None:
    setup, notes = Setup(name, dtype), list[str]()
    setup.policy.fuse_blocks(notes.append)
    assert not notes
    assert setup.policy._fused is not None
    setup.policy._fused.close()
    assert all(torch.equal(grad, setup.kept[weight]) for weight, grad in setup.grads().items())
    before = fused_block.rotate_backward
    monkeypatch.setattr(fused_block, "rotate_backward", lambda qkv, *given: (-before(qkv, *given)[0], None, None))
    setup.policy.fuse_blocks(notes.append)
    assert setup.policy._fused is None
    assert "not fused: the gradient of" in notes[-1]
    assert all(torch.equal(grad, setup.kept[weight]) for weight, grad in setup.grads().items())

    def fails(*_):
        raise ValueError("no such instruction")

    monkeypatch.setattr(fused_block, "rotate_backward", fails)
    setup.policy.fuse_blocks(notes.append)
    assert "they fail on this machine (ValueError: no such instruction)" in notes[-1]


@pytest.mark.parametrize("wrong", ["outputs", "gradients", "router"])
def test_wrong_experts_are_noticed(wrong, monkeypatch) -> None:
    forward, backward = Experts.forward, Experts.backward

    def bent(self, grad, remake, weights, saved, grads, *, wants):
        dnormed, finish = backward(self, grad, remake, weights, saved, grads, wants=wants)

        def finish_bent(normed):
            finish(normed)
            for name in grads if wrong == "gradients" else [name for name in grads if name.endswith("gate.weight")]:
                grads[name] = 0.5 * grads[name]

        return dnormed, finish_bent

    if wrong == "outputs":
        monkeypatch.setattr(Experts, "forward", lambda *given: 0 * forward(*given))
    else:
        monkeypatch.setattr(Experts, "backward", bent)
    setup, notes = Setup("qwen3_moe", "bfloat16"), list[str]()
    for weight in setup.model.parameters():  # so that experts add as much as attention does
        weight.data += 0.2 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    setup.policy.fuse_blocks(notes.append)
    assert setup.policy._fused is None
    assert "differs from its own" in notes[0]


def test_a_model_is_fused_once() -> None:
    setup = Setup("qwen3", fused=True)
    first = setup.policy._fused
    setup.policy.fuse_blocks()
    second = setup.policy._fused
    assert second is not None
    assert second is not first
    with own_forwards(setup.model):
        own = setup.grads()
    second.close()
    assert fuse.fused_blocks_of(setup.model) is None
    assert all(torch.equal(grad, own[weight]) for weight, grad in setup.grads().items())


def test_the_first_block_has_what_is_recomputed_only_once() -> None:
    shape = find_shape(Setup("qwen3").policy.config.model)
    recompute = frozenset(fused_costs.saved_bytes(shape, 2)) - {"block_input"}
    found = fused_costs.activation_bytes(shape, 2, ActivationPolicy(recompute=recompute), 1)
    kept = fused_costs.activation_bytes(shape, 2, ActivationPolicy(), 1)
    assert found.first_block == fused_costs.saved_bytes(shape, 2)["block_input"]
    assert found.first_block + found.in_backward == kept.first_block + kept.in_backward


def test_a_plan_fuses_what_a_run_fuses() -> None:
    shape = find_shape(Setup("llama").policy.config.model)
    assert fused_costs.can_fuse(shape, 2, "cuda", 1)
    assert not fused_costs.can_fuse(replace(shape, mlp_bias=True), 2, "cuda", 1)
    assert not fused_costs.can_fuse(shape, 4, "cuda", 1)
    assert not fused_costs.can_fuse(shape, 2, "cpu", 1)
    assert not fused_costs.can_fuse(shape, 2, "cuda", 2)
