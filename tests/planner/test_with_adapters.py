"""Plans with adapters, and adapters as an answer to what does not fit."""

from __future__ import annotations

import json

import pytest
from test_fewer_gpus import MANY, SHAPE
from typer.testing import CliRunner

from ebbtide.cli import app
from ebbtide.planner.holdings import plan_holdings
from ebbtide.rollout import generation_costs

SMALL = ["--gpu", "4090", SHAPE, *MANY, "memory.budget_gib=3.5", "--host-gib", "4"]


def planned(*options: str, code: int = 0) -> dict:
    done = CliRunner().invoke(app, ["plan", "quickstart", "--json", *options])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def word(found: dict) -> list[str]:
    return [line for line in found["words"] if line.startswith("with adapters")]


def test_adapters_are_an_answer_to_what_does_not_fit() -> None:
    (said,) = word(planned(*SMALL, code=1))
    adapted = planned(*SMALL, "model.lora.rank=32")
    peak = max(phase["peak_gib"] for phase in adapted["phases"].values())
    assert f"(`model.lora.rank=32`): the peak is {peak:.3g} GiB" in said
    assert word(adapted) == []


def test_so_they_are_for_a_mixture_of_experts() -> None:
    experts = "model.scratch.architecture=qwen3_moe", "model.scratch.experts=32", "model.scratch.experts_per_token=4"
    sizes = "model.scratch.mlp=768", "memory.budget_gib=9", "--host-gib", "8"
    sparse = ["--gpu", "4090", SHAPE, *experts, *MANY, *sizes]
    (said,) = word(planned(*sparse, code=1))
    adapted = planned(*sparse, "model.lora.rank=32")
    assert f"the peak is {max(phase['peak_gib'] for phase in adapted['phases'].values()):.3g} GiB" in said


def test_what_fits_needs_none() -> None:
    assert word(planned("--gpu", "h100", SHAPE, *MANY)) == []


def test_what_does_not_fit_with_adapters_either_is_not_offered_them() -> None:
    assert word(planned(*SMALL, "memory.budget_gib=1.2", code=1)) == []


def test_state_and_gradients_are_of_the_adapters_alone() -> None:
    wide = [SHAPE, "model.scratch.hidden=4096", "model.scratch.mlp=12288", *MANY, "train.microbatch_tokens=8192"]
    whole, adapted = (
        planned("--gpu", "h200", *wide, "optimizer.place=device", *more) for more in ([], ["model.lora.rank=8"])
    )
    sizes = [found["phases"]["step"]["device_gib"] for found in (whole, adapted)]
    assert sizes[1]["base"] == sizes[0]["weights"]
    for name in ("master", "moments", "grads", "weights"):
        assert 0 < sizes[1][name] < 0.02 * sizes[0][name]
    assert adapted["phases"]["train"]["seconds"] < whole["phases"]["train"]["seconds"]


def test_so_is_a_smaller_base_with_its_embeddings() -> None:
    wide = [SHAPE, "model.scratch.hidden=4096", "model.scratch.mlp=12288", "model.scratch.vocabulary=151936", *MANY]
    tight = ["--gpu", "h200", *wide, "model.lora.rank=32", "model.base=int4", "memory.budget_gib=5.6"]
    (said,) = [line for line in planned(*tight, code=1)["words"] if "a smaller base" in line]
    peak = max(phase["peak_gib"] for phase in planned(*tight, "model.base_embeddings=true")["phases"].values())
    assert f"(`model.base_embeddings=true`): the peak is {peak:.3g} GiB" in said


def test_what_is_prefilled_again_takes_seconds_in_each_wave_of_samples(monkeypatch) -> None:
    passes = generation_costs.decode_passes
    sizes = [
        "model.scratch.hidden=1024",
        "model.scratch.mlp=3072",
        "model.scratch.layers=16",
        "rollout.max_num_seqs=128",
    ]
    small = ["--gpu", "h200", SHAPE, *MANY, *sizes, "rollout.max_new_tokens=1024", "memory.budget_gib=4"]

    def seconds(prompts: int) -> float:
        return planned(*small, f"rollout.prompts_per_step={prompts}")["phases"]["generate"]["seconds"]

    prompts = 16, 64
    whole = [seconds(count) for count in prompts]
    monkeypatch.setattr(generation_costs, "decode_passes", lambda *given: (passes(*given)[0], 0))
    once, often = (one - seconds(count) for one, count in zip(whole, prompts, strict=True))
    assert once > 0
    assert often > 3 * once


def test_several_ranks_are_offered_adapters_too() -> None:
    ranks = [*SMALL, "parallel.gpus=2"]
    (said,) = word(planned(*ranks, code=1))
    adapted = planned(*ranks, "model.lora.rank=32")
    peak = max(phase["peak_gib"] for phase in adapted["phases"].values())
    assert f"(`model.lora.rank=32`): the peak is {peak:.3g} GiB" in said


def test_each_rank_has_a_part_of_base_and_adapters() -> None:
    wide = ["--gpu", "h200", SHAPE, *MANY, "optimizer.place=device", "model.lora.rank=32"]
    alone, four, tensor = (
        planned(*wide, *more)["phases"] for more in ([], ["parallel.gpus=4"], ["parallel.gpus=4", "parallel.tensor=2"])
    )
    for name in ("base", "weights", "master", "moments", "grads"):
        assert four["step"]["device_gib"][name] == pytest.approx(alone["step"]["device_gib"][name] / 4, rel=0.01)
        # Half of an adapter is on both of the tensor-parallel ranks.
        assert alone["step"]["device_gib"][name] / 4 < tensor["step"]["device_gib"][name]
        assert tensor["step"]["device_gib"][name] < alone["step"]["device_gib"][name] / 2
    full = planned(*wide[:-1], "parallel.gpus=4")["phases"]
    assert four["train"]["seconds_communication"] < full["train"]["seconds_communication"]


def test_rollout_workers_get_adapters_alone() -> None:
    wide = [SHAPE, "model.scratch.hidden=4096", "model.scratch.mlp=12288", *MANY]
    beside = ["--gpu", "h200", *wide, "parallel.gpus=2", "parallel.rollout_gpus=1"]
    full, adapted = (planned(*beside, *more)["phases"]["generate"] for more in ([], ["model.lora.rank=8"]))
    assert adapted["device_gib"]["gathered"] < full["device_gib"]["gathered"] / 10
    assert adapted["seconds_communication"] < full["seconds_communication"]


def test_ranks_gather_the_base_as_they_do_the_adapters(tiny) -> None:
    made = plan_holdings(tiny({"model.lora": {"rank": 2}, "parallel": {"gpus": 2}}), 2)
    for phase in made.phases:
        wanted = "gathered" if phase in ("generate", "evaluate") else made.place(phase, "weights")
        assert made.place(phase, "base") == made.place(phase, "weights") == wanted


def test_a_base_is_streamed_where_activations_would_not_fit_beside_it() -> None:
    eight = {"layers": 36, "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "mlp": 12288, "tied": "false"}
    sizes = [f"model.scratch.{name}={value}" for name, value in {**eight, "vocabulary": 151936, "context": 512}.items()]
    work = ["rollout.prompts_per_step=16", "rollout.group_size=8", "rollout.max_prompt_tokens=100"]
    by_hand = ["rollout.max_new_tokens=256", "train.microbatch_tokens=4096", "memory.activations.preset=keep"]
    given = ["--gpu", "h200", *sizes, *work, *by_hand, "model.lora.rank=32", "checkpoint=null"]
    assert "memory.stream_base=True" in planned(*given, "memory.budget_gib=20")["settings"]
    assert planned(*given, "memory.budget_gib=60")["settings"] == []
    planned(*given, "memory.budget_gib=20", "memory.stream_base=false", code=1)  # What is set by hand stays.
