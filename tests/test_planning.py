"""A run's own plan, on the CPU: chosen for the budget, written beside the run, refused before it begins."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ebbtide.cli import app
from ebbtide.cluster.world import World
from ebbtide.config import load
from ebbtide.config.tree import Config
from ebbtide.errors import UserError
from ebbtide.loop import train
from ebbtide.memory.shortage import out_of_memory
from ebbtide.planner.choose import Chooser
from ebbtide.planner.machine import machine_for
from ebbtide.planner.predict import Predictor
from ebbtide.planner.shape import find_shape
from ebbtide.planner.work import most_work
from ebbtide.planning import RunPlan, plan_run
from ebbtide.report.report import Report

CPU = torch.device("cpu")
SHAPE = "model.scratch={layers: 28, hidden: 2048, heads: 16, kv_heads: 8, head_dim: 128, mlp: 6144, vocabulary: 151936, context: 4096}"


def ran(config: Config, folder: Path) -> dict[str, torch.Tensor]:
    config = config.model_copy(update={"run": config.run.model_copy(update={"folder": str(folder)})})
    with Report(config, "test") as report:
        policy = train(config, report)
        report.end("done")
    return {name: weight.detach().clone() for name, weight in policy.model.named_parameters()}


def test_without_a_budget_a_cpu_run_is_as_it_is_set(tiny) -> None:
    assert plan_run(tiny(), CPU, None, World()) == (None, [])


def test_a_budget_below_the_least_is_refused_and_nothing_is_left(tiny, tmp_path) -> None:
    with pytest.raises(UserError, match="No plan does with less than"):
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


def test_what_is_foretold_of_holdings_is_what_is_held(tiny, tmp_path) -> None:
    for place in ("device", "streamed", "cpu"):
        config = tiny({"checkpoint": None, "memory.budget_gib": 1.0, "optimizer.place": place, "loss.kl": {}})
        ran(config, tmp_path / place)
        written = json.loads((tmp_path / place / "plan.json").read_text())["phases"]
        last = json.loads((tmp_path / place / "metrics.jsonl").read_text().splitlines()[-1])
        for phase in ("generate", "logprob", "train", "step"):
            for name in ("weights", "master", "moments", "reference"):
                # Within what tiny tensors lose to round beginnings.
                held = last.get(f"device_gib/{phase}/{name}", 0.0)
                assert written[phase]["device_gib"].get(name, 0.0) == pytest.approx(held, rel=0.1, abs=1e-9), (place, phase, name)


def test_a_plan_that_moves_trains_to_the_same_bits(tiny, tmp_path) -> None:
    wider = {"checkpoint": None, "model.scratch.hidden": 256, "model.scratch.mlp": 512, "model.scratch.layers": 4}
    plain = ran(tiny(wider), tmp_path / "plain")
    config = tiny({**wider, "memory.budget_gib": 0.08})
    plan, said = plan_run(config, CPU, None, World())
    assert plan is not None
    assert any("memory.away" in line for line in said)
    moved = ran(config, tmp_path / "moved")
    assert load(str(tmp_path / "moved" / "config.yaml")).memory.away == plan.config.memory.away
    assert json.loads((tmp_path / "moved" / "metrics.jsonl").read_text().splitlines()[-1])["moved_gib"] > 0
    assert all(torch.equal(weight, moved[name]) for name, weight in plain.items())


def test_a_family_that_no_plan_is_made_for_goes_without(tiny, monkeypatch) -> None:
    def unknown(*_):
        raise UserError("of another family")

    monkeypatch.setattr("ebbtide.planning.from_config", unknown)
    plan, said = plan_run(tiny({"memory.budget_gib": 1.0}), CPU, None, World())
    assert plan is None
    assert said == ["no plan: of another family"]


def test_when_memory_runs_out_the_plan_is_asked() -> None:
    config = load("quickstart", [SHAPE, "memory.budget_gib=60"])
    machine, shape = machine_for("h200", None, None, None), find_shape(config.model)
    predictor = Predictor(shape, machine)
    chosen = Chooser(predictor, most_work(config), 60, 128).choose(config)
    plan = RunPlan(config, chosen.tried.config, chosen, shape, machine, predictor, None)
    said = plan.view("train")
    assert "The plan foresaw" in said
    assert "=" in said.partition("The nearest plan with less: ")[2]  # a setting is named
    assert "foresaw" not in plan.view(None)
    assert said in str(out_of_memory("train", {"weights": 1}, 2, "table", "no room. at all", [said]))
    assert "before the first phase" in str(out_of_memory(None, {"weights": 1}, 2, "table", "no room. at all"))


# The command

PLAN = ["plan", "quickstart", "--gpu", "h200"]


@pytest.mark.parametrize("more", [[], ["cluster.gpus=16", "memory.budget_gib=1"]], ids=["one", "ranks"])
def test_plan_imports_no_torch(more: list[str]) -> None:
    code = "import sys; from ebbtide.cli import app; app(sys.argv[1:], standalone_mode=False); sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *PLAN, *more], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "fits into" in done.stdout


def test_plan_for_programs() -> None:
    found = json.loads(CliRunner().invoke(app, [*PLAN, "--json"]).stdout)
    assert found["fits"]
    assert {"generate", "score", "logprob", "train", "step", "save", "evaluate"} >= set(found["phases"]) >= {"generate", "train", "step"}
    assert found["phases"]["train"]["peak_gib"] == pytest.approx(sum(found["phases"]["train"]["device_gib"].values()))
    assert found["kv_blocks"] > 0


def test_more_than_the_gpu_has_is_no_budget() -> None:
    done = CliRunner().invoke(app, [*PLAN, "memory.budget_gib=1000"])
    assert isinstance(done.exception, UserError)
    assert "more than the 139.8 GiB" in str(done.exception)


def test_a_prediction_alone_refuses_nothing_that_is_set_by_hand(tiny) -> None:
    plan, said = plan_run(tiny({"memory.plan": "manual", "memory.budget_gib": 1e-6}), CPU, None, World())
    assert plan is not None
    assert "does not fit" in said[0]
    assert " s a step" not in said[0]  # nobody foretells a CPU's seconds


def test_what_does_not_fit_says_so_and_by_its_exit_code() -> None:
    done = CliRunner().invoke(app, [*PLAN, "memory.budget_gib=0.001"])
    assert done.exit_code == 1
    assert "does not fit into the budget of 0.001 GiB" in done.stdout


def test_a_plan_says_how_to_set_it_by_hand() -> None:
    found = json.loads(CliRunner().invoke(app, [*PLAN, SHAPE, "memory.budget_gib=20", "--json"]).stdout)
    assert found["fits"]
    assert found["settings"]
    load("quickstart", found["settings"])  # each is a setting that there is
