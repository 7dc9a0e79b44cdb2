"""A reward model on a real GPU, in bf16: where it is changes no bit, and the plan knows its bytes."""

import pytest
import torch

from ebbtide.planner.reward_models import reward_model_sizes
from ebbtide.worker import Worker
from test_loop import run
from tiny_reward_models import reward_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def rewarded(path: str, preset: str):
    return {
        "device": "cuda",
        "deterministic": True,
        "model.dtype": "bfloat16",
        "memory": {"plan": "manual", "preset": preset},
        "task.rewards": {"right": {"scorer": "task"}, "liked": {"reward_model": {"path": path}, "weight": 0.1}},
        "train.steps": 3,
        "evaluate": {"every": 2, "problems": 4},
        "checkpoint": None,
    }


def test_a_reward_model_that_moves_changes_no_bit(tiny, tmp_path) -> None:
    path = reward_model(tmp_path / "model")
    keep, lean = (run(tiny, tmp_path / preset, rewarded(path, preset)) for preset in ("keep", "lean"))
    assert keep[:2] == lean[:2]
    assert all(torch.equal(weight, lean[2][name]) for name, weight in keep[2].items())


def test_it_is_on_the_gpu_in_its_phases_alone(tiny, tmp_path) -> None:
    config = tiny(rewarded(reward_model(tmp_path / "model"), "lean"))
    (planned,) = reward_model_sizes(config, "cuda")
    with Worker(config) as worker:
        for phase in config.cycle:
            with worker.phase(phase):
                if phase == "score":
                    worker.residency.need("reward_model")
                held = worker.residency.holdings()["reward_model"].device
                assert planned.bytes <= held < 1.1 * planned.bytes if phase == "score" else held == 0
