"""More GPUs that make a step slower are said to."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from ebbtide.cli import app

SHAPE = (
    "model.scratch={layers: 28, hidden: 1024, heads: 16, kv_heads: 8, head_dim: 128, mlp: 3072, vocabulary: 151936,"
    " context: 4096}"
)
FEW = ["rollout.prompts_per_step=1", "rollout.group_size=2", "rollout.max_new_tokens=256", "evaluate=null"]
MANY = ["rollout.prompts_per_step=64", "rollout.max_new_tokens=256", "evaluate=null"]


def planned(*options: str) -> dict:
    done = CliRunner().invoke(app, ["plan", "quickstart", "--gpu", "3090", SHAPE, "--json", *options])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def word(found: dict) -> list[str]:
    return [line for line in found["words"] if line.startswith("fewer GPUs are faster")]


def test_a_second_gpu_that_makes_a_step_slower_is_named() -> None:
    both, one = planned(*FEW, "parallel.gpus=2"), planned(*FEW)
    assert one["step_seconds"] < both["step_seconds"]
    (said,) = word(both)
    assert (
        f"about {one['step_seconds']:.3g} s with 1 (`parallel=null`) and {both['step_seconds']:.3g} s with these 2"
        in said
    )


def test_a_second_gpu_that_helps_is_not() -> None:
    assert planned(*MANY, "parallel.gpus=2")["step_seconds"] < planned(*MANY)["step_seconds"]
    assert word(planned(*MANY, "parallel.gpus=2")) == []
    assert word(planned(*FEW)) == []


@pytest.mark.parametrize("parallel", [["parallel.gpus=8"], ["parallel.data=4", "parallel.tensor=2"]])
def test_what_is_named_can_be_set(parallel: list[str]) -> None:
    """Over a slow network: one node's worth, or half of it."""
    slow = [*MANY, *parallel, "--gpus-per-node", "4", "--network", "0.1"]
    (said,) = word(planned(*slow))
    settings = [setting for setting in said.split("`") if setting.startswith("parallel.")]
    assert "parallel.gpus=4" in settings
    assert f"about {planned(*slow, *settings)['step_seconds']:.3g} s with 4" in said
