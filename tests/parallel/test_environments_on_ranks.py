"""Several ranks play the episodes of one, each with the environments of its own share."""

import json

import pytest
from ranks import runs, together

from conftest import TINY, assert_trained_alike, merged
from ebbtide.config.algorithms.grpo import GrpoConfig

PLAY = {
    "model.scratch.alphabet": "0123456789+=?",
    "task": {"environment": {"object": "calculator", "max_turns": 2, "max_turn_tokens": 3}, "size": 20, "held_out": 6},
    "rollout.max_new_tokens": 10,
    "rollout.stop": ["?"],
    "advantage.turns": "to_go",
    "advantage.drop_zero_std_groups": False,
    "evaluate": {"every": 2, "problems": 6},
    "checkpoint": None,
    "report.samples_every": 0,
}


def trained(folder, parallel):
    changes = {**PLAY, "parallel": parallel, "run.folder": str(folder)}
    return GrpoConfig.model_validate(merged(TINY, changes))


@pytest.mark.slow
def test_two_ranks_play_the_episodes_of_one(tmp_path) -> None:
    ((alone,),) = together(1, runs, [trained(tmp_path / "one", None)])
    worlds = {"gathered": {"gpus": 2}, "layerwise": {"gpus": 2, "rollout_weights": "layerwise"}}
    both = together(2, runs, [trained(tmp_path / name, world) for name, world in worlds.items()])
    for number in range(len(worlds)):
        two = both[0][number]
        for mine, theirs in zip(two["metrics"], alone["metrics"], strict=True):
            for name in ("reward", "turns", "environment_tokens", "evaluate/reward"):
                assert mine.get(name) == theirs.get(name)
        assert [json.loads(line)["completion"] for line in two["rollouts"].splitlines()] == [
            json.loads(line)["completion"] for line in alone["rollouts"].splitlines()
        ]
        assert_trained_alike(two["weights"], alone["weights"], lr=1e-3, steps=2)
    assert any(line.get("turns", 0) > 1 for line in alone["metrics"])
