"""Runs with a curriculum: the level is in the metrics and the checkpoints, alone and in a mix."""

import json
import shutil

import pytest
import torch

from conftest import TINY
from ebbtide.algorithms.loop import train
from ebbtide.checkpoint.resume import find_checkpoint
from ebbtide.report.report import Report
from test_loop import run

GYM = {"dataset": "chain_sum", "curriculum": {"top": 2, "raise_at": 0.0, "window": 6}}
SCORING = {"scoring": TINY["task"]["scoring"]}
ALONE = {"gym": GYM, "size": 8, "held_out": 3, **SCORING}
COPY = {"builtin": {"name": "copy", "options": {"digits": 2}}, "size": 10, "held_out": 3}
MIXED = {"mix": {"sums": {"gym": GYM, "size": 8, "held_out": 3, "weight": 3}, "copying": COPY}, **SCORING}


@pytest.mark.parametrize(
    ("task", "metric", "expected"),
    [
        pytest.param(ALONE, "curriculum_level", [0, 1, 1, 2], id="alone", marks=pytest.mark.slow),
        pytest.param(MIXED, "task/sums/curriculum_level", [0, 1, 1, 2], id="mixed", marks=pytest.mark.slow),
    ],
)
def test_a_run_rises_and_resumes_to_the_bit(tiny, tmp_path, task, metric, expected) -> None:
    changes = {
        "task": task,
        "rollout.max_prompt_tokens": 128,
        "train.microbatch_tokens": 256,
        "model.scratch.context": 256,
        "model.scratch.alphabet": None,
        "train.steps": 4,
        "checkpoint": {"every": 1, "keep": 9, "async_save": False},
    }
    metrics, rollouts, weights = run(tiny, tmp_path / "straight", changes)
    assert [line[metric] for line in metrics if "samples" in line] == expected
    for stop in (1, 2):
        folder = tmp_path / f"stopped-{stop}"
        shutil.copytree(tmp_path / "straight", folder)
        for later in range(stop + 1, 5):
            shutil.rmtree(folder / "checkpoints" / f"step-{later:06d}")
        config = tiny({**changes, "run.folder": str(folder), "resume": "auto"})
        resumed = find_checkpoint(config, print)
        assert resumed is not None
        with Report(config, "test", resumed=resumed) as report:
            again = train(config, report).model.state_dict()
        assert all(torch.equal(again[name], value) for name, value in weights.items())
        assert (folder / "rollouts.jsonl").read_text() == rollouts
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [line[metric] for line in lines if "samples" in line][-4:] == expected
