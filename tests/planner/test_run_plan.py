"""A run's own plan, on the CPU: chosen for the budget, written beside the run, refused before it begins."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ebbtide.algorithms.loop import train
from ebbtide.cli import app
from ebbtide.config import load
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.config.planner_keys import settings_diff
from ebbtide.errors import UserError
from ebbtide.memory.oom import oom_error
from ebbtide.model.shape import find_shape
from ebbtide.model.workload import max_workload
from ebbtide.parallel.comm import Comm
from ebbtide.planner.predict import Predictor
from ebbtide.planner.run_plan import RunPlan, plan_run
from ebbtide.planner.search import PlanSearch
from ebbtide.report.report import Report
from ebbtide.system.machine import machine_for
from plans import plan_of
from tiny_gguf import VOCABULARY, written

CPU = torch.device("cpu")
SHAPE = (
    "model.scratch={layers: 28, hidden: 2048, heads: 16, kv_heads: 8, head_dim: 128, mlp: 6144, vocabulary: 151936,"
    " context: 4096}"
)


def ran(config: GrpoConfig, folder: Path) -> dict[str, torch.Tensor]:
    config = config.model_copy(update={"run": config.run.model_copy(update={"folder": str(folder)})})
    with Report(config, "test") as report:
        policy = train(config, report)
        report.summarize_run("done")
    return {name: weight.detach().clone() for name, weight in policy.model.named_parameters()}


def test_without_a_budget_a_cpu_run_is_as_it_is_set(tiny) -> None:
    said: list[str] = []
    assert plan_run(tiny(), CPU, None, Comm(), said.append) is None
    assert said == []


def test_a_budget_below_the_least_is_refused_and_nothing_is_left(tiny, tmp_path) -> None:
    with pytest.raises(UserError, match=r"The minimum is [\d.]+ GiB of device memory"):
        ran(tiny({"memory.budget_gib": 1e-6}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_plan_is_written_beside_the_run_and_the_config_has_what_was_chosen(tiny, tmp_path) -> None:
    plain = ran(tiny({"checkpoint": None}), tmp_path / "plain")
    config = tiny({"checkpoint": None, "memory.budget_gib": 1.0})
    budgeted = ran(config, tmp_path / "budgeted")
    assert all(torch.equal(weight, budgeted[name]) for name, weight in plain.items())
    written = json.loads((tmp_path / "budgeted" / "plan.json").read_text())
    assert written["fits"]
    assert written["phases"]["step"]["device_gib"]["moments"] > 0
    assert not (tmp_path / "plain" / "plan.json").exists()


def test_what_is_predicted_of_holdings_is_what_is_held(tiny, tmp_path) -> None:
    for place in ("device", "streamed", "cpu"):
        config = tiny({"checkpoint": None, "memory.budget_gib": 1.0, "optimizer.place": place, "loss.kl": {}})
        ran(config, tmp_path / place)
        written = json.loads((tmp_path / place / "plan.json").read_text())["phases"]
        last = json.loads((tmp_path / place / "metrics.jsonl").read_text().splitlines()[-1])
        for phase in ("generate", "logprob", "train", "step"):
            for name in ("weights", "master", "moments", "reference"):
                # Within what tiny tensors lose to round beginnings.
                held = last.get(f"device_gib/{phase}/{name}", 0.0)
                assert written[phase]["device_gib"].get(name, 0.0) == pytest.approx(held, rel=0.1, abs=1e-9), (
                    place,
                    phase,
                    name,
                )


def test_a_plan_that_moves_trains_to_the_same_bits(tiny, tmp_path) -> None:
    wider = {"checkpoint": None, "model.scratch.hidden": 256, "model.scratch.mlp": 512, "model.scratch.layers": 4}
    plain = ran(tiny(wider), tmp_path / "plain")
    config = tiny({**wider, "memory.budget_gib": 0.065})
    said: list[str] = []
    plan = plan_run(config, CPU, None, Comm(), said.append)
    assert plan is not None
    assert any("memory.offload" in line for line in said)
    moved = ran(config, tmp_path / "moved")
    assert load(str(tmp_path / "moved" / "config.yaml")).memory.offload == plan.config.memory.offload
    assert json.loads((tmp_path / "moved" / "metrics.jsonl").read_text().splitlines()[-1])["moved_gib"] > 0
    assert all(torch.equal(weight, moved[name]) for name, weight in plain.items())


def test_a_family_that_no_plan_is_made_for_goes_without(tiny, monkeypatch) -> None:
    def unknown(*_):
        raise UserError("of another family")

    monkeypatch.setattr("ebbtide.planner.run_plan.from_config", unknown)
    said: list[str] = []
    assert plan_run(tiny({"memory.budget_gib": 1.0}), CPU, None, Comm(), said.append) is None
    assert said == ["no plan: of another family"]


def test_a_run_of_a_gguf_file_is_planned(tiny, tmp_path) -> None:
    file = written(tmp_path / "model.gguf", "qwen2", tied=True)
    plan = plan_run(tiny({"memory.budget_gib": 1.0, "model": {"path": str(file)}}), CPU, None, Comm(), print)
    assert plan is not None
    assert plan.shape.vocabulary == VOCABULARY


def test_when_memory_runs_out_the_plan_is_asked() -> None:
    config = load("quickstart", [SHAPE, "memory.budget_gib=60"])
    machine, shape = machine_for("h200", None, None, None), find_shape(config.model)
    predictor = Predictor(shape, machine)
    chosen = PlanSearch(predictor, max_workload(config), 60, 128).choose(config)
    plan = RunPlan(config, chosen.candidate.config, chosen, shape, machine, predictor, None)
    said = plan.oom_advice("train")
    assert "The plan predicted" in said
    changes = shlex.split(said.partition("The nearest plan that needs less: ")[2].partition(" (")[0])
    # each is a setting that there is
    less = load("quickstart", [SHAPE, *settings_diff(config, chosen.candidate.config), *changes])
    assert (
        PlanSearch(predictor, max_workload(less), less.memory.budget_gib, 128).choose(less).candidate.prediction.peak
        < chosen.candidate.prediction.peak
    )
    assert "predicted" not in plan.oom_advice(None)
    assert said in str(oom_error(plan_of(), "train", {"weights": 1}, 1, "table", "no room. at all", [said]))
    assert "before the first phase" in str(oom_error(plan_of(), None, {"weights": 1}, 1, "table", "no room. at all"))
    in_pieces = str(oom_error(plan_of(), None, {"weights": 1}, 1, "table", "no room. at all", unused=2**30))
    assert re.search(r"unused +1\.000", in_pieces)
    assert "unused" not in str(oom_error(plan_of(), None, {"weights": 1}, 1, "table", "no room. at all"))


def test_mfu_is_of_what_was_trained_on_and_of_all_gpus() -> None:
    config = load("quickstart", [SHAPE, "train.epochs=2"])
    machine, shape = machine_for("h200", None, None, None), find_shape(config.model)
    predictor = Predictor(shape, machine)
    chosen = PlanSearch(predictor, max_workload(config), 60, 128).choose(config)
    plan = RunPlan(config, chosen.candidate.config, chosen, shape, machine, predictor, None, ranks=2)
    assert plan.mfu([(30, 50)], 0.5) == 2 * shape.train_flops([(30, 50)]) / (0.5 * 989e12 * 2)
    assert plan.mfu([], 0.5) is None
    assert replace(plan, machine=replace(machine, name="Some Other GPU")).mfu([(30, 50)], 0.5) is None


def test_what_is_left_to_the_cache_is_named_as_less_for_it() -> None:
    """Where generate took too much, anything else given up would only make the cache larger."""
    config = load(
        "quickstart",
        [
            SHAPE,
            "memory.budget_gib=40",
            "rollout.prompts_per_step=64",
            "rollout.group_size=16",
            "rollout.max_new_tokens=2048",
        ],
    )
    machine, shape = machine_for("h200", None, None, None), find_shape(config.model)
    predictor = Predictor(shape, machine)
    chosen = PlanSearch(predictor, max_workload(config), 40, 128).choose(config)
    said = RunPlan(config, chosen.candidate.config, chosen, shape, machine, predictor, None).oom_advice("generate")
    changes = shlex.split(said.partition("The nearest plan that needs less: ")[2].partition(" (")[0])
    less = load(
        "quickstart",
        [SHAPE, "rollout.prompts_per_step=64", "rollout.group_size=16", "rollout.max_new_tokens=2048", *changes],
    )
    again = PlanSearch(predictor, max_workload(less), less.memory.budget_gib, 128).choose(less)
    assert again.candidate.prediction.phases["generate"].peak < chosen.candidate.prediction.phases["generate"].peak


# The command

PLAN = ["plan", "quickstart", "--gpu", "h200"]


@pytest.mark.parametrize("more", [[], ["parallel.gpus=16", "memory.budget_gib=1"]], ids=["one", "ranks"])
def test_plan_imports_no_torch(more: list[str]) -> None:
    code = (
        "import sys; from ebbtide.cli import app; app(sys.argv[1:], standalone_mode=False); sys.exit('torch' in"
        " sys.modules or 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, *PLAN, *more], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "fits into" in done.stdout


def test_plan_for_programs() -> None:
    found = json.loads(CliRunner().invoke(app, [*PLAN, "--json"]).stdout)
    assert found["fits"]
    assert (
        {"generate", "score", "logprob", "train", "step", "save", "evaluate"}
        >= set(found["phases"])
        >= {"generate", "train", "step"}
    )
    assert found["phases"]["train"]["peak_gib"] == pytest.approx(sum(found["phases"]["train"]["device_gib"].values()))
    assert found["kv_blocks"] > 0


def test_more_than_the_gpu_has_is_no_budget() -> None:
    done = CliRunner().invoke(app, [*PLAN, "memory.budget_gib=1000"])
    assert isinstance(done.exception, UserError)
    assert "more than the 139.8 GiB" in str(done.exception)


def test_a_prediction_alone_refuses_nothing_that_is_set_by_hand(tiny) -> None:
    said: list[str] = []
    config = tiny({"memory.plan": "manual", "memory.budget_gib": 1e-6})
    assert plan_run(config, CPU, None, Comm(), said.append) is not None
    assert "does not fit" in said[0]
    assert " s per step" not in said[0]  # a CPU's seconds are not predicted


def test_what_does_not_fit_says_so_and_by_its_exit_code() -> None:
    done = CliRunner().invoke(app, [*PLAN, "memory.budget_gib=0.001"])
    assert done.exit_code == 1
    assert "does not fit into the budget of 0.001 GiB" in done.stdout


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["memory.activations.recompute=[block_input]"], "blocks are recomputed from their inputs"),
        (["memory.activations.offload=[moe_act]"], "which a block of qwen3 does not have"),
        (["memory.activations.offload=[attn_norm]"], "which a fused block never saves"),
    ],
)
def test_what_a_run_would_refuse_is_not_planned(options: list[str], says: str) -> None:
    done = CliRunner().invoke(app, [*PLAN, SHAPE, *options])
    assert isinstance(done.exception, UserError)
    assert says in str(done.exception)


def test_what_a_slow_link_cannot_carry_is_made_again_as_in_a_run() -> None:
    options = [
        *PLAN,
        SHAPE,
        "--link",
        "2",
        "memory.activations.offload=[core_attn, mlp_act, mlp_norm]",
        "memory.plan=manual",
    ]
    found = {
        gate: CliRunner().invoke(app, [*options, f"memory.activations.on_slow_link={gate}"]).stdout
        for gate in ("downgrade", "ignore")
    }
    assert "activations: offload core_attn, mlp_act, mlp_norm\n" in found["ignore"]
    assert "activations: recompute core_attn, mlp_act, mlp_norm\n" in found["downgrade"]


def of_folder(tmp_path: Path, **sizes: Any) -> str:
    """A setting that names a model of these sizes, of which there is only the config.json."""
    known = {
        "model_type": "llama",
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
    }
    (tmp_path / "config.json").write_text(
        json.dumps({**known, "vocab_size": 128256, "max_position_embeddings": 4096, **sizes})
    )
    return f"model={{path: {tmp_path}}}"


def test_a_context_that_is_too_short_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    long = ["train.microbatch_tokens=16384", "rollout.max_new_tokens=8000"]
    done = CliRunner().invoke(app, [*PLAN, of_folder(tmp_path, num_hidden_layers=2), *long])
    assert isinstance(done.exception, UserError)
    assert "exceed the model's context of 4096" in str(done.exception)


def test_what_stops_every_plan_is_named(tmp_path: Path) -> None:
    """A model that each rank loads whole, into a host that has no room for so many."""
    options = [*PLAN, of_folder(tmp_path, num_hidden_layers=80), "parallel.gpus=16", "--gpus-per-node", "8"]
    done = CliRunner().invoke(app, options)
    assert (
        "does not fit: 1,051 GiB of host memory needed to load the whole model in each of the 8 ranks of a node, more"
        " than the 1,024 free" in done.stdout
    )
    assert "fits into" in CliRunner().invoke(app, [*options, "--host-gib", "1100"]).stdout


def test_a_rank_that_only_generates_is_named_where_it_is_what_does_not_fit(tmp_path: Path) -> None:
    beside = ["parallel.gpus=32", "parallel.rollout_gpus=2", "--host-gib", "4000"]
    done = CliRunner().invoke(
        app, ["plan", "quickstart", "--gpu", "h100", of_folder(tmp_path, num_hidden_layers=52), *beside]
    )
    assert "a rollout worker (a rank that only generates) needs" in done.stdout
    assert ", -" not in done.stdout  # no fewer than none are too many


def test_the_least_that_is_named_is_enough() -> None:
    options = [*PLAN, SHAPE, "--host-gib", "2000"]
    said = CliRunner().invoke(app, [*options, "memory.budget_gib=1.5"]).stdout
    least = said.partition("The minimum is ")[2].partition(" GiB")[0]
    options.append(f"memory.budget_gib={least}")
    # The recipe sets the micro-batch by hand: a smaller one is named, and left to the user.
    said = CliRunner().invoke(app, options).stdout
    changes = shlex.split(said.partition("Nearest settings that fit: ")[2].partition(", at ")[0])
    assert any(change.startswith("train.microbatch_tokens=") for change in changes)
    assert CliRunner().invoke(app, [*options, *changes]).exit_code == 0


def test_the_nearest_can_be_pasted_into_a_shell() -> None:
    options = [*PLAN, SHAPE, "memory.plan=manual", "memory.budget_gib=30"]
    said = CliRunner().invoke(app, options).stdout
    changes = shlex.split(said.partition("Nearest settings that fit: ")[2].partition(", at ")[0])
    assert any(" " in change for change in changes)
    assert CliRunner().invoke(app, [*options, *changes]).exit_code == 0


def test_a_replay_generates_nothing() -> None:
    found = json.loads(CliRunner().invoke(app, [*PLAN, SHAPE, "rollout.replay=file", "evaluate=null", "--json"]).stdout)
    assert found["phases"]["generate"]["seconds"] == 0
    assert not found["phases"]["generate"]["device_gib"].get("kv_cache")


@pytest.mark.parametrize(
    "option", [["--device-gib", "inf"], ["--host-gib", "inf"], ["--link", "inf"], ["--network", "nan"]]
)
def test_a_machine_is_finite(option: list[str]) -> None:
    assert CliRunner().invoke(app, [*PLAN, *option]).exit_code == 2


def test_a_plan_says_how_to_set_it_by_hand() -> None:
    found = json.loads(CliRunner().invoke(app, [*PLAN, SHAPE, "memory.budget_gib=20", "--json"]).stdout)
    assert found["fits"]
    assert found["settings"]
    load("quickstart", found["settings"])  # each is a setting that there is
