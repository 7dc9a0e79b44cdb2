"""Layers with states on a GPU: padded groups of packed sequences, and slots that captured graphs read and write."""

import pytest
import torch

from ebbtide.model.load import LoadedModel
from ebbtide.policy.datum import Datum
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


@pytest.mark.parametrize("name", STATES)
def test_packed_sequences_have_their_own_logprobs(tiny, name) -> None:
    loaded = _on_gpu(name)
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
    data = [Datum.completion([3], [3 + (7 * place) % 9 for place in range(length)]) for length in (40, 1, 36, 11, 12)]
    policy.compute_logprobs("found", data, no_progress)
    for datum in data:
        own = _own(loaded, list(datum.tokens[:1]), list(datum.tokens[1:]))
        torch.testing.assert_close(datum.values["found"].float().cpu(), own, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", STATES)
def test_samples_have_the_models_own_logprobs(name) -> None:
    loaded = _on_gpu(name)
    requests = [Request([3, 4, 5, 6, 7, 8, 9, 10, 11], [1, 2, 3]), Request([8], [4]), Request([9, 3, 8, 4], [5, 6])]
    for options in ({}, {"block": 4, "chunk": 5, "blocks": 9}):
        engine = PagedEngine(loaded, 6, **options)
        for _ in range(2):  # the second time from captured graphs, with slots elsewhere
            found = engine.generate(requests, SamplingParams(12, ignore_eos=True), no_progress)
            for request, group in zip(requests, found, strict=True):
                for one in group:
                    own = _own(loaded, list(request.prompt), one.tokens)
                    torch.testing.assert_close(torch.tensor(one.plain_logprobs), own, atol=1e-3, rtol=1e-3)
