"""What algorithms on examples take: pairs, teachers, divergences over the vocabulary, and evaluations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from conftest import TINY
from ebbtide.config.root import Config
from ebbtide.config.roots import validate_config
from ebbtide.errors import UserError
from ebbtide.model.shape import find_shape
from ebbtide.model.workload import Workload, max_workload
from ebbtide.parallel.costs import MeshShape
from ebbtide.planner.holdings import plan_holdings
from ebbtide.planner.host_memory import check_weights_fit, host_bytes
from ebbtide.planner.predict import Predictor
from ebbtide.planner.prediction import Prediction
from ebbtide.planner.render import explain_misfit
from ebbtide.planner.run_plan import RunPlan
from ebbtide.planner.search import PlanSearch
from ebbtide.planner.shapes import frozen_shapes
from ebbtide.system.machine import machine_for
from ebbtide.system.units import GIB

MACHINE = machine_for("h200", None, 128, None)
SCRATCH = {"layers": 8, "hidden": 1024, "heads": 8, "kv_heads": 4, "head_dim": 128, "mlp": 3072, "vocabulary": 50000}
MODEL = {"scratch": {**SCRATCH, "context": 4096}}
TEACHER = {"scratch": {**SCRATCH, "layers": 16, "hidden": 2048, "context": 4096}}
DATA = {"train": "x.jsonl", "batch_size": 16, "max_tokens": 2048}


def config_of(algorithm: str, **sections: Any) -> Config:
    more = {"teacher": TEACHER} if algorithm == "distill" else {}
    return validate_config(
        {"algorithm": algorithm, "model": MODEL, "data": DATA, "checkpoint": None, **more, **sections}
    )


def predictor_of(config: Config, sharing: MeshShape | None = None) -> Predictor:
    frozen = frozen_shapes(config, "cuda")
    return Predictor(find_shape(config.model), MACHINE, sharing=sharing, frozen=frozen)


def predict(config: Config, sharing: MeshShape | None = None) -> Prediction:
    return predictor_of(config, sharing).predict(config, max_workload(config), 100 * GIB)


def test_no_plan_has_micro_batches_that_a_pair_does_not_fit_into() -> None:
    config = config_of("dpo", memory={"budget_gib": 0.1})
    chosen = PlanSearch.for_config(predictor_of(config), config).choose(config)
    assert not chosen.fits  # what is shown is the smallest plan
    assert chosen.candidate.config.train.microbatch_tokens == config.min_microbatch_tokens == 2 * 2048


def test_what_is_computed_together_has_to_fit_into_a_micro_batch() -> None:
    with pytest.raises(ValueError, match=r"2 x `data.max_tokens` = 4096 tokens.* raise it to 4096 or more"):
        config_of("dpo", train={"microbatch_tokens": 4095})
    with pytest.raises(ValueError, match=r"a sequence may have `data.max_tokens` = 2048 tokens.* raise it to 2048"):
        config_of("sft", train={"microbatch_tokens": 2047})


@pytest.mark.parametrize(("ranks", "tokens", "count", "left"), [(1, 400, 3, 200), (2, 400, 2, None), (3, 400, 1, 200)])
def test_pairs_are_packed_as_pairs(ranks: int, tokens: int, count: int, left: int | None) -> None:
    """Seven pairs of 200 tokens, two of which fit into 599."""
    work = Workload(7, 2, 1, 100, 100, 100, together=2)
    packed = work.pack(599, ranks=ranks)
    assert (packed.full.tokens, packed.count, packed.last and packed.last.tokens) == (tokens, count, left)


def test_a_teacher_has_its_own_dtype() -> None:
    half, whole = (
        predict(config_of("distill", teacher={**TEACHER, "dtype": dtype})) for dtype in ("bfloat16", "float32")
    )
    for phase, row in (("logprob", "teacher"), ("train", "teacher_head"), ("train", "teacher_hidden")):
        assert whole.phases[phase].device[row] == 2 * half.phases[phase].device[row] > 0
    assert half.phases["train"].device["weights"] == whole.phases["train"].device["weights"]


def test_the_host_memory_of_a_teacher_is_of_its_own_dtype() -> None:
    tiny = {"model": TINY["model"], "device": "cpu", "memory": {"preset": "lean"}}
    sizes = []
    for dtype in ("bfloat16", "float32"):
        config = config_of(
            "distill", **tiny, data={**DATA, "max_tokens": 32}, teacher={**TINY["model"], "dtype": dtype}
        )
        sizes.append(host_bytes(config, plan_holdings(config))["teacher"])
    assert sizes[1] == 2 * sizes[0] > 0


def test_each_rank_loads_a_teacher_as_a_whole() -> None:
    config = config_of("distill")
    teacher = 2 * find_shape(config.frozen_models["teacher"]).parameters
    assert predict(config).loading_bytes == teacher
    assert predict(config, MeshShape(data=4, node=8)).loading_bytes == 4 * teacher
    assert not predict(config_of("sft")).loading_bytes
    machine = replace(MACHINE, host_gib=0.5)
    predictor = Predictor(find_shape(config.model), machine, frozen=frozen_shapes(config, "cuda"))
    chosen = PlanSearch(predictor, max_workload(config), 100, machine.host_gib).choose(config)
    assert chosen.bottleneck == "loading"
    assert "GiB of host memory needed to load the whole model, more than the 0.5 free" in explain_misfit(
        chosen, config, machine
    )


def test_a_teacher_without_room_on_a_cpu_is_refused_before_it_is_loaded() -> None:
    short = {**DATA, "max_tokens": 32}
    config = config_of(
        "distill", model=TINY["model"], data=short, teacher={"scratch": {**SCRATCH, "vocabulary": 10**9}}
    )
    config = config.model_copy(update={"device": "cpu"})
    with pytest.raises(UserError, match=r"the model's [\d,]+ and the teacher's [\d,]+ parameters need"):
        check_weights_fit(config, torch.device("cpu"))


def test_a_divergence_takes_the_logits_and_the_seconds_of_two_heads() -> None:
    from_file = config_of("distill")
    plain = predict(config_of("sft")).phases["train"]
    found = predict(from_file).phases["train"]
    rows, embedding = 2048 * 50000, find_shape(from_file.model).embedding
    assert found.device["logits"] == 4 * embedding + max(2 * 2 * rows, 2 * embedding)
    assert found.device["teacher_hidden"] == 2 * 2048 * 16 * 2047
    assert found.seconds > plain.seconds
    assert "logits" not in predict(from_file).phases["logprob"].device  # it computes hidden states alone


def test_a_rank_has_its_share_of_hidden_states_unless_minibatches_mix_them() -> None:
    ranks = MeshShape(data=4, node=8)
    share, all_of_them = (
        predict(config_of("distill", train={"minibatches": count}), ranks).phases["train"].device["teacher_hidden"]
        for count in (1, 2)
    )
    assert all_of_them == 4 * share


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "distill"])
def test_an_evaluation_on_held_out_data_is_predicted(algorithm: str) -> None:
    few, many = (
        predict(config_of(algorithm, evaluate={"every": 1}, data={**DATA, "held_out_rows": rows})).phases["evaluate"]
        for rows in (16, 64)
    )
    assert 3 * few.seconds < many.seconds < 5 * few.seconds
    assert few.device == many.device  # micro-batches and slices have the same size
    assert few.device["activations"] > 0
    teacher = {"teacher", "teacher_head", "teacher_hidden"}
    assert teacher & few.device.keys() == (teacher if algorithm == "distill" else set())


def test_a_teacher_is_needed_where_it_scores_held_out_data() -> None:
    config = config_of("distill", evaluate={"every": 1}, memory={"preset": "lean"})
    plan = plan_holdings(config)
    assert [plan.place(phase, "teacher") for phase in ("logprob", "train", "evaluate")] == ["device", "away", "device"]
    found = predict(config)
    evaluation, moved = found.phases["evaluate"], found.phases["logprob"].device["teacher"]
    assert evaluation.device["teacher"] == moved
    assert evaluation.exposed >= moved / MACHINE.rates.link_in  # step has it away
    unevaluated = config_of("distill", memory={"preset": "lean"})
    assert plan_holdings(unevaluated).place("evaluate", "teacher") == "away"


def test_an_evaluation_that_samples_has_the_lengths_of_rollouts() -> None:
    """And not those of the examples that are trained on."""
    rollout = {"max_prompt_tokens": 64, "max_new_tokens": 128}
    sampled = {"task": TINY["task"], "rollout": rollout, "evaluate": {"every": 1, "problems": 4}}
    short, long = (
        predict(config_of("sft", **sampled, data={**DATA, "max_tokens": tokens})).generation for tokens in (256, 2048)
    )
    assert short.min_blocks == long.min_blocks
    assert short.blocks == long.blocks


def test_examples_have_predicted_beside_measured() -> None:
    config = config_of("dpo")
    predictor = predictor_of(config)
    chosen = PlanSearch(predictor, max_workload(config), 100, 128).choose(config)
    plan = RunPlan(config, chosen.candidate.config, chosen, predictor.shape, MACHINE, predictor, None)
    work = Workload(3, 2, 10, 40, 60, 2047, trained=6, together=2)
    wanted = predictor.predict(config, work, int(plan.budget_gib * GIB)).phases["train"]
    metrics = {"peak_gib/train": wanted.peak / GIB, "seconds/train": 1.0}
    table, far_off = plan.compare([], [(10, 20), (10, 60)] * 3, metrics)
    assert table[1] == ["train", "1.00", f"{wanted.seconds:.2f}", *[f"{wanted.peak / GIB:.2f}"] * 2, "+0%"]
    assert not far_off
