"""Attention as families have it, where it samples: log-probs are those of transformers' own forward, however a
sequence came to be in the cache."""

import pytest
import torch

from ebbtide.rollout.build import build_engine
from ebbtide.rollout.engine import Request, SamplingParams
from ebbtide.rollout.paged.attention import cache_layout, model_cache_costs
from ebbtide.rollout.paged.cache_costs import LayerCache
from ebbtide.rollout.paged.engine import PagedEngine
from families import family_model, own_logprobs

LONGER = {"rollout.max_prompt_tokens": 16, "rollout.max_new_tokens": 16, "rollout.max_num_seqs": 8}
FAMILIES = (
    *("gemma2", "gpt_oss", "mimo_v2_flash", "llama4_text", "deepseek_v3", "gemma3n_text", "gemma4_text"),
    *("jetmoe", "qwen2_moe"),
)
PROMPTS = [[3, 4, 5, 6, 7, 8, 9, 10, 3, 5, 7, 9, 4], [5, 9]]  # the windows and chunks of tests/families.py: 5 tokens


def farthest(loaded, found) -> float:
    """The largest difference of sampled log-probs from the model's own."""
    differences = [
        (torch.tensor(sample.logprobs) - own_logprobs(loaded, prompt, sample.tokens)).abs().max()
        for prompt, group in zip(PROMPTS, found, strict=True)
        for sample in group
    ]
    return max(differences).item()


@pytest.mark.parametrize("engine", ["paged", "huggingface"])
@pytest.mark.parametrize("name", FAMILIES)
def test_sampled_log_probs_are_those_of_the_models_own_forward(tiny, name, engine) -> None:
    loaded = family_model(name)
    engine = build_engine(loaded, tiny({**LONGER, "rollout.engine": engine}), lambda size: None)
    requests = [Request(PROMPTS[0], [1, 2, 3]), Request(PROMPTS[1], [4])]
    found = engine.generate(requests, SamplingParams(14, ignore_eos=True), lambda *_: None)
    assert farthest(loaded, found) < 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_samples_that_give_way_and_prompts_in_pieces_change_nothing(name) -> None:
    """Prompts are prefilled three tokens at a time, and samples that are preempted again with their own tokens."""
    loaded = family_model(name)
    tight = PagedEngine(loaded, 8, block=2, chunk=3, blocks=22)
    requests = [Request(PROMPTS[0], [1, 2, 3]), Request(PROMPTS[1], [4])]
    sampling = SamplingParams(14, ignore_eos=True)
    found = tight.generate(requests, sampling, lambda *_: None)
    assert tight.preempted > 0
    assert farthest(loaded, found) < 1e-5
    roomy = PagedEngine(loaded, 8, share_prompts=False).generate(requests, sampling, lambda *_: None)
    assert [[one.tokens for one in group] for group in found] == [[one.tokens for one in group] for group in roomy]


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("jetmoe", "mimo_v2_flash")])
def test_the_cache_has_the_sizes_that_the_config_promises(name) -> None:
    loaded = family_model(name)
    assert model_cache_costs(loaded.model.config).layers == tuple(cache_layout(loaded.model).own.values())


@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text"])
def test_layers_that_share_keys_have_no_cache_of_their_own(name) -> None:
    layout = cache_layout(family_model(name).model)
    assert list(layout.own) == [0, 1]
    assert layout.sources == {0: 0, 1: 1, 2: 0, 3: 1}


def test_heads_and_channels_are_those_of_each_layer() -> None:
    assert list(cache_layout(family_model("gemma4_text").model).own.values()) == [
        LayerCache(2, 8, 8),
        LayerCache(1, 16, 16),
    ]
    assert set(cache_layout(family_model("deepseek_v3").model).own.values()) == {LayerCache(4, 16, 4)}
    assert list(cache_layout(family_model("jetmoe").model).own.values()) == [LayerCache(4, 8, 8)] * 2
