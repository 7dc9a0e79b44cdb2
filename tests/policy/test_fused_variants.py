"""Fused blocks of models that differ from most of their family, and of families that are not made from nothing."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from blocks import Setup
from ebbtide.config.memory import ActivationsConfig
from ebbtide.model.families import FAMILIES
from ebbtide.model.load import LoadedModel
from ebbtide.model.shape import from_config
from ebbtide.policy import activation_costs, fused_costs
from ebbtide.policy.activation_plan import PlacedBlocks, measure_saved_bytes
from ebbtide.policy.block_activations import ActivationChoice
from ebbtide.policy.datum import Datum
from ebbtide.policy.fuse import own_forwards
from ebbtide.policy.packing import pack
from ebbtide.policy.policy import Policy
from families import EXPERTS, SHAPE, TOKENIZER

pytestmark = pytest.mark.usefixtures("fused_on_cpu")


@pytest.mark.parametrize("family", ["gemma3_text", "olmo2", "olmo3", "exaone4", "phi3", "glm4"])
def test_blocks_of_other_parts(family) -> None:
    """More norms or others, norms over all heads, packed matrices: the same bits whatever is kept, offloaded or
    recomputed, and the bytes that were foretold."""
    config = AutoConfig.for_model(family, **{**SHAPE, "num_hidden_layers": 4, "sliding_window": 5})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    setup = Setup("qwen3", fused=True, given=LoadedModel(model, TOKENIZER, "sdpa"))
    setup.with_each_choice()
    shape, short = from_config(config.to_dict(), "it"), LoadedModel(model.bfloat16(), TOKENIZER, "sdpa")
    fused = Setup("qwen3", fused=True, given=short)
    blocks, probe = PlacedBlocks(fused.blocks, fused.policy._fused), fused.policy._probe
    measured, foretold = measure_saved_bytes(blocks, ActivationChoice(), probe), fused_costs.saved_bytes(shape, 2)
    assert sum(measured.values()) == sum(foretold.values()) - 4 * shape.heads  # a GPU's attention saves sums
    with own_forwards(model):
        measured = measure_saved_bytes(PlacedBlocks(fused.blocks), ActivationChoice(), probe)
    foretold = activation_costs.saved_bytes(shape, 2)
    of_attention = ("core_attn", "attn_proj")  # plain attention with a window saves more than a GPU's
    assert {name: size for name, size in measured.items() if name not in of_attention} == {
        name: size for name, size in foretold.items() if name not in of_attention
    }


VARIANTS = {
    "llama with biases": ("llama", {"attention_bias": True}),
    "llama with a window that it ignores": ("llama", {"sliding_window": 3}),
    "smollm3 with rotary embeddings in some layers": ("smollm3", {"no_rope_layers": [1, 0]}),
    "granite with factors": (
        "granite",
        {"residual_multiplier": 0.22, "attention_multiplier": 0.3, "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    ),
    "ministral with windows in some layers": (
        "ministral",
        {"sliding_window": 3, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "seed_oss": ("seed_oss", {}),
    "gemma3_text with windows in some layers": (
        "gemma3_text",
        {"sliding_window": 3, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "olmo2": ("olmo2", {}),
    "olmo3 with windows in some layers": (
        "olmo3",
        {"sliding_window": 3, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "exaone4 with windows in some layers": (
        "exaone4",
        {"sliding_window": 3, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "exaone4 without windows": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "phi3 with a window": ("phi3", {"sliding_window": 3}),
    "phi3 that rotates some channels": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}},
    ),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "experts that are not normalized": ("qwen3_moe", {"norm_topk_prob": False}),
    "experts without tokens": ("qwen3_moe", {"num_experts": 64, "num_local_experts": 64}),
    "a dense block among experts": ("qwen3_moe", {"mlp_only_layers": [0]}),
    "qwen2 with windows in some layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 3, "layer_types": ["full_attention", "sliding_attention"]},
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_a_family(variant, tiny) -> None:
    name, changes = VARIANTS[variant]
    own = EXPERTS if name == "qwen3_moe" else {}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **{**SHAPE, **own, **changes})).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    policy, notes = Policy(LoadedModel(model, TOKENIZER, "sdpa"), tiny()), list[str]()
    data = [Datum.completion([1, 2, 3 + i], [4 + i, 5, 6, 7, 8 - i]) for i in range(4)]
    (batch,) = pack(data, budget=1000, device=policy.device)

    def grads() -> dict[str, torch.Tensor]:
        logprobs, _ = policy._logprobs(batch, 1.0)
        weights = dict(model.named_parameters())
        found = torch.autograd.grad((logprobs * torch.arange(len(logprobs)).sin()).sum(), [*weights.values()])
        return dict(zip(weights, found, strict=True))

    wanted = grads()
    policy.fuse_blocks(notes.append)
    assert not notes
    assert policy._fused is not None
    for weight, grad in grads().items():
        torch.testing.assert_close(grad, wanted[weight], rtol=1e-4, atol=1e-5 * float(wanted[weight].abs().max() + 1))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_setting_that_a_plan_tries_is_one_that_blocks_have(name) -> None:
    """A plan's choice is a config, which the run then reads."""
    own = EXPERTS if FAMILIES[name].sparse else {}
    shape = from_config(AutoConfig.for_model(name, **{**SHAPE, **own}).to_dict(), "it")
    for carried in (0.0, 100.0, 300.0, 1000.0):
        balanced = fused_costs.resolve_policy(ActivationsConfig(preset="balanced"), shape, 2, carried)
        listed = ActivationsConfig(
            offload=sorted(balanced.offload) or None, recompute=sorted(balanced.recompute) or None
        )
        assert fused_costs.resolve_policy(listed, shape, 2, 1e9).offload == balanced.offload
        for option in fused_costs.activation_options(shape, balanced):
            fused_costs.resolve_policy(ActivationsConfig(**option), shape, 2, carried)
