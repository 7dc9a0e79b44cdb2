"""Experts of models whose blocks are not fused, in groups whose sizes the device alone knows."""

from copy import deepcopy

import pytest
import torch

from ebbtide.model.experts import groups_on_device, mix_experts
from ebbtide.policy.policy import Policy
from ebbtide.progress import no_progress
from ebbtide.rollout.engine import Request, SamplingParams
from ebbtide.rollout.paged.engine import PagedEngine
from ebbtide.system.transformers_internals import grouped_experts
from families import family_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SIZES = {"hidden_size": 128, "intermediate_size": 64, "moe_intermediate_size": 64}


@pytest.mark.parametrize("name", ["gpt_oss", "qwen2_moe"])
def test_experts_and_their_gradients_are_transformers(name) -> None:
    model = family_model(name, torch.bfloat16, **SIZES).model.cuda()
    module = next(one for one in model.modules() if hasattr(one, "is_transposed"))
    if not groups_on_device(module.down_proj):
        pytest.skip("this GPU has no grouped matmuls")
    chosen = torch.rand((500, module.num_experts), device="cuda").topk(2).indices
    given = [torch.randn((500, 128), device="cuda").bfloat16(), torch.rand((500, 2), device="cuda").bfloat16()]
    found = []
    for function, dtype in (
        (grouped_experts, torch.float32),
        (grouped_experts, torch.bfloat16),
        (mix_experts, torch.bfloat16),
    ):
        own = deepcopy(module).to(dtype)
        hidden, weights = (one.to(dtype).requires_grad_() for one in given)
        mixed = function(own, hidden, chosen, weights)
        inputs = [hidden, weights, *own.parameters()]
        found.append([mixed, *torch.autograd.grad((mixed.float() * given[0].float()).sum(), inputs)])
    for true, theirs, ours in zip(*found, strict=True):
        # transformers' gradient of a bias adds bfloat16 numbers up one by one, so it is the one that is off there.
        assert (ours - true).norm() <= max(5e-3 * true.norm(), 1.1 * (theirs - true).norm())


@pytest.mark.parametrize("name", ["gpt_oss", "qwen2_moe"])
def test_their_passes_are_captured_and_sample_what_they_do_without(tiny, name) -> None:
    loaded = family_model(name, torch.bfloat16, **SIZES)
    loaded.model.cuda()
    Policy(loaded, tiny({"device": "cuda", "model.dtype": "bfloat16"}))
    found = []
    for captured in (True, False):
        engine = PagedEngine(loaded, 4)
        engine._runner._captures = captured and engine._runner._captures
        groups = engine.generate([Request([3, 4, 5], [1, 2])], SamplingParams(12, ignore_eos=True), no_progress)
        found.append([(one.tokens, one.logprobs) for group in groups for one in group])
        assert engine._runner._captures == (captured and torch.cuda.get_device_capability()[0] in (9, 10))
    assert found[0] == found[1]
