"""Weights gathered layer by layer give what weights gathered whole give, bit for bit, however much the ranks' shares differ."""

import json

import numpy
import pytest
from ranks import runs, together
from test_training import BASE

from conftest import TINY, merged
from ebbtide.config.tree import Config

ODD = {"model.scratch.head_dim": 4, "model.scratch.layers": 3}  # four channels of a norm are 2, 2 and none of three ranks
PAGED = {"rollout.engine": "paged", "rollout.batch": 2}
CASES = {
    "paged": {**PAGED, **ODD, "evaluate": {"every": 1, "problems": 3}},
    "huggingface": {"rollout.engine": "huggingface", "rollout.batch": 3, **ODD},
    "a rank without prompts": {**PAGED, "rollout.prompts": 1, "evaluate": {"every": 2, "problems": 1}},
    "bfloat16, one layer, tied": {
        **PAGED,
        "model.dtype": "bfloat16",
        "model.scratch.layers": 1,
        "model.scratch.tied": True,
        "train.steps": 1,
    },
    "experts": {
        **PAGED,
        "model.scratch.architecture": "qwen3_moe",
        "model.scratch.experts": 4,
        "model.scratch.experts_per_token": 2,
        "train.steps": 1,
    },
}
WORLDS = {
    "three": (3, {"gpus": 3}, ("paged", "huggingface", "experts")),
    "tensor": (2, {"gpus": 2, "tensor": 2}, ("paged", "a rank without prompts")),
    "both": (4, {"data": 2, "tensor": 2}, ("paged",)),
    "copies": (4, {"data": 4, "replicate": 2}, ("huggingface", "a rank without prompts", "bfloat16, one layer, tied")),
}


@pytest.mark.parametrize("world", WORLDS)
def test_layer_by_layer_is_whole_to_the_bit(tmp_path, world) -> None:
    count, cluster, names = WORLDS[world]

    def config(name, generate):
        changes = {**BASE, **CASES[name], "cluster": {**cluster, "generate": generate}, "run.folder": str(tmp_path / name / generate)}
        return Config.model_validate(merged(TINY, changes))

    ways = ("whole", "layers")
    everyone = together(count, runs, [config(name, generate) for name in names for generate in ways])
    for rank in everyone:
        for place, name in enumerate(names):
            whole, layers = rank[2 * place : 2 * place + 2]
            assert json.loads(whole["rollouts"].splitlines()[0])["logprobs"]
            assert whole["rollouts"] == layers["rollouts"], name  # tokens and log-probs
            for line, other in zip(whole["metrics"], layers["metrics"], strict=True):
                for key in ("loss", "reward", "grad_norm", "evaluate/reward", "mismatch_max"):
                    assert line.get(key) == other.get(key), (name, key)
            for key, weight in whole["weights"].items():
                numpy.testing.assert_array_equal(weight, layers["weights"][key], err_msg=f"{name}: {key}")
