"""The norms of models whose blocks are not fused: what each computes is found out, and the fused ones compute that."""

from copy import deepcopy

import pytest
import torch
from torch import nn

import state_families  # noqa: F401 (it knows the families)
from ebbtide.model.block_reference import Norm
from ebbtide.model.load import decoder
from ebbtide.policy import fused_norm
from ebbtide.policy.fused_norm import fuse_norms, norm_by_trying
from families import family_model
from tiny_families import tiny_model

NARROW, GEMMA, WIDE = Norm(1e-6), Norm(1e-6, offset=1.0, wide=True), Norm(1e-6, wide=True)
KINDS = {
    "qwen3_5_text": {"Qwen3_5RMSNorm": (GEMMA, None), "Qwen3_5RMSNormGated": (None, NARROW)},
    "qwen3_next": {"Qwen3NextRMSNorm": (GEMMA, None), "Qwen3NextRMSNormGated": (None, NARROW)},
    "olmo_hybrid": {"OlmoHybridRMSNorm": (WIDE, None), "OlmoHybridRMSNormGated": (None, Norm(1e-5))},
    "deepseek_v3": {"DeepseekV3RMSNorm": (NARROW, None)},
    "gemma4_text": {"Gemma4RMSNorm": (WIDE, None)},
    "jetmoe": {"JetMoeRMSNorm": (NARROW, None)},
}


@pytest.mark.parametrize("name", KINDS)
def test_what_a_norm_computes_is_found_out(name) -> None:
    found = {}
    for module in decoder(family_model(name).model).modules():
        if (epsilon := fused_norm._epsilon(module)) is not None:
            plain, gated = (norm_by_trying(module, epsilon, gated=gated) for gated in (False, True))
            found[type(module).__name__] = plain, gated
    assert found == KINDS[name]


class Centered(nn.Module):
    """Like a norm, and something else."""

    def __init__(self) -> None:
        super().__init__()
        self.eps, self.weight = 1e-6, nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(-1, keepdim=True)
        return self.weight * (x.float() * (x.float().pow(2).mean(-1, keepdim=True) + self.eps).rsqrt()).to(x.dtype)


class Wider(Centered):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(8))


def test_what_is_no_norm_is_left_alone() -> None:
    assert norm_by_trying(Centered(), 1e-6) is None
    assert fused_norm._epsilon(Wider()) is None
    assert fused_norm._epsilon(nn.LayerNorm(8, bias=False)) is not None
    assert norm_by_trying(nn.LayerNorm(8, bias=False), 1e-5) is None


@pytest.mark.parametrize("name", ["kimi_linear", "bailing_hybrid", "jamba", "zamba2"])
def test_norms_that_want_a_gate_may_fail_without_one(name) -> None:
    model = tiny_model(name)
    fuse_norms(model)
    assert any("forward" in vars(module) for module in decoder(model).modules())


@pytest.mark.parametrize("name", ["qwen3_5_text", "olmo_hybrid", "granitemoehybrid", "gemma3n_text", "bamba"])
def test_a_model_with_fused_norms_has_its_outputs_and_gradients(monkeypatch, name) -> None:
    own = family_model(name, torch.bfloat16).model
    fused, ids = deepcopy(own), torch.arange(3, 12).repeat(3)[None]
    monkeypatch.setattr(fused_norm, "_on_gpu", lambda *tensors: True)
    calls = []
    for function in (fused_norm._Norm, fused_norm._GatedNorm):
        apply = function.apply
        monkeypatch.setattr(function, "apply", lambda *given, apply=apply: calls.append(1) or apply(*given))
    fuse_norms(fused)
    found = [model(ids, use_cache=False).logits.float() for model in (fused, own)]
    assert calls
    assert torch.equal(*found)
    gradients = [
        torch.autograd.grad(logits.square().mean(), [*model.parameters()], allow_unused=True)
        for logits, model in zip(found, (fused, own), strict=True)
    ]
    for mine, wanted in zip(*gradients, strict=True):
        assert (mine is None) == (wanted is None)
        if wanted is not None and wanted.norm() > 1e-6:  # transformers rounds several times on the way
            assert (mine - wanted).float().norm() <= 3e-2 * wanted.float().norm()


def test_norms_that_activations_know_by_name_stay_transformers() -> None:
    model = family_model("gemma2").model
    fuse_norms(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_norm_saves_its_input_alone_in_a_plan() -> None:
    model = family_model("qwen3_5_text", torch.bfloat16).model.to("meta")
    norm, x = decoder(model).norm, torch.empty((1, 7, 32), dtype=torch.bfloat16, device="meta")
    saved: list[list[torch.Tensor]] = []
    for _ in range(2):
        saved.append([])
        with torch.autograd.graph.saved_tensors_hooks(lambda one: saved[-1].append(one) or one, lambda one: one):
            norm(x.requires_grad_()).backward(torch.empty_like(x))
        fuse_norms(model)
    assert [one.shape for one in saved[1]] == [x.shape, norm.weight.shape]
    assert sum(one.nbytes for one in saved[0]) > 3 * sum(one.nbytes for one in saved[1])
