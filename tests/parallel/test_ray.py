"""Real Ray: two actors run the quickstart; when one is killed in the middle of a step, the run ends as if nothing
had been."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import run, together

from ebbtide.checkpoint.export import read_model
from ebbtide.checkpoint.store import list_checkpoints
from ebbtide.config import load
from patience import PATIENCE

HERE = Path(__file__).parent


def quickstart(tmp_path, name, mark):
    """What to say for a short quickstart by two ranks."""
    run = tmp_path / name
    task = {
        "python": {"object": "rank_task:LosesAnActor", "options": {"run": str(run), "mark": mark}},
        "scoring": {"workers": 1},
    }
    return [
        f"task={json.dumps(task)}",
        f"run.folder={run}",
        "train.steps=4",
        "rollout.prompts_per_step=4",
        "checkpoint.every=1",
        "evaluate=null",
        "device=cpu",
        "parallel.gpus=2",
    ]


@pytest.mark.slow
def test_a_lost_actor_costs_some_steps_and_nothing_else(tmp_path) -> None:
    pytest.importorskip("ray")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)]),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "ebbtide",
            "train",
            "quickstart",
            *quickstart(tmp_path, "lost", str(tmp_path / "mark")),
            "parallel.ray=auto",
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=tmp_path,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert (tmp_path / "mark").exists()
    assert "rank 1 of 2 was lost" in said
    assert "restarting after step" in said
    assert "restarts left" in said
    assert len(re.findall(r"step 4/4 +[\d.]+ s", said)) == 1  # streamed to the driver
    lines = [json.loads(line) for line in (tmp_path / "lost" / "metrics.jsonl").read_text().splitlines()]
    weights = read_model(list_checkpoints(tmp_path / "lost" / "checkpoints")[-1])[0].state_dict()
    wanted = together(2, run, load("quickstart", quickstart(tmp_path, "undisturbed", None)))[0]
    assert [(line["step"], line["reward"], line["loss"]) for line in lines] == [
        (line["step"], line["reward"], line["loss"]) for line in wanted["metrics"]
    ]
    assert all(torch.equal(weights[name], torch.from_numpy(wanted["weights"][name])) for name in wanted["weights"])
