"""Real Ray: two actors run the quickstart; when one is killed in the middle of a step, the run ends as if nothing had been."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ebbtide.checkpoint.export import read_model
from ebbtide.checkpoint.store import listed

HERE = Path(__file__).parent


def quickstart(tmp_path, name, mark, *more):
    """(what was said, metrics, the weights of the last checkpoint) of a short quickstart by two ranks."""
    run = tmp_path / name
    task = {"python": {"object": "rank_task:LosesAnActor", "options": {"run": str(run), "mark": mark}}, "scoring": {"workers": 1}}
    overrides = [
        f"task={json.dumps(task)}",
        f"run.folder={run}",
        "train.steps=4",
        "rollout.prompts=4",
        "checkpoint.every=1",
        "evaluate=null",
        "device=cpu",
        "cluster.gpus=2",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "ebbtide", "train", "quickstart", *overrides, *more],
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return done.stdout + done.stderr, lines, read_model(listed(run / "checkpoints")[-1])[0].state_dict()


def test_a_lost_actor_costs_some_steps_and_nothing_else(tmp_path) -> None:
    pytest.importorskip("ray")
    said, lines, weights = quickstart(tmp_path, "lost", str(tmp_path / "mark"), "cluster.ray=auto")
    assert (tmp_path / "mark").exists()
    assert "rank 1 of 2 was lost" in said
    assert "starting again after step" in said
    assert "tries left" in said
    assert said.count("step 4/4") == 1  # streamed to the driver
    _, wanted_lines, wanted = quickstart(tmp_path, "undisturbed", None)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line["reward"] for line in lines] == [line["reward"] for line in wanted_lines]
    assert weights.keys() == wanted.keys()
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
