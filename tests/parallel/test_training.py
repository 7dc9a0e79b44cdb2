"""Any number of ranks trains the same policy as one, but for float noise."""

import json

import pytest
from ranks import runs, together

from conftest import TINY, assert_trained_alike, merged
from ebbtide.config.algorithms.grpo import GrpoConfig
from test_loop import EVERYTHING, SHAPED
from toy import MODES

BASE = {
    "train.steps": 2,
    "checkpoint": None,
    "advantage.drop_zero_std_groups": False,
    "report.samples_every": 0,
    "optimizer.weight_decay": 0.1,
}
WORLDS = {
    "one": (1, None),
    "two": (2, {"gpus": 2}),
    "replicated": (2, {"data": 2, "replicate": 2}),
    "tensor": (2, {"tensor": 2, "gpus": 2}),
    "both": (4, {"data": 2, "tensor": 2}),
}
OFTEN = ("both",)
"""`make slow` has all."""
CASES = {
    **{
        f"optimizer, {name}": {f"optimizer.{key}": value for key, value in mode.items()} for name, mode in MODES.items()
    },
    "everything": {**EVERYTHING, "train.steps": 2, "memory.preset": "lean"},
    "shaped": {**SHAPED, "advantage.drop_zero_std_groups": None},
    "mixed": {
        "task": {
            "mix": {name: {"builtin": {"name": name, "options": {"digits": 2}}} for name in ("copy", "reverse")},
            "scoring": TINY["task"]["scoring"],
        },
        "task.mix.copy.weight": 3,
        "task.mix.copy.size": 20,
        "task.mix.reverse.size": 20,
    },
    "curriculum": {
        "task": {
            "gym": {"dataset": "chain_sum", "curriculum": {"top": 1, "raise_at": 0.0, "window": 4}},
            "size": 20,
            "scoring": TINY["task"]["scoring"],
        },
        "model.scratch.context": 256,
        "model.scratch.alphabet": None,
        "rollout.max_prompt_tokens": 128,
        "train.microbatch_tokens": 256,
    },
    "activations": {"memory.activations": {"preset": "offload", "keep_last": 0, "minimum_kib": 0}, "train.steps": 2},
    "activations, by module": {
        "memory.activations": {
            "recompute": ["attn_norm", "mlp_fc2"],
            "offload": ["mlp_act"],
            "keep_last": 0,
            "minimum_kib": 0,
        },
        "optimizer.place": "cpu",
        "train.steps": 2,
    },
    "experts": {
        "model.scratch.architecture": "qwen3_moe",
        "model.scratch.experts": 4,
        "model.scratch.experts_per_token": 2,
    },
}


# All that is there for two ranks; for the others every mode, and what meets them in a way of its own.
_MODES = tuple(f"optimizer, {name}" for name in ("device", "streamed", "cpu", "split, device"))
TRIED = {
    "replicated": ("optimizer, device", "optimizer, cpu", "everything"),
    "tensor": (*_MODES, "everything", "activations, by module"),
    "both": ("optimizer, device", "everything"),
}


def trained(tmp_path, comm, cases):
    """Case -> what each rank of a comm gives."""
    count, parallel = WORLDS[comm]
    configs = [
        GrpoConfig.model_validate(
            merged(TINY, {**BASE, **case, "parallel": parallel, "run.folder": str(tmp_path / comm / name)})
        )
        for name, case in cases.items()
    ]
    everyone = together(count, runs, configs)
    return {name: [rank[place] for rank in everyone] for place, name in enumerate(cases)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """alone(cases): what one rank gives in each, trained once for all tests that ask for it."""
    found = {}

    def alone(cases):
        missing = {name: CASES[name] for name in cases if name not in found}
        if missing:
            found.update(trained(tmp_path_factory.mktemp("alone"), "one", missing))
        return found

    return alone


def agree(mine, theirs) -> None:
    """Figures and weights of two runs; a step of the optimizer is 1e-3."""
    assert len(mine["metrics"]) == len(theirs["metrics"])
    for line, other in zip(mine["metrics"], theirs["metrics"], strict=True):
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3) if "grad_norm" in line else True
        for name in (
            "loss",
            "entropy",
            "kl",
            "reward",
            "mismatch_kl",
            "clip_fraction",
            "evaluate/reward",
            "samples_trained",
        ):
            if name in line:
                assert line[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), (line["step"], name)
    assert [json.loads(one)["completion"] for one in mine["rollouts"].splitlines()] == [
        json.loads(one)["completion"] for one in theirs["rollouts"].splitlines()
    ]
    assert mine["weights"].keys() == theirs["weights"].keys()
    assert_trained_alike(mine["weights"], theirs["weights"], lr=1e-3, steps=len(mine["metrics"]))


@pytest.mark.parametrize(
    "comm",
    [pytest.param(name, marks=[] if name in OFTEN else pytest.mark.slow) for name in WORLDS if name != "one"],
)
def test_ranks_train_the_policy_that_one_trains(tmp_path, alone, comm) -> None:
    ranks_agree(tmp_path, alone, comm, TRIED.get(comm, tuple(CASES)))


@pytest.mark.slow
def test_four_ranks_train_it_in_every_mode_of_the_optimizer(tmp_path, alone) -> None:
    ranks_agree(tmp_path, alone, "both", _MODES)


def ranks_agree(tmp_path, alone, comm, cases) -> None:
    theirs = alone(cases)
    found = trained(tmp_path, comm, {name: CASES[name] for name in cases})
    for name in cases:
        for rank in found[name]:
            agree(rank, theirs[name][0])
    parts = {
        tuple(rank["shapes"][f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "down"))
        for rank in found["optimizer, device"]
    }
    wanted = {
        "two": ((24, 32), (16, 48)),
        "replicated": ((48, 32), (32, 48)),
        "tensor": ((24, 32), (32, 24)),
        "both": ((12, 32), (16, 24)),
    }
    assert parts == {wanted[comm]}


@pytest.mark.slow
def test_parts_of_all_sizes_and_a_rank_without_samples(tmp_path) -> None:
    """Three ranks: four channels of a norm are 2, 2 and none; one group of two samples leaves a rank without any."""
    modes = ("device", "streamed", "cpu", "split, streamed")
    cases = {
        name: {
            **CASES[f"optimizer, {name}"],
            "model.scratch.head_dim": 4,
            "rollout.prompts_per_step": 1,
            "rollout.group_size": 2,
            "loss.entropy": 0.1,
        }
        for name in modes
    }
    cases["bfloat16"] = {
        **cases["streamed"],
        "model.dtype": "bfloat16",
        "optimizer.state_dtype": "bfloat16_stochastic",
        "train.steps": 1,
    }
    WORLDS["three"] = (3, {"gpus": 3})
    mine, theirs = trained(tmp_path, "three", cases), trained(tmp_path, "one", cases)
    assert mine["device"][2]["shapes"]["model.layers.0.self_attn.q_norm.weight"] == (0,)
    for name in modes:
        agree(mine[name][0], theirs[name][0])
    differences = [
        abs(weight - theirs["bfloat16"][0]["weights"][name]) for name, weight in mine["bfloat16"][0]["weights"].items()
    ]
    assert max(difference.max() for difference in differences) < 1e-2
    assert (
        sum(difference.sum() for difference in differences) / sum(difference.size for difference in differences) < 1e-5
    )
