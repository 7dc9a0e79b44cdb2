"""Settings on the command line in the spelling of other tools, among a command's own options."""

from __future__ import annotations

import pytest

from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.config.arguments import settings_last
from ebbtide.config.serve import ServeConfig
from ebbtide.errors import UserError

FLAGS, VALUED = {"--json", "--help"}, {"--gpu", "--out"}


def read(line: str, root: type = GrpoConfig) -> list[str]:
    return settings_last(line.split(), FLAGS, VALUED, [root])


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("quickstart train.steps=3", "quickstart train.steps=3"),
        ("quickstart --train.steps=3", "quickstart train.steps=3"),
        ("quickstart --train.steps 3", "quickstart train.steps=3"),
        ("quickstart -train.steps=3", "quickstart train.steps=3"),
        ("--train.steps 3 quickstart", "quickstart train.steps=3"),
        ("train.steps=3 quickstart", "quickstart train.steps=3"),
        ("quickstart --optimizer.lr -1", "quickstart optimizer.lr=-1"),
        ("quickstart --rollout.max-new-tokens 64", "quickstart rollout.max_new_tokens=64"),
        ("quickstart --seed 3 --json", "quickstart --json seed=3"),
        ("quickstart --steps 3", "quickstart steps=3"),  # which the config answers with `train.steps`
        ("--gpu h200 quickstart --learning_rate 1e-6", "--gpu h200 quickstart learning_rate=1e-6"),
        ("--gpu=h200 quickstart --num-generations=8", "--gpu=h200 quickstart num_generations=8"),
        ("quickstart --train.steps=3 train.steps=5", "quickstart train.steps=3 train.steps=5"),
        ("quickstart --out a.b=c x.y=1", "quickstart --out a.b=c x.y=1"),
        ("quickstart --run.name=", "quickstart run.name="),
        ("quickstart -- --train.steps=3", "quickstart -- --train.steps=3"),
        ("quickstart --gpuu h200", "quickstart --gpuu h200"),  # for the command, which knows its options
    ],
)
def test_settings_in_any_spelling_come_after_the_recipe(line: str, meant: str) -> None:
    assert read(line) == meant.split()


@pytest.mark.parametrize(
    "line",
    ["quickstart --train.steps", "quickstart --train.steps --json", "quickstart --report.rollouts train.steps=3"],
)
def test_a_setting_without_a_value_is_told_how_it_is_written(line: str) -> None:
    with pytest.raises(UserError, match=r"is a setting and has no value: write `[a-z.]+=VALUE`"):
        read(line)


def test_a_file_with_such_a_name_is_a_file(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=1.yaml").write_text("")
    assert read("lr=1.yaml train.steps=3") == ["lr=1.yaml", "train.steps=3"]


def test_the_server_has_settings_of_its_own() -> None:
    assert read("model --port 8001 --max-model-len 4096", ServeConfig) == ["model", "port=8001", "max_model_len=4096"]
    assert read("model --learning_rate 1", ServeConfig) == ["model", "--learning_rate", "1"]
