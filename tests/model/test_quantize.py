"""A base in 8 or 4 bits: what its numbers are, and that a model computes with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

from conftest import TINY, merged
from ebbtide.checkpoint.initial_model import load_initial
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.errors import UserError
from ebbtide.model.lora import adapted_layers, base_digest, merge_adapters
from ebbtide.model.output_head import head_product
from ebbtide.model.quantize import AT_ONCE, dequantize, dequantize_all, quantize, quantized_linear
from ebbtide.model.quantized_layers import (
    CASTS_TO_HEAD,
    QuantizedEmbedding,
    QuantizedLinear,
    count_parameters,
    layer_matrix,
    quantize_embeddings,
    quantize_layer,
    quantize_model,
    quantized_of,
)
from ebbtide.model.quantized_sizes import quantized_bytes

KINDS = ["float8", "int4"]
CPU = torch.device("cpu")
TOKENS = torch.tensor([[1, 5, 2, 7, 3, 3, 9]])


def random_matrix(width: int = 24, depth: int = 96) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(width, depth, generator=generator) * torch.rand(width, 1, generator=generator)).bfloat16()


def model_config(kind: str | None, **changes) -> GrpoConfig:
    return GrpoConfig.model_validate(merged(TINY, {"model.lora": {"rank": 4}, "model.base": kind, **changes}))


def test_float8_rounds_to_what_float8_has_and_scales_by_powers_of_2() -> None:
    weight = random_matrix()
    codes, scale = found = quantize(weight, "float8")
    assert codes.dtype == torch.float8_e4m3fn
    assert torch.equal(scale.float().log2(), scale.float().log2().round())
    assert torch.equal(dequantize(found, torch.float32), codes.float() * scale.float())
    # A number is off by half of what its last bit is worth; the smallest have fewer bits.
    off, worth = (dequantize(found, torch.float32) - weight.float()).abs(), weight.float().abs() * 2**-4
    assert (off <= torch.maximum(worth, scale.float() * 2**-10)).all()


def test_int4_has_a_smaller_error_than_a_grid_from_the_least_to_the_largest_at_the_same_bits() -> None:
    weight = random_matrix(64, 256)
    found = quantize(weight, "int4")
    assert found.codes.shape == (64, 128)
    assert found.scale.shape == (64, 8 + 4)
    groups = weight.float().view(64, 2, 128)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale, offset = ((high - low) / 15).bfloat16().float(), low.bfloat16().float()
    plain = ((groups - offset) / scale).round().clamp(0, 15) * scale + offset
    of_rows = 64 * 4  # one for each row beside
    assert found.scale.nbytes == (scale.nbytes + offset.nbytes) // 2 + of_rows  # Those are in float32 here.
    ours = dequantize(found, torch.float32).view_as(groups)
    errors = [(one - groups).square().sum() for one in (ours, plain)]
    assert errors[0] < 0.65 * errors[1]


def test_int4_is_no_further_off_than_half_a_step_within_the_range_that_is_kept() -> None:
    weight = random_matrix(64, 256).clamp(-0.2, 0.2)
    found = quantize(weight, "int4")
    of_groups, of_rows = found.scale[:, :-4].int(), found.scale[:, -4:].view(torch.float32)
    assert torch.equal(of_rows.log2(), of_rows.log2().round())
    scale = (((of_groups >> 4) + 1) * of_rows)[..., None]
    zero = (of_groups & 15)[..., None]
    groups = weight.float().view(64, 8, 32)
    off = (dequantize(found, torch.float32).view_as(groups) - groups).abs()
    is_inside = (groups >= -(zero + 0.5) * scale) & (groups <= (15.5 - zero) * scale)
    assert is_inside.float().mean() > 0.95
    assert (off <= 0.5 * scale)[is_inside].all()


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_are_kept_and_equal_numbers_nearly(kind) -> None:
    for value in (0.0, 0.25, -3.0, 2.0**-100, 2.0**100):
        weight = torch.full((3, 32), value, dtype=torch.bfloat16)
        found = dequantize(quantize(weight, kind), torch.bfloat16)
        assert torch.allclose(found, weight, rtol=0.02 if kind == "int4" else 0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_that_a_plan_counts(kind) -> None:
    for width, depth in ((24, 96), (10, 256), (7, 48)):
        found = quantize(random_matrix(width, depth), kind)
        assert sum(one.nbytes for one in found) == quantized_bytes(width, depth, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_codes_do_not_depend_on_the_type_that_a_model_is_loaded_in(kind) -> None:
    weight = torch.randn(24, 96, generator=torch.Generator().manual_seed(0))
    for one, other in zip(quantize(weight, kind), quantize(weight.bfloat16(), kind), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damaged", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_stays_none(kind, damaged) -> None:
    weight = random_matrix()
    weight[1, 5] = damaged
    found = dequantize(quantize(weight, kind), torch.float32).isfinite()
    assert not found[1].all()
    assert found[[0, *range(2, len(weight))]].all()


def test_an_outlier_costs_the_rest_of_its_row_little() -> None:
    weight = random_matrix(8, 1024)
    plain = dequantize(quantize(weight, "int4"), torch.float32)
    weight[:, 7] = 60 * weight.float().std(1)
    others = slice(32, None)  # of other groups
    found = dequantize(quantize(weight, "int4"), torch.float32)
    errors = [(one - weight.float())[:, others].square().sum() for one in (found, plain)]
    assert errors[0] < 2.5 * errors[1]


def test_keys_and_values_have_8_bits_where_others_have_4() -> None:
    model = load_initial(model_config("int4"), CPU).model
    wide = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if (matrix := quantized_of(module)) is not None and matrix.codes.dtype == torch.float8_e4m3fn
    }
    assert wide == {"k_proj", "v_proj"}


def test_matrices_of_both_kinds_are_one_below_the_other() -> None:
    both = [quantize(random_matrix(24, 96), "int4"), quantize(random_matrix(8, 96), "float8")]
    numbers = [dequantize(one, torch.float32) for one in both]
    assert torch.equal(dequantize_all(both, torch.float32), torch.cat(numbers))
    x, bias = torch.randn(5, 96), torch.randn(32)
    assert torch.equal(quantized_linear(x, both, bias), functional.linear(x, torch.cat(numbers), bias))


def test_parameters_are_counted_as_numbers() -> None:
    counts = {kind: count_parameters(load_initial(model_config(kind), CPU).model) for kind in (None, *KINDS)}
    assert len(set(counts.values())) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_matrix_quantized_in_parts_is_that_quantized_at_once(kind, monkeypatch) -> None:
    weight = random_matrix()
    whole = quantize(weight, kind)
    monkeypatch.setitem(AT_ONCE, "cpu", 5 * 96)
    for one, other in zip(quantize(weight, kind), whole, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_computes_with_its_numbers_and_its_backward_keeps_codes_only(kind) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(96, 24)
    quantize_layer(layer, kind, CPU)
    matrix = layer_matrix(layer).float()
    x = torch.randn(5, 96, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one.shape) or one, lambda one: one):
        found = layer(x)
    assert torch.equal(found, nn.functional.linear(x, matrix, layer.bias))
    assert torch.equal(quantized_linear(x.detach(), [quantized_of(layer)], layer.bias), found)
    assert kept == []
    grad = torch.randn(5, 24)
    found.backward(grad)
    assert torch.equal(x.grad, grad @ matrix)


def test_inputs_that_have_no_groups_are_refused() -> None:
    with pytest.raises(UserError, match="multiple of 16, and one has 24"):
        quantize(random_matrix(8, 24), "int4")
    assert quantize(random_matrix(8, 24), "float8").codes.shape == (8, 24)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_quantized_in_its_blocks_only(kind) -> None:
    model = load_initial(model_config(kind), CPU).model
    quantized = {name for name, module in model.named_modules() if quantized_of(module) is not None}
    assert quantized == set(adapted_layers(model))
    assert model.get_output_embeddings().weight.dtype == model.get_input_embeddings().weight.dtype == torch.float32
    assert {one.lora_A.dtype for one in adapted_layers(model).values()} == {torch.float32}
    assert all(not one.requires_grad for name, one in model.named_parameters() if "lora" not in name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_computes_what_one_with_its_numbers_does(kind) -> None:
    model = load_initial(model_config(kind), CPU).model
    found = model(TOKENS).logits
    assert merge_adapters(model) == 0.0  # They add nothing yet.
    assert not any(isinstance(module, QuantizedLinear) for module in model.modules())
    assert torch.equal(model(TOKENS).logits, found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_model_has_the_buffers_and_the_tied_head_of_any(kind) -> None:
    plain = load_initial(model_config(None), CPU).model
    model = load_initial(model_config(kind), CPU).model
    buffers = dict(plain.named_buffers())
    assert buffers
    assert all(torch.equal(buffers[name], one) for name, one in model.named_buffers())
    for one in (plain, model):
        assert one.get_output_embeddings().weight is one.get_input_embeddings().weight
    assert model.get_input_embeddings().weight.std() == pytest.approx(0.02, rel=0.1)
    assert all(bool((one == 1).all()) for name, one in model.named_parameters() if "norm" in name)


WIDE_HEAD = {"model.scratch.vocabulary": 300, "model.base_embeddings": True}


@pytest.mark.parametrize("tied", [True, False])
def test_embedding_and_head_are_quantized_where_it_is_asked(tied) -> None:
    config = model_config("int4", **WIDE_HEAD, **{"model.scratch.tied": tied})
    model = load_initial(config, CPU).model
    plain = load_initial(model_config("int4", **{**WIDE_HEAD, "model.base_embeddings": False}), CPU).model
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert (embedding.weight is head.weight) == tied
    assert model.dtype == torch.float32
    assert count_parameters(model) == count_parameters(plain) + (0 if tied else embedding.weight.numel())
    numbers = layer_matrix(embedding)
    off = (numbers.float() - plain.get_input_embeddings().weight).norm() / numbers.float().norm()
    assert 0 < off < 0.04
    assert torch.equal(embedding(TOKENS), numbers.float()[TOKENS])
    hidden = torch.randn(600, head.in_features)
    assert torch.equal(head_product(model, hidden), functional.linear(hidden, layer_matrix(head).float()))
    assert base_digest(model) != base_digest(plain)

    found = model(TOKENS).logits
    merge_adapters(model)
    assert quantized_of(embedding) is quantized_of(head) is None
    assert (embedding.weight is head.weight) == tied
    assert torch.equal(model(TOKENS).logits, found)


@torch.no_grad()
def test_a_head_that_is_another_matrix_stays_another_whatever_the_config_says() -> None:
    """A file may have both matrices where the config says that they are one."""
    model = load_initial(model_config("int4", **WIDE_HEAD, **{"model.scratch.tied": True}), CPU).model
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    head.weight = torch.nn.Parameter(embedding.weight.flip(0), requires_grad=False)
    found = model(TOKENS).logits
    merge_adapters(model)
    assert head.weight is not embedding.weight
    assert torch.equal(model(TOKENS).logits, found)


def test_families_that_read_the_type_of_their_heads_weight_keep_it() -> None:
    files = Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
    assert {file.parent.name for file in files if "lm_head.weight.dtype" in file.read_text()} == {*CASTS_TO_HEAD}
    model = load_initial(model_config(None), CPU).model
    model.config.model_type = CASTS_TO_HEAD[0]
    with pytest.raises(UserError, match=r"`model.base_embeddings` .* casts hidden states"):
        quantize_embeddings(model, CPU)


def test_an_embedding_of_its_own_kind_scales_what_it_scaled() -> None:
    changes = {**WIDE_HEAD, "model.scratch.architecture": "gemma"}
    model = load_initial(model_config("float8", **changes), CPU).model
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, QuantizedEmbedding)
    found = model(TOKENS).logits
    merge_adapters(model)
    assert torch.equal(model(TOKENS).logits, found)


def test_what_is_asked_of_embeddings_needs_a_base() -> None:
    with pytest.raises(ValueError, match=r"`model.base_embeddings` quantizes what `model.base` leaves"):
        model_config(None, **{"model.base_embeddings": True})


def test_the_digest_tells_kinds_apart() -> None:
    found = {kind: base_digest(load_initial(model_config(kind), CPU).model) for kind in (None, *KINDS)}
    assert len(set(found.values())) == 3
    assert base_digest(load_initial(model_config("int4"), CPU).model) == found["int4"]


def test_a_base_needs_adapters() -> None:
    with pytest.raises(ValueError, match=r"`model.base: int4` quantizes weights that are not trained"):
        GrpoConfig.model_validate(merged(TINY, {"model.base": "int4"}))


def test_experts_are_refused() -> None:
    model = load_initial(model_config(None), CPU).model
    model.config.model_type = "qwen3_moe"
    with pytest.raises(UserError, match="mixture of experts"):
        quantize_model(model, "int4", CPU)
