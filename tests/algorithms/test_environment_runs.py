"""Runs with environments: they learn, have the same bits again and after they resume, evaluate, and are refused where
something cannot be combined with them."""

import json
import shutil

import pytest
from pydantic import ValidationError

from conftest import TINY, merged
from ebbtide.algorithms.loop import train
from ebbtide.checkpoint.resume import find_checkpoint
from ebbtide.checkpoint.store import list_checkpoints
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.config.load import load
from ebbtide.config.task import TaskConfig
from ebbtide.errors import UserError
from ebbtide.report.report import Report
from ebbtide.tasks.build import build_task

PLAY = {
    "model.scratch.alphabet": "0123456789+=?",
    "task": {"environment": {"object": "calculator", "max_turns": 2, "max_turn_tokens": 3}, "size": 20, "held_out": 6},
    "rollout.max_new_tokens": 10,
    "rollout.stop": ["?"],
    "advantage.turns": "to_go",
}
MEASURED = ("seconds", "per_second", "_gib", "environment_seconds", "environment_idle_seconds")


def config(folder, changes=None) -> GrpoConfig:
    return GrpoConfig.model_validate(merged(TINY, {**PLAY, "run.folder": str(folder), **(changes or {})}))


def run(folder, changes=None, resumed=None):
    """(metrics without what is measured, rollouts, weights)."""
    settings = config(folder, changes)
    with Report(settings, "test", resumed=resumed) as report:
        policy = train(settings, report)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [{key: value for key, value in line.items() if not any(one in key for one in MEASURED)} for line in lines]
    return metrics, (folder / "rollouts.jsonl").read_text(), [one.detach().clone() for one in policy.model.parameters()]


@pytest.mark.slow
def test_the_recipe_learns_to_use_the_calculator(tmp_path) -> None:
    recipe = load("calculator", [f"run.folder={tmp_path / 'run'}", "train.steps=60", "evaluate=null"])
    with Report(recipe, "calculator") as report:
        train(recipe, report)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["reward/asked_calculator"] < 0.5
    assert lines[0]["turns"] < 1.5
    assert sum(line["reward/asked_calculator"] for line in lines[-5:]) / 5 > 0.95
    assert sum(line["turns"] for line in lines[-5:]) / 5 > 1.95
    # Asking alone gives 0.2; with answers that are guessed it would be 0.28 at most.
    assert sum(line["reward"] for line in lines[-5:]) / 5 > 0.4
    last = lines[-1]
    assert last["environment_tokens"] == pytest.approx(last["turns"] - 1)  # one digit for each question
    assert last["mismatch"] < 1e-5
    assert last["tokens_recomputed"] == 0.0


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bits_and_so_does_a_run_that_resumes(tmp_path) -> None:
    changes = {
        "train.steps": 4,
        "evaluate": {"every": 2, "problems": 6},
        "checkpoint": {"every": 2, "keep": 9, "async_save": False},
    }
    straight, again = run(tmp_path / "a", changes), run(tmp_path / "b", changes)
    assert straight[:2] == again[:2]
    assert all((one == other).all() for one, other in zip(straight[2], again[2], strict=True))
    assert "evaluate/reward" in straight[0][-1]
    assert straight[0][-1]["turns"] > 1
    shutil.rmtree(list_checkpoints(tmp_path / "b" / "checkpoints")[-1].path)
    again_settings = config(tmp_path / "b", {**changes, "resume": "auto"})
    saved = find_checkpoint(again_settings, print)
    assert saved is not None
    assert saved.step == 2
    resumed = run(tmp_path / "b", {**changes, "resume": "auto"}, saved)
    assert resumed[:2] == straight[:2]
    assert all((one == other).all() for one, other in zip(straight[2], resumed[2], strict=True))


class Idle:
    """An environment with a tool, which leaves the reward to the task."""

    def reset(self, **row) -> None:
        """Adds nothing to the prompt."""

    def wait(self) -> str:
        """Waits."""
        return "waited"


@pytest.mark.slow
@pytest.mark.parametrize("gives_reward", [False, True])
def test_tasks_of_a_mix_are_played_with_the_same_environment(tmp_path, gives_reward) -> None:
    names = {"copying": ("copy", 3), "reversing": ("reverse", 1)}
    mix = {
        name: {"builtin": {"name": kind, "options": {"digits": 2}}, "size": 8, "held_out": 3, "weight": weight}
        for name, (kind, weight) in names.items()
    }
    environment = {"object": "calculator" if gives_reward else "algorithms.test_environment_runs:Idle"}
    task = {"mix": mix, "environment": {**environment, "max_turns": 2, "max_turn_tokens": 3}}
    changes = {"task": task, "evaluate": {"every": 1, "problems": 4}, "advantage.turns": "episode"}
    metrics, rollouts, _ = run(tmp_path / "a", changes)
    steps = [line for line in metrics if "samples" in line]
    assert [line["task/copying/samples"] for line in steps] == [12, 12]
    assert [line["task/reversing/samples"] for line in steps] == [4, 4]
    assert all("evaluate/task/reversing/reward" in line for line in metrics if "evaluate/reward" in line)
    lines = [json.loads(line) for line in rollouts.splitlines()]
    assert {line["task"] for line in lines} == set(names)
    if not gives_reward:
        built = build_task(TaskConfig.model_validate({"mix": mix}), 0)
        problems = {(one.task, one.question): one for one in built.problems().train}
        for line in lines:
            problem = problems[line["task"], line["prompt"]]
            assert line["reward"] == pytest.approx(built.score(problem, line["completion"]).value)
        assert any(line["reward"] for line in lines)
    else:
        extracted = {**changes, "task": {**task, "mix": {**mix, "copying": {**mix["copying"], "extract": "(.)"}}}}
        with pytest.raises(UserError, match=r"`task.mix.copying.extract` is for the task's scorer"):
            run(tmp_path / "b", extracted)


@pytest.mark.slow
def test_the_huggingface_engine_plays_the_same_episodes(tmp_path) -> None:
    paged, plain = run(tmp_path / "a"), run(tmp_path / "b", {"rollout.engine": "huggingface"})
    for name in ("reward", "turns", "completion_tokens", "environment_tokens"):
        assert [line[name] for line in paged[0]] == [line[name] for line in plain[0]]


def test_rollouts_have_their_turns(tmp_path) -> None:
    run(tmp_path, {"train.steps": 1, "rollout.group_size": 16})
    lines = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    asked = next(line for line in lines if len(line["turns"]) == 2)
    question, answer = asked["turns"]
    assert question["completion"].endswith("?")
    assert (question["reward"], question["finish"]) == (0.2, "stop")
    assert len(question["answer"]) == 1
    assert asked["completion"] == question["completion"] + answer["completion"]
    assert asked["reward"] == pytest.approx(question["reward"] + answer["reward"])
    assert len(question["logprobs"]) == len(question["token_chars"]) == question["tokens"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rollout.partial.extra_prompts": 2}, "rollout.partial.extra_prompts"),
        ({"rollout.save_to": "x"}, "rollout.save_to"),
        ({"rollout.replay": "x"}, "rollout.replay"),
        ({"rollout.engine": "vllm"}, "rollout.engine: vllm"),
        ({"parallel": {"rollout_gpus": 1}}, "parallel.rollout_gpus"),
    ],
)
def test_what_cannot_be_combined_is_named(changes, named) -> None:
    with pytest.raises(ValidationError, match=f"`task.environment` and `{named}` cannot be combined yet"):
        GrpoConfig.model_validate(merged(TINY, {**PLAY, **changes}))


def test_turns_without_an_environment() -> None:
    with pytest.raises(ValidationError, match=r"`advantage.turns: to_go` is for episodes of several turns"):
        GrpoConfig.model_validate(merged(TINY, {"advantage.turns": "to_go"}))


@pytest.mark.parametrize(("key", "value"), [("extract", "(.*)"), ("reasoning_parser", "think")])
def test_an_environment_that_rewards_needs_no_extraction(tmp_path, key, value) -> None:
    with pytest.raises(UserError, match=f"gives the reward itself: remove `task.{key}`"):
        run(tmp_path, {f"task.{key}": value})


@pytest.mark.slow
def test_an_environment_without_rewards_needs_a_scorer(tmp_path) -> None:
    with pytest.raises(UserError, match=r"gives no reward, and the task has no answers to score by"):
        run(tmp_path / "a", {"task.environment": {"object": "rewardless_environment:Tools"}})
    scored = {
        "task": {**TINY["task"], "environment": {"object": "rewardless_environment:Tools"}},
        "model.scratch.alphabet": None,
        "advantage.turns": "episode",
        "rollout.stop": [],
    }
    metrics, _, _ = run(tmp_path / "b", scored)
    assert "reward/digits" in metrics[-1]  # of the task's scorer
