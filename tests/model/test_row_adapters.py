"""Several adapters at once, in linear layers and in fused blocks: each row has its own."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ebbtide.config.model import LoraConfig
from ebbtide.model.joined_weights import join, joined
from ebbtide.model.load import decoder
from ebbtide.model.lora import LoraLinear, adapted_layers, add_adapters
from ebbtide.model.row_adapters import RowLoraLinear, join_adapters, row_adapters, take_adapters
from ebbtide.policy.fuse import build_blocks
from ebbtide.rollout.paged.fused_model import FusedModel
from families import SHAPE
from plain_kernels import PlainPass

FAMILIES = ("llama", "qwen2", "qwen3", "gemma", "olmo2", "phi3")
ROWS = torch.tensor([0, 1, 2, 2, 1, 0, 1, 2, 0], dtype=torch.int32)
TOKENS = torch.arange(9) * 7 % SHAPE["vocab_size"]


def kinds(name: str) -> list[LoraConfig]:
    few = ["qkv_proj", "down_proj"] if name == "phi3" else ["q_proj", "v_proj", "up_proj", "down_proj"]
    return [LoraConfig(rank=3, alpha=5), LoraConfig(rank=6, alpha=4, targets=few)]


def made(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SHAPE)).eval()


def adapted(name: str, number: int) -> PreTrainedModel:
    """A model with one adapter."""
    model = made(name)
    add_adapters(model, kinds(name)[number - 1], seed=number)
    generator = torch.Generator().manual_seed(number)
    for layer in adapted_layers(model).values():
        layer.lora_B.data.normal_(std=0.3, generator=generator)
    return model


def with_both(name: str) -> PreTrainedModel:
    model = made(name)
    join_adapters(model, [take_adapters(adapted(name, number)) for number in (1, 2)])
    return model


@torch.no_grad()
def fused(model: PreTrainedModel) -> torch.Tensor:
    return FusedModel(model)(TOKENS, torch.arange(9), PlainPass())  # type: ignore[arg-type]


@torch.no_grad()
def own(model: PreTrainedModel) -> torch.Tensor:
    return decoder(model)(input_ids=TOKENS[None], use_cache=False).last_hidden_state[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_fused_blocks_compute_what_the_layers_do(name: str) -> None:
    model = with_both(name)
    rows = row_adapters(model)
    with rows.chosen(ROWS):
        torch.testing.assert_close(fused(model), own(model), atol=1e-4, rtol=1e-4)
    for number, alone in enumerate((made(name), adapted(name, 1), adapted(name, 2))):
        with rows.chosen(torch.full((9,), number)):
            torch.testing.assert_close(fused(model), fused(alone), atol=1e-5, rtol=1e-4)
        with rows.chosen(torch.tensor([number])):
            torch.testing.assert_close(own(model), own(alone), atol=1e-5, rtol=1e-4)


def test_a_row_has_the_bits_of_its_adapter_whatever_the_others_have() -> None:
    layer = with_both("qwen3").model.layers[1].mlp.down_proj
    assert isinstance(layer, RowLoraLinear)
    x = torch.randn(9, SHAPE["intermediate_size"])
    with torch.no_grad():
        found = []
        for others in (0, 1, 2):
            with layer.rows.chosen(torch.tensor([2, *[others] * 8])):
                found.append(layer(x)[0])
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])
        with layer.rows.chosen(torch.zeros(9, dtype=torch.int32)):
            assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight))
        assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight))  # none is chosen


def test_an_adapter_has_no_columns_where_it_has_no_layer() -> None:
    layers = adapted_layers(with_both("qwen3"))
    found = {name.rpartition(".")[2]: (one.columns, len(one.lora_A)) for name, one in layers.items()}
    both, first = (((1, 3), (2, 6)), 9), (((1, 3),), 3)
    assert found == {
        **dict.fromkeys(("q_proj", "v_proj", "up_proj", "down_proj"), both),
        **dict.fromkeys(("k_proj", "o_proj", "gate_proj"), first),
    }


def test_taking_adapters_leaves_the_base() -> None:
    model, plain = adapted("qwen3", 1), made("qwen3")
    taken = take_adapters(model)
    assert len(taken) == 14
    assert {one.scale for one in taken.values()} == {5 / 3}
    assert not any(isinstance(module, LoraLinear) for module in model.modules())
    assert torch.equal(own(model), own(plain))


def test_joined_matrices_give_the_same() -> None:
    model = with_both("qwen3")
    firsts = {layer.lora_A for layer in adapted_layers(model).values()}
    with row_adapters(model).chosen(ROWS):
        apart = fused(model)
        groups = [group for block in build_blocks(model) for group in block.joinable if group[0] in firsts]
        assert [len(group) for group in groups] == [3, 2, 3, 2]
        for group in groups:
            assert joined(group) is None
            join(group)
            assert joined(group) is not None
        torch.testing.assert_close(fused(model), apart, atol=1e-6, rtol=1e-5)
