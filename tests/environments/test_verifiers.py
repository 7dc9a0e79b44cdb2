"""Tasksets of the real package `verifiers` drive episodes, and a run trains on them (`make environments`)."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from conftest import TINY, merged
from ebbtide.algorithms.loop import train
from ebbtide.cli import app
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.model.load import load_model
from ebbtide.report.report import Report

PYTHON = os.environ.get("VERIFIERS_PYTHON")
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}[assistant]"
    "{% endif %}"
)
TASKSET = {"taskset": {"id": "verifiers_sums"}, "agent": {"harness": {"id": "verifiers_sums"}}}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A tiny model of bytes with a chat template."""
    folder = tmp_path_factory.mktemp("model")
    scratch = {"model.scratch.alphabet": None, "model.scratch.context": 128, "rollout.max_prompt_tokens": 32}
    loaded = load_model(GrpoConfig.model_validate(merged(TINY, scratch)))
    loaded.tokenizer.chat_template = TEMPLATE
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


def config_of(model: Path, folder: Path, python: str | None) -> dict:
    environment = {"object": "verifiers", "options": TASKSET, "python": python, "max_turn_tokens": 8}
    return {
        "model": {"path": str(model)},
        "task": {"environment": environment, "size": 8, "held_out": 2},
        "rollout": {"prompts_per_step": 2, "group_size": 4, "max_prompt_tokens": 32, "max_new_tokens": 64},
        "evaluate": {"every": 2, "problems": 2},
        "train": {"steps": 3},
        "checkpoint": None,
        "run": {"folder": str(folder)},
    }


@pytest.mark.skipif(
    PYTHON is None, reason="`make environments` runs it: verifiers has a virtual environment of its own"
)
def test_a_run_trains_on_a_taskset(model, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    config = GrpoConfig.model_validate(config_of(model, tmp_path / "run", PYTHON))
    with Report(config, "test") as report:
        train(config, report)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["step"]]
    assert [line["turns"] for line in steps] == [2.0] * 3
    # A turn that a limit has cut off is rendered anew, with bytes that are no text: then there are two branches.
    assert all(1 <= line["branches"] <= 2 for line in steps)
    assert all(0 <= line["reward"] <= 1 for line in steps)
    assert all(line["mismatch_max"] < 1e-4 for line in steps if line["samples_trained"])
    assert any("evaluate/reward" in line for line in lines)


def test_without_the_package_the_error_says_what_to_do(model, tmp_path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(config_of(model, tmp_path / "run", None)))
    done = CliRunner().invoke(app, ["train", str(file)])
    assert done.exit_code != 0
    assert "`task.environment.python`" in str(done.exception)
