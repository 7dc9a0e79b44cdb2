"""Adapters in fused blocks: transformers' own outputs and gradients, and the same bits whatever is kept."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from blocks import Setup
from ebbtide.config.model import BaseKind, LoraConfig
from ebbtide.model.load import LoadedModel
from ebbtide.model.lora import adapted_layers, add_adapters, without_adapters
from ebbtide.model.quantized_layers import SCALE, quantize_model, quantized_of
from ebbtide.model.shape import from_config
from ebbtide.policy import fused_costs
from ebbtide.policy.activation_plan import PlacedBlocks, measure_saved_bytes
from ebbtide.policy.block_activations import ActivationChoice
from ebbtide.policy.datum import Datum
from ebbtide.policy.fuse import own_forwards
from ebbtide.policy.fused_check import fused_problem
from ebbtide.policy.packing import pack
from ebbtide.system.torch_internals import grouped_mm
from families import EXPERTS, SHAPE, TOKENIZER

pytestmark = pytest.mark.usefixtures("fused_on_cpu")
SOME = LoraConfig(rank=3, alpha=5, targets=["k_proj", "o_proj", "up_proj"])
ALL = LoraConfig(rank=3, alpha=5)


def adapted(
    family: str,
    lora: LoraConfig,
    *,
    base: bool = False,
    dtype: torch.dtype = torch.float32,
    quantized: BaseKind | None = None,
) -> Setup:
    """A model of four fused blocks with adapters that add something. `base`: its own weights are trained as well.
    `dtype`: of what is no code, nor its scale."""
    own = EXPERTS if family == "qwen3_moe" else {}
    config = AutoConfig.for_model(family, **{**SHAPE, **own, "num_hidden_layers": 4})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    if quantized is not None:
        quantize_model(model, quantized, torch.device("cpu"))
    add_adapters(model, lora, seed=0)
    for layer in adapted_layers(model).values():
        layer.lora_B.data.normal_(std=0.3)
    if base:
        model.requires_grad_(True)
    for module in model.modules():
        is_quantized = quantized_of(module) is not None
        for name, weight in module.named_parameters(recurse=False):
            if not (is_quantized and name in ("weight", SCALE)):
                weight.data = weight.data.to(dtype)
    return Setup("qwen3", fused=True, given=LoadedModel(model, TOKENIZER, "sdpa"))


def compare_with_own(setup: Setup) -> None:
    fused = setup.grads()
    with own_forwards(setup.model):
        own = setup.grads()
    assert fused.keys() == own.keys()
    for name, grad in own.items():
        torch.testing.assert_close(fused[name], grad, atol=2e-6, rtol=1e-3, msg=name)


@pytest.mark.parametrize("lora", [ALL, SOME], ids=["all layers", "some"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma", "olmo2"])
def test_gradients_are_those_of_the_models_own_blocks(family: str, lora: LoraConfig) -> None:
    setup = adapted(family, lora)
    assert all(".lora_" in name for name in setup.kept)
    assert len(setup.kept) == 2 * len(adapted_layers(setup.model))
    compare_with_own(setup)
    assert fused_problem(setup.model, setup.policy._fused) == ""


@pytest.mark.parametrize("targets", [None, ["q_proj", "o_proj"]])
def test_experts_beside_adapters_are_frozen(monkeypatch, targets: list[str] | None) -> None:
    """Theirs are gradients of their inputs alone: no product of two matrices by groups of rows, which is a weight's."""
    setup = adapted("qwen3_moe", LoraConfig(rank=3, alpha=5, targets=targets))
    assert {name.split(".")[3] for name in setup.kept} == {"self_attn"}
    compare_with_own(setup)
    dimensions = list[tuple[int, int]]()

    def counted(first: torch.Tensor, second: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        dimensions.append((first.dim(), second.dim()))
        return grouped_mm(first, second, ends)

    monkeypatch.setattr("ebbtide.policy.fused_experts.grouped_mm", counted)
    setup.grads()
    assert set(dimensions) == {(2, 3)}


def test_packed_matrices_have_adapters() -> None:
    setup = adapted("phi3", ALL)
    assert {name.rpartition(".")[2] for name in adapted_layers(setup.model)} == {
        "qkv_proj",
        "o_proj",
        "gate_up_proj",
        "down_proj",
    }
    compare_with_own(setup)


@pytest.mark.parametrize("kind", ["float8", "int4"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "olmo2", "phi3"])
def test_a_quantized_base_is_what_the_models_own_blocks_compute_with(family: str, kind: BaseKind) -> None:
    """In float64, as the noise of float32 grows from block to block: OLMo 2's gradients are 1e-4 of their size off."""
    setup = adapted(family, ALL, quantized=kind, dtype=torch.float64)
    assert len(setup.kept) == 2 * len(adapted_layers(setup.model))
    compare_with_own(setup)
    assert fused_problem(setup.model, setup.policy._fused) == ""


def test_with_a_quantized_base_the_same_bits_whatever_is_kept() -> None:
    adapted("qwen3", SOME, quantized="int4").with_each_choice()


def test_weights_beside_adapters_may_be_trained_too() -> None:
    compare_with_own(adapted("qwen3", SOME, base=True))


@pytest.mark.parametrize("family", ["qwen3", "olmo2", "qwen3_moe"])
def test_the_same_bits_whatever_is_kept(family: str) -> None:
    adapted(family, ALL).with_each_choice()


def test_without_adapters_is_the_base() -> None:
    setup = adapted("qwen3", ALL)
    (batch,) = pack([Datum.completion([1, 2], [3, 4, 5])], 64, torch.device("cpu"))
    with torch.no_grad():
        found = setup.policy._logprobs(batch, 1.0)[0]
        with without_adapters(setup.model):
            base = setup.policy._logprobs(batch, 1.0)[0]
        for layer in adapted_layers(setup.model).values():
            layer.lora_B.data.zero_()
        assert torch.equal(setup.policy._logprobs(batch, 1.0)[0], base)
    assert not torch.equal(found, base)


def test_they_save_nothing() -> None:
    setup = adapted("qwen3", ALL, dtype=torch.bfloat16)
    shape = from_config(setup.model.config.to_dict(), "it")
    blocks = PlacedBlocks(setup.blocks, setup.policy._fused)
    measured = measure_saved_bytes(blocks, ActivationChoice(), setup.policy._probe)
    foretold = fused_costs.saved_bytes(shape, 2)
    assert sum(measured.values()) == sum(foretold.values()) - 4 * shape.heads  # a GPU's attention saves sums
