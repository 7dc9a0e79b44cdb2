"""Experts with gathers whose backward is a gather."""

import json

import pytest
import torch

import state_families  # noqa: F401 (its families are added to those of `families`)
from ebbtide.model import experts
from ebbtide.model.experts import NAME, mix_experts, use_fast_experts
from ebbtide.system.transformers_internals import experts_implementation, grouped_experts
from families import family_model

FAMILIES = ("gpt_oss", "qwen2_moe", "qwen3_5_moe_text", "deepseek_v3", "granitemoehybrid")


def _module(model: torch.nn.Module) -> torch.nn.Module:
    return next(module for module in model.modules() if hasattr(module, "is_transposed"))


@pytest.mark.parametrize("name", FAMILIES)
def test_experts_and_their_gradients_are_transformers(name) -> None:
    module = _module(family_model(name).model)
    count = module.num_experts
    made = torch.Generator().manual_seed(0)
    chosen = torch.rand((7, count), generator=made).topk(2).indices
    chosen = torch.where(chosen == 1, 0, chosen)  # an expert that no token visits
    found = []
    for function in (grouped_experts, mix_experts):
        made.manual_seed(1)
        hidden = torch.randn((7, module.down_proj.shape[2 if module.is_transposed else 1]), generator=made)
        weights = torch.rand((7, 2), generator=made)
        inputs = [hidden.requires_grad_(), weights.requires_grad_(), *module.parameters()]
        mixed = function(module, hidden, chosen, weights)
        found.append([mixed, *torch.autograd.grad((mixed * mixed.detach().cos()).sum(), inputs)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("grouped", [True, False])
def test_modules_of_older_versions_of_transformers_are_mixed(grouped, monkeypatch) -> None:
    module = _module(family_model("qwen2_moe").model)
    given = torch.randn(7, module.down_proj.shape[1]), torch.randint(module.num_experts, (7, 2)), torch.rand(7, 2)
    wanted = grouped_experts(module, *given)
    del module.has_post_expert_norm, module._is_expert_parallel
    monkeypatch.setattr(experts, "grouped_experts", lambda *_: wanted)  # of 5.22, which needs both
    monkeypatch.setattr(experts, "groups_on_device", lambda _: grouped)
    torch.testing.assert_close(experts._mix(module, *given), wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["gpt_oss", "qwen2_moe"])
def test_a_model_computes_what_it_did_where_the_device_has_no_groups(tmp_path, name) -> None:
    loaded = family_model(name)
    ids = torch.tensor([[3, 4, 5, 6, 7]])
    with torch.no_grad():
        before = loaded.model(ids).logits
        use_fast_experts(loaded.model)
        assert torch.equal(loaded.model(ids).logits, before)
    assert experts_implementation(loaded.model.config) == NAME
    loaded.model.save_pretrained(tmp_path)
    assert NAME not in json.dumps(json.loads((tmp_path / "config.json").read_text()))


def test_other_models_are_left_alone() -> None:
    loaded = family_model("bloom")
    use_fast_experts(loaded.model)
    assert experts_implementation(loaded.model.config) != NAME
