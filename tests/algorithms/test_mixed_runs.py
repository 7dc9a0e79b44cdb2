"""Runs on a mix of tasks: exact shares of every step, metrics and evaluation by task, and resuming."""

import json
import shutil

import pytest
import torch

from conftest import TINY
from ebbtide.algorithms.loop import train
from ebbtide.checkpoint.resume import find_checkpoint
from ebbtide.report.report import Report
from test_loop import run

MIX = {
    "copying": {"weight": 3, "builtin": {"name": "copy", "options": {"digits": 2}}, "size": 10, "held_out": 6},
    "reversing": {"builtin": {"name": "reverse", "options": {"digits": 2}}, "size": 5, "held_out": 6},
}
MIXED = {
    "task": {"mix": MIX, "scoring": TINY["task"]["scoring"]},
    "evaluate": {"every": 2, "problems": 8, "samples": 2, "temperature": 1.0, "k": [1, 2]},
    "train.steps": 4,
    "checkpoint": {"every": 2, "keep": 2, "async_save": False},
}


@pytest.mark.slow
def test_a_run_has_exact_shares_and_figures_by_task_and_resumes_to_the_bit(tiny, tmp_path) -> None:
    metrics, rollouts, weights = run(tiny, tmp_path / "straight", MIXED)
    steps = [line for line in metrics if "samples" in line]
    assert [line["task/copying/samples"] for line in steps] == [12] * 4
    assert [line["task/reversing/samples"] for line in steps] == [4] * 4
    for line in steps:
        parts = 12 * line["task/copying/reward"] + 4 * line["task/reversing/reward"]
        assert parts / 16 == pytest.approx(line["reward"])
        signal = 3 * line["task/copying/groups_with_signal"] + line["task/reversing/groups_with_signal"]
        assert signal / 4 == line["groups_with_signal"]
    evaluated = [line for line in metrics if "evaluate/reward" in line]
    assert evaluated
    for line in evaluated:  # of 8 problems, 6 and 2
        for name in ("reward", "pass@1", "pass@2"):
            parts = 6 * line[f"evaluate/task/copying/{name}"] + 2 * line[f"evaluate/task/reversing/{name}"]
            assert parts / 8 == pytest.approx(line[f"evaluate/{name}"])
    tasks = [json.loads(line)["task"] for line in rollouts.splitlines()]
    assert tasks.count("copying") == 3 * tasks.count("reversing") == 48

    run(tiny, tmp_path / "stopped", MIXED)
    shutil.rmtree(tmp_path / "stopped" / "checkpoints" / "step-000004")
    config = tiny({**MIXED, "run.folder": str(tmp_path / "stopped"), "resume": "auto"})
    resumed = find_checkpoint(config, print)
    assert resumed is not None
    with Report(config, "test", resumed=resumed) as report:
        again = train(config, report).model.state_dict()
    assert all(torch.equal(again[name], value) for name, value in weights.items())
    assert (tmp_path / "stopped" / "rollouts.jsonl").read_text() == rollouts
