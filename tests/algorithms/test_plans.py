"""Algorithms on examples are planned for: a budget changes no bit, too small a one is refused, and `plan` says what a
run would take."""

import json

import pytest
import yaml
from typer.testing import CliRunner

from conftest import TINY
from ebbtide.cli import app
from ebbtide.errors import UserError
from example_runs import BASE, DATA, config_of, digits, preferences, run, same, write_rows

LARGE = {"layers": 28, "hidden": 2048, "heads": 16, "kv_heads": 8, "head_dim": 128, "mlp": 6144, "vocabulary": 151936}
TEACHER = {**LARGE, "layers": 36, "hidden": 2560, "heads": 32, "mlp": 9728}
SAMPLED = {"task": TINY["task"], "rollout": TINY["rollout"]}
CASES = {
    "sft": ("sft", {}),
    "sft, with a task": ("sft", SAMPLED),
    "dpo": ("dpo", {}),
    "dpo, each step": ("dpo", {"loss.reference": "each_step"}),
    "distill, a file": ("distill", {"teacher.scratch": TINY["model"]["scratch"]}),
    "distill, samples": ("distill", {"teacher.scratch": TINY["model"]["scratch"], "data": None, **SAMPLED}),
}


@pytest.fixture
def made(tmp_path):
    """made("sft", "folder", {...}): the config of a case."""

    def make(case, folder, changes):
        algorithm, own = CASES[case]
        file = write_rows(tmp_path / "data.jsonl", preferences() if algorithm == "dpo" else digits())
        base = {"data": {"train": file, **DATA}, "evaluate": {"every": 1, "problems": 4}, "train.steps": 2}
        return config_of(algorithm, {**base, **own, "run.folder": str(tmp_path / folder), **changes})

    return make


@pytest.mark.parametrize("case", list(CASES))
def test_a_budget_that_suffices_changes_no_bit(made, tmp_path, case) -> None:
    plain = run(made(case, "plain", {}))
    assert same(run(made(case, "budgeted", {"memory.budget_gib": 1.0})), plain)
    written = json.loads((tmp_path / "budgeted" / "plan.json").read_text())
    assert written["fits"]
    assert written["phases"].keys() >= {"train", "step"}
    assert ("generate" in written["phases"]) == (case == "distill, samples")


@pytest.mark.parametrize("case", list(CASES))
def test_a_budget_below_the_least_is_refused(made, case) -> None:
    with pytest.raises(UserError, match=r"The minimum is [\d.]+ GiB of device memory"):
        run(made(case, "a", {"memory.budget_gib": 1e-6}))


@pytest.mark.parametrize("case", list(CASES))
def test_plan_says_what_a_run_on_a_gpu_would_take(tmp_path, case) -> None:
    algorithm, own = CASES[case]
    tree = {**BASE, "algorithm": algorithm, "device": "auto", "model": {"scratch": {**LARGE, "context": 4096}}}
    tree |= {"train": {"steps": 10}, "rollout": {"max_prompt_tokens": 256, "max_new_tokens": 512}}
    tree |= {"data": {"train": "x.jsonl", "max_tokens": 2048}} if "data" not in own else {}
    tree |= {"task": TINY["task"]} if "task" in own else {}
    tree |= {"teacher": {"scratch": {**TEACHER, "context": 4096}}} if algorithm == "distill" else {}
    tree |= {"loss": {"reference": "each_step"}} if "loss.reference" in own else {}
    tree |= {"evaluate": {"every": 5, "problems": 4}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    done = CliRunner().invoke(app, ["plan", str(tmp_path / "run.yaml"), "--gpu", "h200", "--json"])
    assert done.exception is None, done.exception
    found = json.loads(done.stdout)
    assert found["fits"]
    train = found["phases"]["train"]
    assert train["peak_gib"] == pytest.approx(sum(train["device_gib"].values()))
    assert train["device_gib"]["weights"] == pytest.approx(3.2, rel=0.2)
    if algorithm == "distill":
        assert found["phases"]["logprob"]["device_gib"]["teacher"] > 5
        assert train["device_gib"]["teacher_head"] > 0.5
    if "loss.reference" in own:
        assert found["phases"]["logprob"]["device_gib"]["reference"] > 3
