"""Several adapters at once on a GPU: in fused blocks, in prefill, and in decode from CUDA graphs."""

from __future__ import annotations

import pytest
import torch

from conftest import TINY, merged
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.config.model import LoraConfig
from ebbtide.model.load import LoadedModel, load_model
from ebbtide.model.lora import adapted_layers, add_adapters
from ebbtide.model.row_adapters import join_adapters, take_adapters
from ebbtide.rollout.engine import Completion, Request, SamplingParams
from ebbtide.rollout.paged.engine import PagedEngine
from ebbtide.rollout.paged.verify import build_verified_engine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
WIDE = {"model.scratch.hidden": 256, "model.scratch.mlp": 512, "model.scratch.context": 256, "model.scratch.layers": 4}
KINDS = (
    LoraConfig(rank=16, alpha=32),
    LoraConfig(rank=8, alpha=7, targets=["q_proj", "v_proj", "down_proj"]),
    LoraConfig(rank=5, alpha=8, exclude=["k_proj", "gate_proj"]),
)
PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10, 11, 3, 4]]
GREEDY = SamplingParams(20, 0.0, ignore_eos=True)


def loaded_model(dtype: str) -> LoadedModel:
    torch.manual_seed(0)
    loaded = load_model(GrpoConfig.model_validate(merged(TINY, {**WIDE, "device": "cuda", "model.dtype": dtype})))
    for parameter in loaded.model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return loaded


def adapted(dtype: str, number: int) -> LoadedModel:
    """The model with one adapter, or with none."""
    loaded = loaded_model(dtype)
    if number:
        add_adapters(loaded.model, KINDS[number - 1], number)
        for layer in adapted_layers(loaded.model).values():
            layer.lora_B.data.normal_(std=0.1)
    return loaded


def with_all(dtype: str) -> LoadedModel:
    loaded = loaded_model(dtype)
    join_adapters(loaded.model, [take_adapters(adapted(dtype, number).model) for number in (1, 2, 3)])
    return loaded


def generate(engine: PagedEngine, requests: list[Request]) -> list[Completion]:
    return [one for (one,) in engine.generate(requests, GREEDY, lambda *_: None)]


def test_each_sample_has_what_its_adapter_computes_alone() -> None:
    """Twice by the same engine, with other adapters in the rows: a graph reads what its inputs have when it is
    replayed."""
    engine = PagedEngine(with_all("float32"), 16)
    assert engine._runner.is_fused
    alone = [
        generate(PagedEngine(adapted("float32", number), 16), [Request(prompt, [0]) for prompt in PROMPTS])
        for number in range(4)
    ]
    for numbers in ((0, 1, 2, 3), (3, 2, 0, 1), (2, 2, 1, 1)):
        found = generate(engine, [Request(prompt, [0], number) for prompt in PROMPTS for number in numbers])
        wanted = [alone[number][place] for place in range(len(PROMPTS)) for number in numbers]
        for mine, theirs in zip(found, wanted, strict=True):
            assert mine.tokens == theirs.tokens
            assert mine.plain_logprobs == pytest.approx(theirs.plain_logprobs, abs=1e-3)
    assert engine._runner._graphs
    assert engine._runner._captures


def test_in_bfloat16_the_engine_computes_what_the_model_does_with_an_adapter() -> None:
    engine = build_verified_engine(with_all("bfloat16"), 16, longest=(64, 64))
    assert engine._runner.is_fused
