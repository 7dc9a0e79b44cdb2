"""Environments of other packages, each with the real package: a few steps of training."""

import json
import sys
from pathlib import Path

import pytest

from conftest import TINY, merged
from ebbtide.algorithms.loop import train
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.report.report import Report

HERE = Path(__file__).parents[1]
BYTES = {
    "model.scratch.alphabet": None,
    "model.scratch.context": 1024,
    "train.microbatch_tokens": 4096,
    "advantage.drop_zero_std_groups": False,
    "rollout.prompts_per_step": 2,
    "rollout.group_size": 2,
    "rollout.max_prompt_tokens": 640,
    "rollout.max_new_tokens": 256,
    "checkpoint": None,
}
LIMITS = {"max_turns": 3, "max_turn_tokens": 8}


def trained(folder, task):
    """(metrics of each step, lines of rollouts)."""
    config = GrpoConfig.model_validate(merged(TINY, {**BYTES, "task": task, "run.folder": str(folder)}))
    with Report(config, "test") as report:
        train(config, report)
    metrics, rollouts = (
        [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "rollouts.jsonl")
    )
    assert len(metrics) == 2
    assert all(line["samples_trained"] == 4 and "loss" in line for line in metrics)
    assert all(line["failure"] is None for line in rollouts), [line["failure_message"] for line in rollouts]
    return metrics, rollouts


def test_textarena(tmp_path) -> None:
    environment = {"object": "textarena", "options": {"env": "GuessTheNumber-v0"}, **LIMITS}
    metrics, rollouts = trained(tmp_path / "run", {"environment": environment, "size": 8, "held_out": 0})
    assert "Guess The Number" in rollouts[0]["prompt"]
    assert all(line["turns"] >= 1 for line in metrics)
    assert any("invalid" in turn["answer"].lower() for line in rollouts for turn in line["turns"])


def test_skyrl_gym(tmp_path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n} + 1?", "answer": str(n + 1)}) + "\n" for n in range(6)))
    environment = {
        "object": "skyrl_gym",
        "options": {"env": "gsm8k_multi_turn", "extras": {"max_turns": 3}},
        **LIMITS,
    }
    metrics, rollouts = trained(
        tmp_path / "run", {"file": {"train": str(rows)}, "held_out": 0, "environment": environment}
    )
    assert metrics[-1]["turns"] > 1
    assert "####" in rollouts[0]["turns"][0]["answer"]
    assert metrics[-1]["reward/steps"] == metrics[-1]["turns"]


@pytest.mark.slow
def test_an_mcp_server(tmp_path) -> None:
    environment = {"object": "mcp", "options": {"command": [sys.executable, str(HERE / "mcp_server.py")]}, **LIMITS}
    source = {"builtin": {"name": "copy", "options": {"digits": 3}}, "size": 8, "held_out": 0}
    metrics, _ = trained(tmp_path / "run", {**source, "environment": environment, "scoring": {"workers": 1}})
    assert "reward/digits" in metrics[-1]  # the task's scorer scores the last turn


def test_the_tools_of_an_mcp_server() -> None:
    from ebbtide.tasks.environment import Environment
    from ebbtide.tasks.environments.mcp import make

    environment = Environment(make(command=[sys.executable, str(HERE / "mcp_server.py")]))
    described = environment.describe()
    assert [tool["function"]["name"] for tool in described.tools] == ["double", "fail"]
    assert described.tools[0]["function"]["parameters"]["required"] == ["number"]
    assert not described.gives_reward
    environment.reset([], {}, 0, "json")
    reply = environment.step("", '{"name": "double", "arguments": {"number": 4}}')
    assert (reply.messages[0]["content"], reply.failed_calls) == ("8", 0)
    assert environment.step("", '{"name": "fail", "arguments": {}}').failed_calls == 1
    environment.close()


def test_an_environment_factory_of_trl(tmp_path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": "Go.", "target": n % 3, "answer": ""}) + "\n" for n in range(6)))
    environment = {"object": "trl_environment:Counter", **LIMITS}
    metrics, rollouts = trained(
        tmp_path / "run", {"file": {"train": str(rows)}, "held_out": 0, "environment": environment}
    )
    assert any(line["prompt"] == "Go. Count to 0." for line in rollouts)
    # A policy that calls no tool has counted to 0.
    assert {line["reward"] for line in rollouts if line["prompt"] == "Go. Count to 0."} == {1.0}
    assert metrics[-1]["tool_calls"] == 0.0
