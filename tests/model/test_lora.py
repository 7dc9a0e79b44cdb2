"""Adapters: what they compute, where they are, and PEFT's format."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from conftest import FAMILIES, TINY, family, merged
from ebbtide.checkpoint.initial import with_runs_as_models
from ebbtide.checkpoint.initial_model import load_initial
from ebbtide.config import load
from ebbtide.config.adapter import read_lora_config
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.config.model import LoraConfig, ModelConfig
from ebbtide.errors import UserError
from ebbtide.model.load import load_model
from ebbtide.model.lora import (
    LoraLinear,
    adapted_layers,
    add_adapters,
    base_digest,
    find_doubts,
    merge_adapters,
    without_adapters,
)
from ebbtide.model.peft_format import load_adapter, write_adapter
from ebbtide.model.shape import find_shape, from_config, with_lora
from families import EXPERTS, SHAPE

CPU = torch.device("cpu")
TOKENS = torch.tensor([[1, 5, 2, 7, 3, 3, 9]])


def config(changes: dict | None = None, **lora) -> GrpoConfig:
    return GrpoConfig.model_validate(merged(TINY, {"model.lora": {"rank": 4, "alpha": 6, **lora}, **(changes or {})}))


def made(changes: dict | None = None, **lora):
    """A model with adapters that add something."""
    model = load_initial(config(changes, **lora), CPU).model
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer in adapted_layers(model).values():
            layer.lora_B.normal_(std=0.3, generator=generator)
    return model


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(TOKENS).logits


@pytest.mark.parametrize("name", FAMILIES)
def test_a_new_adapter_changes_no_bit(name: str) -> None:
    plain = load_model(config(family(name)), CPU).model
    model = load_initial(config(family(name)), CPU).model
    assert adapted_layers(model)
    assert torch.equal(logits(model), logits(plain))


def test_what_an_adapter_adds() -> None:
    model = made()
    layer = model.model.layers[1].mlp.down_proj
    x = torch.randn(5, 48)
    wanted = x @ layer.weight.T + 6 / 4 * (x @ layer.lora_A.T @ layer.lora_B.T)
    torch.testing.assert_close(layer(x), wanted)


def test_only_the_adapters_are_trained() -> None:
    trained = {name for name, parameter in made().named_parameters() if parameter.requires_grad}
    assert trained == {
        f"model.layers.{block}.{layer}.lora_{which}"
        for block in (0, 1)
        for layer in (
            *(f"self_attn.{name}_proj" for name in "qkvo"),
            *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
        )
        for which in "AB"
    }


def test_targets_and_exclude() -> None:
    names = {name.rpartition(".")[2] for name in adapted_layers(made(targets=["q_proj", "v_proj"]))}
    assert names == {"q_proj", "v_proj"}
    names = {name.rpartition(".")[2] for name in adapted_layers(made(exclude=["down_proj"]))}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"}


@pytest.mark.parametrize(
    ("lora", "says"),
    [
        (
            {"targets": ["query"]},
            "names `query`, and the linear layers of the model's blocks that can have an adapter are: down_proj, gate",
        ),
        ({"exclude": ["lm_head"]}, "names `lm_head`"),
    ],
)
def test_layers_that_do_not_exist_are_named(lora: dict, says: str) -> None:
    with pytest.raises(UserError, match=says):
        load_initial(config(None, **lora), CPU)


def test_a_mixture_of_experts_has_adapters_in_attention() -> None:
    for name, parameter in made(family("qwen3_moe")).named_parameters():
        assert parameter.requires_grad == (".lora_" in name)
        assert (".self_attn." in name) or not parameter.requires_grad


@pytest.mark.parametrize("name", ["gate_proj", "down_proj", "experts", "gate"])
@pytest.mark.parametrize("key", ["targets", "exclude"])
def test_experts_that_are_named_are_refused(name: str, key: str) -> None:
    settings = config(family("qwen3_moe"), **{key: ["q_proj", name]})
    says = f"names `{name}`.* are: k_proj, o_proj, q_proj, v_proj. Experts and their router cannot have adapters yet"
    with pytest.raises(UserError, match=says):
        load_initial(settings, CPU)
    with pytest.raises(UserError, match=says):
        find_shape(settings.model)


def test_the_seed_alone_decides_the_first_weights() -> None:
    first = load_initial(config(), CPU).model
    torch.manual_seed(99)
    again, other = load_initial(config(), CPU).model, load_initial(config({"seed": 1}), CPU).model
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    layers = [*adapted_layers(first).values()]
    assert not any(torch.equal(a.lora_A, b.lora_A) for a, b in zip(layers, adapted_layers(other).values(), strict=True))
    assert not torch.equal(layers[0].lora_A, layers[7].lora_A)  # of the same shape in the next block


def test_without_adapters_is_the_base_to_the_bit() -> None:
    model, plain = made(), load_model(config(), CPU).model
    assert not torch.equal(logits(model), logits(plain))
    before = logits(model)
    with without_adapters(model):
        assert torch.equal(logits(model), logits(plain))
    assert torch.equal(logits(model), before)


def test_merging_gives_the_same_model_and_says_what_rounding_took() -> None:
    model = made()
    wanted = logits(model)
    assert merge_adapters(model) < 1e-6
    assert not adapted_layers(model)
    assert not any("lora" in name for name, _ in model.named_parameters())
    torch.testing.assert_close(logits(model), wanted, atol=1e-5, rtol=1e-5)


def test_merging_small_adapters_into_bfloat16_loses_some_of_them() -> None:
    model = made({"model.dtype": "bfloat16"})
    for layer in adapted_layers(model).values():
        layer.lora_B.data *= 1e-3
    assert 0.05 < merge_adapters(model) <= 1.5


def test_full_rank_reaches_what_training_all_weights_reaches() -> None:
    torch.manual_seed(0)
    x, wanted = torch.randn(64, 6), torch.randn(64, 5)

    def trained(layer: nn.Linear, parameters) -> float:
        optimizer = torch.optim.Adam(parameters, lr=0.03)
        for _ in range(1500):
            optimizer.zero_grad()
            loss = (layer(x) - wanted).square().mean()
            loss.backward()
            optimizer.step()
        return float(loss.detach())

    full, adapted = nn.Linear(6, 5, bias=False), nn.Linear(6, 5, bias=False)
    adapted.__class__ = LoraLinear
    adapted.lora_A, adapted.lora_B = nn.Parameter(torch.randn(5, 6) / 3), nn.Parameter(torch.zeros(5, 5))
    adapted.scale, adapted.is_on = 1.0, True
    adapted.weight.requires_grad_(False)
    assert trained(adapted, [adapted.lora_A, adapted.lora_B]) == pytest.approx(
        trained(full, full.parameters()), rel=1e-4
    )


@pytest.mark.parametrize("changes", [{}, {"model.dtype": "bfloat16"}], ids=["float32", "bfloat16"])
def test_the_digest_is_of_the_base(changes: dict) -> None:
    model = made(changes)
    before = base_digest(model)
    model.model.layers[0].self_attn.q_proj.lora_A.data += 1
    assert base_digest(model) == before
    model.model.layers[0].self_attn.q_proj.weight.data[3, 4] += 1
    assert base_digest(model) != before


def test_the_digest_is_the_same_in_any_type() -> None:
    model = made()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    before = base_digest(model)
    assert base_digest(model.bfloat16()) == before


# Shapes


@pytest.mark.parametrize("lora", [{}, {"targets": ["q_proj", "o_proj"]}, {"exclude": ["o_proj", "v_proj"]}])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_shape_counts_its_adapters(name: str, lora: dict) -> None:
    settings = config(family(name), **lora)
    model, shape = load_initial(settings, CPU).model, find_shape(settings.model)
    trained = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    assert shape.adapter_parameters == sum(trained)
    assert shape.trained_tensor_count == len(trained)
    assert shape.largest_trained_tensor == max(trained)
    assert shape.parameters == sum(one.numel() for one in model.parameters() if not one.requires_grad)


def test_blocks_without_experts_in_a_mixture_of_experts_have_the_same_adapters() -> None:
    made = AutoConfig.for_model("qwen3_moe", **{**SHAPE, **EXPERTS, "mlp_only_layers": [0]})
    model = AutoModelForCausalLM.from_config(made)
    add_adapters(model, LoraConfig(rank=4), seed=0)
    assert len(adapted_layers(model)) == 2 * 4
    shape = with_lora(from_config(made.to_dict(), "it"), ModelConfig(path="it", lora=LoraConfig(rank=4)))
    trained = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    assert shape.adapter_parameters == sum(trained)
    assert shape.trained_tensor_count == len(trained)


# PEFT


@pytest.mark.parametrize(
    ("name", "lora"), [("qwen3", {"targets": ["q_proj", "v_proj", "down_proj"]}), ("qwen3_moe", {})]
)
def test_peft_loads_what_is_written(tmp_path: Path, name: str, lora: dict) -> None:
    peft = pytest.importorskip("peft")
    model = made(family(name), **lora)
    write_adapter(model, LoraConfig(rank=4, alpha=6), "base", tmp_path)
    theirs = peft.PeftModel.from_pretrained(load_model(config(family(name)), CPU).model, tmp_path)
    torch.testing.assert_close(logits(theirs), logits(model), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("targets", [["q_proj", "o_proj"], "all-linear"])
def test_what_peft_writes_for_a_mixture_of_experts(tmp_path: Path, targets: str | list[str]) -> None:
    """PEFT's linear layers include experts."""
    peft, sparse = pytest.importorskip("peft"), family("qwen3_moe")
    settings = peft.LoraConfig(r=3, lora_alpha=5, target_modules=targets, init_lora_weights=False)
    theirs = peft.get_peft_model(load_model(config(sparse), CPU).model, settings)
    theirs.save_pretrained(tmp_path)
    tree = merged(TINY, {**sparse, "model.lora": {"adapter": str(tmp_path)}})
    if targets == "all-linear":
        with pytest.raises(UserError, match=r"has `target_parameters: .*`, and experts cannot have adapters yet"):
            with_runs_as_models(GrpoConfig.model_validate(tree), print)
        return
    mine = with_runs_as_models(GrpoConfig.model_validate(tree), print)
    torch.testing.assert_close(logits(load_initial(mine, CPU).model), logits(theirs), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("rslora", [False, True])
def test_what_peft_writes_is_loaded(tmp_path: Path, rslora: bool) -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=["k_proj", "up_proj"], init_lora_weights=False, use_rslora=rslora
    )
    theirs = peft.get_peft_model(load_model(config(), CPU).model, settings)
    theirs.save_pretrained(tmp_path)
    tree = merged(TINY, {"model.lora": {"adapter": str(tmp_path)}})
    mine = with_runs_as_models(GrpoConfig.model_validate(tree), print)
    assert mine.model.lora is not None
    assert (mine.model.lora.rank, mine.model.lora.targets) == (3, ["k_proj", "up_proj"])
    assert mine.model.lora.alpha == pytest.approx(5 * (math.sqrt(3) if rslora else 1))
    torch.testing.assert_close(logits(load_initial(mine, CPU).model), logits(theirs), atol=1e-6, rtol=1e-5)


def written(folder: Path, **changes) -> Path:
    model = made()
    write_adapter(model, LoraConfig(rank=4, alpha=6), None, folder)
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**settings, **changes}))
    return folder


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"use_dora": True}, "has `use_dora: True`, which is not supported"),
        ({"modules_to_save": ["lm_head"]}, "has `modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, "has `rank_pattern"),
        ({"bias": "all"}, "has `bias: all`"),
        ({"peft_type": "IA3"}, "not a LoRA adapter"),
        ({"target_modules": ".*_proj"}, "by a pattern"),
        ({"init_lora_weights": "pissa"}, "has `init_lora_weights: pissa`"),
        ({"a_new_kind_of_adapter": {"strength": 3}}, "has `a_new_kind_of_adapter"),
        ({"r": None}, "no readable adapter_config.json"),
        ({"r": 0}, "no readable adapter_config.json"),
    ],
)
def test_adapters_of_other_kinds_are_refused_by_name(tmp_path: Path, changes: dict, says: str) -> None:
    with pytest.raises(UserError, match=says):
        read_lora_config(written(tmp_path, **changes))


def test_settings_that_contradict_the_adapter_are_named(tmp_path: Path) -> None:
    tree = merged(TINY, {"model.lora": {"adapter": str(written(tmp_path)), "rank": 8}})
    with pytest.raises(UserError, match=r"`model.lora.rank` is 8, and that of the adapter in .* is 4: remove it"):
        with_runs_as_models(GrpoConfig.model_validate(tree), print)
    tree = merged(TINY, {"model.lora": {"adapter": str(tmp_path / "nothing")}})
    with pytest.raises(UserError, match=r"is neither a folder with an adapter_config\.json nor a run"):
        with_runs_as_models(GrpoConfig.model_validate(tree), print)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    other = made({"model.scratch.mlp": 64})
    with pytest.raises(UserError, match="was trained on another model"):
        load_adapter(other, written(tmp_path))
    without_digest = load_file(tmp_path / "adapter_model.safetensors")
    save_file(without_digest, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"does not fit the model: .*mlp.*, not \["):
        load_adapter(other, tmp_path)
    with pytest.raises(UserError, match="the model has no such layer"):
        load_adapter(made(targets=["q_proj"]), tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"no readable adapter_model\.safetensors"):
        load_adapter(made(), tmp_path)


def test_settings_that_suit_all_weights_and_not_adapters_are_warned_of() -> None:
    def doubts(*options: str) -> list[str]:
        return find_doubts(load("quickstart", [*options]))

    trained = ["model.scratch=null", "model.path=MODEL"]
    assert doubts("optimizer.lr=1e-6") == []
    assert doubts(*trained, "model.lora.rank=4", "optimizer.lr=5e-6") == []
    assert "`optimizer.lr: 1e-06` is little" in doubts(*trained, "model.lora.rank=4", "optimizer.lr=1e-6")[0]
    assert "beside random weights (`model.scratch`)" in doubts("model.lora.rank=4")[0]
    assert doubts("model.lora.rank=4", "model.weights=RUN") == []
