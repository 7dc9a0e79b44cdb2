"""Runs with judges: one that hangs, fails or says garbage costs samples, never the run; each reward is a part."""

import json
import math

import pytest

from conftest import TINY
from ebbtide.algorithms.evaluate import evaluate
from ebbtide.errors import UserError
from ebbtide.launch.job import Job
from ebbtide.launch.start import _checked
from ebbtide.progress import no_progress
from ebbtide.rollout.engine import Completion
from ebbtide.rollout.prompts import Prompt
from ebbtide.tasks.score_message import ScoreResult, failed_score
from ebbtide.tasks.task import Problem, ask
from judge_server import judge_server
from test_loop import SHAPED, run


def rewards(url: str, **changes):
    style = {"url": url, "model": "m", "prompt": "{prompt} {completion} {answer}", "range": [0, 4], "retries": 1}
    return {"right": {"scorer": "task", "weight": 0.5}, "style": {"judge": {**style, **changes}, "weight": 2.0}}


def test_a_judge_that_fails_costs_samples_and_never_the_run(tiny, tmp_path, monkeypatch) -> None:
    """The first request of a step hangs, a few fail, a few are garbage, and the run goes on with the others."""
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    kinds = [None, (500, b"oh"), (200, b"\x00"), "I cannot say", "3", "1", "2"]

    with judge_server(lambda number, request: kinds[sum(map(ord, str(request))) % len(kinds)]) as server:
        judge = rewards(server.url, timeout_s=0.2, api_key_env="JUDGE_KEY")
        judge["style"]["judge"]["retries"] = 0
        changes = {"task.rewards": judge, "train.steps": 3, "evaluate": {"every": 2, "problems": 6}}
        metrics, rollouts, _ = run(tiny, tmp_path / "run", changes)
    steps = [line for line in metrics if "samples" in line]
    samples = [json.loads(line) for line in rollouts.splitlines()]
    assert len(steps) == 3
    assert len(samples) == 48
    failed = {
        kind: sum(line.get(f"score_failures/{kind}", 0) for line in steps)
        for kind in ("judge_timeout", "judge_error", "judge_unreadable")
    }
    assert all(failed.values())
    lost = [one for one in samples if one.get("failure")]
    assert len(lost) == sum(failed.values()) < 48
    assert all((one["reward"], one["advantage"]) == (0, 0) for one in lost)
    assert 8 < sum(line["samples_trained"] for line in steps) <= 48 - len(lost)
    for one in samples:
        if not one.get("failure"):
            assert one["reward"] == 0.5 * one["parts"]["right"] + 2 * one["parts"]["style"]
    for number, line in enumerate(steps, start=1):
        own = [one for one in samples if one["step"] == number and not one.get("failure")]
        assert line["reward/style"] == pytest.approx(sum(one["parts"]["style"] for one in own) / len(own))
        assert line["reward"] == pytest.approx(sum(one["reward"] for one in own) / len(own))
        assert line["judge/style/requests"] + line["judge/style/cached"] == 16
    assert any("evaluate/judge/style/requests" in line for line in metrics)
    for file in (tmp_path / "run").rglob("*"):
        assert not file.is_file() or b"sk-secret" not in file.read_bytes()


def test_an_evaluation_is_of_the_samples_that_were_judged(tiny) -> None:
    """Of three problems with two samples each: all judged, one of them, none."""
    lost = failed_score("judge_error", "no")
    scored = [ScoreResult(-1.0), ScoreResult(-3.0), lost, ScoreResult(-4.0), lost, lost]
    settings = {"every": 1, "problems": 3, "samples": 2, "temperature": 1.0, "k": [1, 2], "pass_reward": -2.0}
    prompts = [Prompt(Problem(ask("?")), "?", [1])] * 3
    done = [Completion([1], [0.0], [0.0], "stop", "")] * 6
    found = evaluate(tiny({"evaluate": settings}), lambda *_: (done, scored), prompts, no_progress)
    assert found["evaluate/reward"] == pytest.approx(-8 / 3)
    assert (found["evaluate/pass@1"], found["evaluate/pass@2"]) == (0.25, 1.0)
    assert found["evaluate/score_failures/judge_error"] == 3


@pytest.mark.slow
def test_a_judge_that_is_away_leaves_no_reward_that_a_checkpoint_could_be_best_by(tiny, tmp_path) -> None:
    with judge_server(lambda number, request: (404, b"who?")) as server:
        evaluate = {"every": 1, "problems": 4, "final": {"samples": 2, "k": [1]}}
        changes = {"task.rewards": rewards(server.url), "evaluate": evaluate, "checkpoint": {"every": 1}}
        metrics, _, _ = run(tiny, tmp_path / "run", changes)
    assert [line["score_failures/judge_error"] for line in metrics if "samples" in line] == [16, 16]
    assert any("evaluate/final/score_failures/judge_error" in line for line in metrics)
    assert not any(name.endswith(("reward", "pass@1", "greedy")) for line in metrics for name in line)


def test_losses_that_need_every_sample_go_on_without_a_few(tiny, tmp_path) -> None:
    """A penalty in the reward, whitened by tokens, and groups that are filled up."""
    shaped = {key: value for key, value in SHAPED.items() if not key.startswith("task")}
    kinds = [(500, b"oh"), "I cannot say", "3", "1", "2"]
    with judge_server(lambda number, request: kinds[sum(map(ord, str(request))) % len(kinds)]) as server:
        judge = rewards(server.url, retries=0)
        metrics, rollouts, weights = run(tiny, tmp_path / "run", {**shaped, "task.rewards": judge})
    lost = [one for line in rollouts.splitlines() if (one := json.loads(line)).get("failure")]
    assert lost
    assert all(one["advantage"] == 0 for one in lost)
    for line in metrics:
        assert line["samples_trained"] == line["samples"] - sum(one["step"] == line["step"] for one in lost)
    assert all(math.isfinite(line["loss"]) for line in metrics)
    assert all(weight.isfinite().all() for weight in weights.values())


@pytest.mark.parametrize("turns", [pytest.param("episode", marks=pytest.mark.slow), "to_go"])
def test_the_last_turn_of_an_episode_is_judged(tiny, tmp_path, turns) -> None:
    """Episodes that the judge loses have advantage 0, and the others are compared without them."""
    kinds = [(400, b"oh"), "I cannot say", "3", "1", "2"]
    with judge_server(lambda number, request: kinds[sum(map(ord, str(request))) % len(kinds)]) as server:
        task = {"environment": {"object": "rewardless_environment:Tools"}, "rewards": rewards(server.url)}
        changes = {"task": {**TINY["task"], **task}, "advantage.turns": turns, "model.scratch.alphabet": None}
        metrics, rollouts, _ = run(tiny, tmp_path / "run", changes)
        asked = server.asked()
    samples = [json.loads(line) for line in rollouts.splitlines()]
    lost = [one for one in samples if one.get("failure")]
    assert 0 < len(lost) < len(samples)
    assert all(one["advantage"] == 0 for one in lost)
    assert any(one["advantage"] for one in samples)
    assert all(one["completion"] in "".join(asked) for one in samples)
    assert all(line["samples_trained"] <= 16 - sum(one["step"] == line["step"] for one in lost) for line in metrics)


def test_a_judge_may_be_all_there_is_and_each_task_of_a_mix_has_its_own(tiny, tmp_path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n}{n}="}) + "\n" for n in range(10)))
    with judge_server(lambda number, request: str(number % 5)) as server:
        mix = {
            "judged": {
                "file": {"train": str(rows), "answer_field": None},
                "rewards": {"style": {**rewards(server.url)["style"]}},
                "held_out": 0,
            },
            "copying": {"builtin": {"name": "copy", "options": {"digits": 2}}, "size": 10, "held_out": 0},
        }
        mix["judged"]["rewards"]["style"]["judge"]["prompt"] = "{completion}"
        metrics, rollouts, _ = run(tiny, tmp_path / "run", {"task": {"mix": mix, "scoring": {"workers": 1}}})
        asked = len(server.requests)
    samples = [json.loads(line) for line in rollouts.splitlines()]
    judged = [one for one in samples if one["task"] == "judged"]
    assert len(judged) == 16
    assert all(set(one["parts"]) == {"style"} for one in judged)
    assert sum(line["judge/judged/style/requests"] for line in metrics) == asked <= 16


def test_ranks_do_not_wait_for_each_other_as_long_as_for_a_judge(tiny) -> None:
    judged = {"task.rewards": rewards("http://x", step_timeout_s=600), "parallel.gpus": 2}
    with pytest.raises(
        ValueError, match=r"style\.judge\.step_timeout_s: 600` is no less than `run\.distributed_timeout"
    ):
        tiny(judged)
    tiny({**judged, "parallel": None})
    tiny({**judged, "run.distributed_timeout_minutes": 11})
    tiny({**judged, "task.rewards": rewards("http://x")})


def test_what_is_missing_is_found_before_anything_is_loaded(tiny, tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    for reward, said in (
        ({"judge": rewards("http://x")["style"]["judge"] | {"api_key_env": "NO_SUCH_KEY"}}, "NO_SUCH_KEY is not set"),
        (
            {"reward_model": {"path": "/no/such/model"}},
            r"`task\.rewards\.r\.reward_model\.path: /no/such/model` does not",
        ),
    ):
        config = tiny({"task.rewards": {"r": reward}, "run.folder": str(tmp_path / "run")})
        with pytest.raises(UserError, match=said):
            _checked(Job("test", config, None), print)
