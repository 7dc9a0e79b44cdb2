"""The prediction is a sum over parts: any cycle of phases, and models of other shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar, Literal

import pytest
from transformers import AutoConfig

from ebbtide.config.model import ModelConfig
from ebbtide.config.root import Config, StepSize
from ebbtide.model.shape import find_shape, from_config
from ebbtide.model.workload import max_workload
from ebbtide.planner.holdings import plan_holdings
from ebbtide.planner.predict import Predictor
from ebbtide.planner.render import render_plan
from ebbtide.planner.search import PlanSearch
from ebbtide.policy.model_costs import FrozenCosts, FrozenShape
from ebbtide.rollout.paged.attention import model_cache_costs
from ebbtide.rollout.paged.cache_costs import CacheCosts, LayerCache, cache_costs_of
from ebbtide.system.machine import machine_for
from ebbtide.system.units import GIB

SCRATCH = {"layers": 8, "hidden": 1024, "heads": 8, "kv_heads": 4, "head_dim": 128, "mlp": 3072, "vocabulary": 50000}
MODEL: dict[str, Any] = {"model": {"scratch": {**SCRATCH, "context": 4096}}, "checkpoint": None}
MACHINE = machine_for("h200", None, 128, None)


class Tuning(Config):
    """Trains on given sequences: nothing is sampled."""

    cycle: ClassVar[tuple[str, ...]] = ("train", "step")
    algorithm: Literal["tuning"] = "tuning"

    @property
    def step_size(self) -> StepSize:
        return StepSize(16, 1, 64, 512)


class Distilling(Tuning):
    cycle: ClassVar[tuple[str, ...]] = ("generate", "logprob", "train", "step")

    frozen_heads_in: ClassVar[tuple[str, ...]] = ("train",)

    @property
    def frozen_models(self) -> Mapping[str, ModelConfig]:
        return {"teacher": self.model}

    @property
    def forward_passes(self) -> Mapping[str, tuple[str, ...]]:
        return {"logprob": ("teacher",)}


def predict(config: Config, **options: Any):
    predictor = Predictor(find_shape(config.model), MACHINE, **options)
    return predictor.predict(config, max_workload(config), 100 * GIB)


@pytest.mark.parametrize("preset", ["keep", "lean"])
def test_a_cycle_of_train_and_step(preset) -> None:
    config = Tuning.model_validate({**MODEL, "memory": {"preset": preset}})
    found = predict(config)
    assert list(found.phases) == ["train", "step"]
    assert found.seconds == found.phases["train"].seconds + found.phases["step"].seconds > 0
    assert ("moments" in found.phases["train"].device) == (preset == "keep")
    assert not any({"kv_cache", "reference"} & set(phase.device) for phase in found.phases.values())
    assert found.can_generate
    assert found.peak == max(phase.peak for phase in found.phases.values()) <= found.min_peak


def test_a_plan_for_training_alone_is_searched_and_shown() -> None:
    config = Tuning.model_validate({**MODEL, "memory": {"budget_gib": 4.5}})
    shape = find_shape(config.model)
    chosen = PlanSearch.for_config(Predictor(shape, MACHINE), config).choose(config)
    assert chosen.fits
    assert chosen.candidate.changes
    text = render_plan(chosen, config, shape, MACHINE)
    assert "generate" not in text
    assert "KV cache" not in text


def test_a_teacher_of_another_shape_is_needed_where_it_computes() -> None:
    config = Distilling.model_validate({**MODEL, "memory": {"preset": "lean"}})
    shape = find_shape(config.model)
    teacher = replace(shape, layers=32, hidden=2048, heads=16, mlp=8192)
    made = plan_holdings(config)
    assert made.place("logprob", "teacher") == "device"
    assert made.place("train", "teacher") == "away"
    assert made.place("train", "teacher_head") == "device"
    own, other = (predict(config, frozen={"teacher": FrozenShape(one, 2)}) for one in (shape, teacher))
    for found, size in ((own, shape), (other, teacher)):
        assert found.phases["logprob"].device["teacher"] == 2 * (size.parameters - size.embedding)
        assert found.phases["train"].device["teacher_head"] == 2 * size.embedding
    larger = 2 * (teacher.parameters - shape.parameters)
    assert other.phases["logprob"].host == own.phases["logprob"].host + larger
    assert other.phases["logprob"].device["activations"] > own.phases["logprob"].device["activations"]
    assert other.phases["logprob"].seconds > 2 * own.phases["logprob"].seconds
    targets = 16 * 512
    for found, size in ((own, shape), (other, teacher)):
        assert [
            found.phases[phase].device.get("teacher_hidden") for phase in ("generate", "logprob", "train", "step")
        ] == [
            None,
            *[2 * targets * size.hidden] * 3,
        ]
    theirs = ("teacher_head", "teacher_hidden", "activations")
    assert {name: size for name, size in other.phases["train"].device.items() if name not in theirs} == {
        name: size for name, size in own.phases["train"].device.items() if name not in theirs
    }
    # It never changes: in a step it crosses the link once, on its way in.
    moved = [sum(phase.moved for phase in found.phases.values()) for found in (own, other)]
    assert moved[1] - moved[0] == larger


@pytest.mark.parametrize(
    "family",
    [
        {"model_type": "llama", "num_key_value_heads": 4},
        {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 64},
        {"model_type": "gemma", "num_key_value_heads": 1, "head_dim": 32},
        {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96},
    ],
    ids=lambda family: family["model_type"],
)
def test_a_run_and_its_plan_size_the_kv_cache_alike(family) -> None:
    sizes = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 8, "intermediate_size": 112}
    loaded = AutoConfig.for_model(**{**sizes, **family, "vocab_size": 500})
    assert model_cache_costs(loaded) == cache_costs_of(from_config(loaded.to_dict(), "a test"))


def test_frozen_models_are_sharded_like_the_policy() -> None:
    config = Distilling.model_validate({**MODEL, "parallel": {"gpus": 4}})
    body, head = FrozenCosts.holdings(config, 4)
    assert (body.name, body.frozen, body.needed_in) == ("teacher", True, {"logprob"})
    assert (head.name, head.frozen, head.needed_in) == ("teacher_head", True, {"logprob", "train"})


@pytest.mark.parametrize(("useful", "least"), [(2400, 6), (400, 6), (10**6, 200)])
def test_more_memory_never_gives_a_smaller_cache(useful, least) -> None:
    costs = CacheCosts((LayerCache(8, 128, 128),) * 36, 4096, 4096, 12288, 151936)
    sizes = [size * 2**24 for size in range(40, 6000, 7)]
    found = [costs.fit(2, 64, 16384, 128, free, useful=useful, least=least) for free in sizes]
    blocks = [one for one, _ in found]
    assert all(after >= before for before, after in pairwise(blocks) if after >= least)
    assert {16384, 1024} <= {chunk for _, chunk in found}
    first = next(place for place, one in enumerate(blocks) if one >= least)
    assert min(blocks[first:]) >= least
    assert min(useful, 10**5) >= blocks[-1] > 0
