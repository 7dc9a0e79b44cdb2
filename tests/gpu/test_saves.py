"""Checkpoints on a real GPU: a snapshot stays while the run goes on, and a run that stops and goes on is the run
that never stopped."""

import json
import shutil

import pytest
import torch

from conftest import TINY, merged
from ebbtide.algorithms.loop import train
from ebbtide.checkpoint.resume import find_checkpoint
from ebbtide.checkpoint.store import list_checkpoints
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.config.memory import MemoryConfig
from ebbtide.report.report import Report
from saved import contents, equal, made, read
from toy import one_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

MODES = {
    "device": {},
    "device, lean": {"memory": MemoryConfig(preset="lean")},
    "streamed": {"place": "streamed"},
    "cpu": {"place": "cpu"},
    "split, lean": {"cpu_fraction": 0.4, "memory": MemoryConfig(preset="lean")},
}


@pytest.mark.parametrize("mode", MODES)
def test_a_snapshot_stays_while_the_run_goes_on(mode) -> None:
    state, model, residency, optimizer = made(device=torch.device("cuda", 0), **MODES[mode])
    wanted = {name: tensor.cpu() for name, tensor in contents(model, optimizer).items()}
    with residency.phase("save"):
        snapshot = state.snapshot(3, copy=True)
    generator = torch.Generator().manual_seed(9)
    for _ in range(2):
        one_step(model, residency, optimizer, torch.randint(31, (2, 2, 2, 8), generator=generator)[0].cuda())
    assert equal(read(snapshot), wanted)


@pytest.mark.parametrize("async_save", [True, False])
def test_a_resumed_run_is_the_run_that_never_stopped(tmp_path, async_save) -> None:
    changes = {
        "device": "cuda",
        "deterministic": True,
        "model.dtype": "bfloat16",
        "train.steps": 4,
        "rollout.group_size": 8,
        "memory": {"preset": "lean"},
        "loss.kl": {"coefficient": 0.1},
        "checkpoint": {"every": 2, "keep": 2, "async_save": async_save},
    }

    def run(name: str, resume: str | None = None):
        config = GrpoConfig.model_validate(
            merged(TINY, {**changes, "run.folder": str(tmp_path / name), "resume": resume})
        )
        with Report(config, name, resumed=find_checkpoint(config, print)) as report:
            weights = train(config, report).model.state_dict()
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        return weights, [(line["step"], line["loss"], line["grad_norm"], line["reward"]) for line in lines]

    straight = run("straight")
    run("stopped")
    shutil.rmtree(list_checkpoints(tmp_path / "stopped" / "checkpoints")[-1].path)
    resumed = run("stopped", "auto")
    torch.use_deterministic_algorithms(False)
    assert resumed[1] == straight[1]
    assert all(torch.equal(resumed[0][key], straight[0][key]) for key in straight[0])
