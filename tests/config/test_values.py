"""Values as people write them: taken where the meaning is plain, and refused with a way out where it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ebbtide.config import load, load_serve
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.config.values import MAIN_KEYS
from ebbtide.errors import UserError


def value_of(config: GrpoConfig, dotted: str) -> Any:
    found: Any = config
    for key in dotted.split("."):
        found = getattr(found, key)
    return found


TAKEN = [
    ("model.dtype", "bf16", "bfloat16"),
    ("model.dtype", "BF16", "bfloat16"),
    ("model.dtype", "torch.float32", "float32"),
    ("model.dtype", "fp32", "float32"),
    ("optimizer.state_dtype", "bf16", "bfloat16"),
    ("loss.kind", "GSPO", "gspo"),
    ("advantage.kind", "reinforce-pp", "reinforce_pp"),
    ("train.steps", "1e3", 1000),
    ("train.steps", "200.0", 200),
    ("seed", "1e2", 100),
    ("evaluate.k", "4", [4]),
    ("evaluate.k", "[1e0, 2]", [1, 2]),
    ("rollout.stop", "</answer>", ["</answer>"]),
    ("memory.offload.generate", "moments", ["moments"]),
    ("memory.activations.recompute", "mlp_norm", ["mlp_norm"]),
    ("report.rollouts", "no", False),
    ("report.rollouts", "yes", True),
    ("loss.kl", "0", None),
    ("loss.kl", "off", None),
    ("checkpoint", "false", None),
    ("evaluate", "None", None),
    ("resume", "None", None),
]


@pytest.mark.parametrize(("key", "written", "meant"), TAKEN)
def test_what_is_plain_is_taken_on_the_command_line(key: str, written: str, meant: Any) -> None:
    assert value_of(load("quickstart", [f"{key}={written}"]), key) == meant


def test_what_is_plain_is_taken_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "model: Qwen/Qwen3-0.6B\n"
        "task: {file: sums.jsonl}\n"
        "train: {steps: 1e3}\n"
        "loss: {kl: 0.04, importance_sampling: true}\n"
        'rollout: {stop: "\\n"}\n'
        "evaluate: on\n"
        "parallel: 2\n"
    )
    config = load(str(file), ["model.dtype=bf16", "loss.kl.estimator=k2", "evaluate.every=5"])
    assert (config.model.path, config.model.dtype) == ("Qwen/Qwen3-0.6B", "bfloat16")
    assert config.task.file is not None
    assert config.task.file.train == "sums.jsonl"
    assert config.loss.kl is not None
    assert (config.loss.kl.coefficient, config.loss.kl.estimator) == (0.04, "k2")
    assert config.loss.importance_sampling is not None
    assert (config.train.steps, config.rollout.stop) == (1000, ["\n"])
    assert config.evaluate is not None
    assert config.evaluate.every == 5
    assert config.parallel is not None
    assert config.parallel.gpus == 2


def test_one_value_for_a_section_leaves_the_rest_of_it_where_it_is_a_number() -> None:
    config = load("quickstart", ["loss.kl.estimator=k2", "loss.kl=0.04"])
    assert config.loss.kl is not None
    assert (config.loss.kl.coefficient, config.loss.kl.estimator) == (0.04, "k2")
    assert load("quickstart", ["evaluate=true"]).evaluate == load("quickstart").evaluate


def test_a_name_for_a_section_is_of_another_thing() -> None:
    assert load("quickstart", ["task.builtin=add"]).task.builtin.options == {}  # not the digits of `copy`
    assert load("quickstart", ["model=Qwen/Qwen3-0.6B"]).model.scratch is None
    with pytest.raises(
        UserError, match=r"`model=Qwen/Qwen3-0.6B` would undo `model.dtype=bf16`.*write `model.path=Qwen/Qwen3-0.6B`"
    ):
        load("quickstart", ["model.dtype=bf16", "model=Qwen/Qwen3-0.6B"])


def test_the_key_of_a_plain_value_is_one_of_the_section() -> None:
    assert all(key in section.model_fields for section, key in MAIN_KEYS.items())


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.steps=1.5", "`train.steps` is 1.5 and should be an integer"),
        ("train.steps=1e300", "an integer"),
        ("train.steps='5'", "an integer"),
        ("train.steps=true", "an integer"),
        ("report.rollouts=1", "`true` or `false`"),
        ("run.name=7", "a text: put it in quotes"),
        ("evaluate=20", "a section with keys such as every, problems, samples: write `evaluate.every=...`"),
        ("loss.kl=lots", "`loss.kl.coefficient` is 'lots' and should be number"),
        ("task.gym=leg_counting", "with `task.builtin=null` or `task.gym=null`"),
        ("model.path=x/y", "with `model.path=null` or `model.scratch=null`"),
    ],
)
def test_what_is_not_is_refused_with_what_to_write(override: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        load("quickstart", [override])
    assert says in str(caught.value)


def test_the_server_takes_them_as_well() -> None:
    config = load_serve(["dtype=bf16", "max_length=4e3", "name=None"])
    assert (config.dtype, config.max_length, config.name) == ("bfloat16", 4000, None)
