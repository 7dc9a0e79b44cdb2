"""Layers with states on a GPU: padded groups of packed sequences, and slots that captured graphs read and write."""

import pytest
import torch

from ebbtide.model.load import LoadedModel
from ebbtide.model.state_layers import state_layers
from ebbtide.policy.datum import Datum
from ebbtide.policy.fused_norm import fuse_norms
from ebbtide.policy.policy import Policy
from ebbtide.progress import no_progress
from ebbtide.rollout.engine import Request, SamplingParams
from ebbtide.rollout.paged.engine import PagedEngine
from families import family_model
from state_families import STATES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def _on_gpu(name: str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    loaded = family_model(name, dtype)
    loaded.model.cuda()
    return loaded


@torch.no_grad()
def _own(loaded: LoadedModel, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    ids = torch.tensor([prompt + tokens], device="cuda")
    rows = loaded.model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    return rows.gather(-1, ids[0, len(prompt) :, None])[:, 0].cpu()


BITS = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""How far log-probs may lie apart, in the mean."""


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("name", STATES)
def test_packed_sequences_have_their_own_logprobs(tiny, name, dtype) -> None:
    loaded = _on_gpu(name, dtype)
    policy = Policy(
        loaded,
        tiny(
            {
                "rollout.max_prompt_tokens": 8,
                "rollout.max_new_tokens": 56,
                "train.microbatch_tokens": 128,
                "device": "cuda",
            }
        ),
    )
    policy.fuse_blocks()
    data = [Datum.completion([3], [3 + (7 * place) % 9 for place in range(length)]) for length in (40, 1, 36, 11, 12)]
    policy.compute_logprobs("found", data, no_progress)
    for datum in data:
        own = _own(loaded, list(datum.tokens[:1]), list(datum.tokens[1:]))
        assert (datum.values["found"].float().cpu() - own).abs().mean() < BITS[dtype]


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("name", STATES)
def test_samples_have_the_models_own_logprobs(name, dtype) -> None:
    loaded = _on_gpu(name, dtype)
    requests = [Request([3, 4, 5, 6, 7, 8, 9, 10, 11], [1, 2, 3]), Request([8], [4]), Request([9, 3, 8, 4], [5, 6])]
    for options in ({}, {"block": 4, "chunk": 5, "blocks": 9}):
        engine = PagedEngine(loaded, 6, **options)
        for _ in range(2):  # the second time from captured graphs, with slots elsewhere
            found = engine.generate(requests, SamplingParams(12, ignore_eos=True), no_progress)
            for request, group in zip(requests, found, strict=True):
                for one in group:
                    own = _own(loaded, list(request.prompt), one.tokens)
                    assert (torch.tensor(one.plain_logprobs) - own).abs().mean() < BITS[dtype]


def _computed(model: torch.nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probs of what follows, and the gradients of their mean, of all parameters one after the other."""
    logprobs = model(ids, use_cache=False).logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])
    found = torch.autograd.grad(logprobs.mean(), [*model.parameters()], allow_unused=True)
    return logprobs.detach().cpu(), torch.cat([one.float().cpu().flatten() for one in found if one is not None])


@pytest.mark.parametrize("name", ["qwen3_5_text", "olmo_hybrid", "lfm2", "bamba", "falcon_h1"])
def test_gradients_in_16_bits_are_as_near_to_32_as_transformers(name) -> None:
    """With all kernels that 16 bits have on a GPU: norms, convolutions and the gated delta rule."""
    ids = torch.arange(3, 12).repeat(9)[None]
    half, wide = family_model(name, torch.bfloat16).model, family_model(name).model
    wide.load_state_dict(half.state_dict())
    for model in (half, wide):
        state_layers(model)  # Without it, fla's kernels are called on the CPU, too.
    wanted, theirs = _computed(wide, ids), _computed(half, ids)
    fuse_norms(half.cuda())
    for found, right, other in zip(_computed(half, ids.cuda()), wanted, theirs, strict=True):
        assert (found - right).norm() <= 1.5 * (other - right).norm() + 1e-3 * right.norm()
