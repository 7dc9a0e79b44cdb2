"""Runs with a reward model as a holding: the same bits wherever it is, resuming, rehearsing, and the plan."""

import json
import shutil

import pytest
import torch

from ebbtide.algorithms.loop import train
from ebbtide.checkpoint.resume import find_checkpoint
from ebbtide.planner.holdings import plan_holdings
from ebbtide.planner.offline import Hardware, plan_offline
from ebbtide.report.report import Report
from ebbtide.worker import Worker
from test_loop import run
from tiny_reward_models import reward_model

PLACES = {
    "keep": {},
    "lean": {"memory.preset": "lean"},
    "away in all but its phase": {
        "memory.offload": {name: ["reward_model"] for name in ("generate", "logprob", "train", "step", "save")}
    },
}


def rewarded(path: str, **changes):
    rewards = {
        "right": {"scorer": "task"},
        "liked": {"reward_model": {"path": path, "batch_tokens": 64}, "weight": 0.1},
    }
    evaluate = {"every": 2, "problems": 4}
    return {"task.rewards": rewards, "train.steps": 3, "evaluate": evaluate, "checkpoint": None, **changes}


@pytest.mark.slow
def test_where_it_is_changes_no_bit(tiny, tmp_path) -> None:
    path = reward_model(tmp_path / "model")
    first = None
    for name, changes in PLACES.items():
        found = run(tiny, tmp_path / name, rewarded(path, **changes))
        first = first or found
        assert found[:2] == first[:2], name
        assert all(torch.equal(weight, first[2][key]) for key, weight in found[2].items()), name
    metrics, rollouts, _ = first
    samples = [json.loads(line) for line in rollouts.splitlines()]
    assert len({one["parts"]["liked"] for one in samples}) > 4
    assert all(one["reward"] == one["parts"]["right"] + 0.1 * one["parts"]["liked"] for one in samples)
    steps = [line for line in metrics if "samples" in line]
    for number, line in enumerate(steps, start=1):
        own = [one["parts"]["liked"] for one in samples if one["step"] == number]
        assert line["reward/liked"] == pytest.approx(sum(own) / len(own))
    assert any("evaluate/reward" in line for line in metrics)


def test_it_is_on_the_device_in_its_phases_alone(tiny, tmp_path) -> None:
    config = tiny(rewarded(reward_model(tmp_path / "model"), **{"memory.preset": "lean"}))
    with Worker(config) as worker:
        assert worker.reward_models is not None
        there = {}
        for phase in (*config.cycle, "evaluate"):
            with worker.phase(phase):
                if phase in config.scored_in:
                    worker.residency.need("reward_model")
                there[phase] = worker.residency.holdings()["reward_model"].device > 0
    assert there == {phase: phase in ("score", "evaluate") for phase in there}


@pytest.mark.parametrize("rehearsal", ["built", "none"])
def test_rehearsals_score_with_it(tiny, tmp_path, rehearsal) -> None:
    config = tiny({**rewarded(reward_model(tmp_path / "model")), "run.folder": str(tmp_path / "run")})
    with Report(config, "test") as report:
        train(config, report, rehearsal)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert sum("reward/liked" in json.loads(line) for line in lines) == 3


def test_a_resumed_run_goes_on_to_the_bit_and_notices_another_model(tiny, tmp_path) -> None:
    path = reward_model(tmp_path / "model")
    saves = {"every": 1, "keep": 9, "keep_best": 0, "async_save": False}
    changes = {**rewarded(path), "checkpoint": saves, "evaluate": None}
    _, rollouts, weights = run(tiny, tmp_path / "straight", changes)
    run(tiny, tmp_path / "stopped", changes)
    config = tiny({**changes, "run.folder": str(tmp_path / "stopped"), "resume": "auto"})

    def resume() -> tuple[dict[str, torch.Tensor], list[str]]:
        shutil.rmtree(tmp_path / "stopped" / "checkpoints" / "step-000003")
        said: list[str] = []
        with Report(config, "test", resumed=find_checkpoint(config, print)) as report:
            report.warn = said.append
            return train(config, report).model.state_dict(), said

    again, said = resume()
    assert all(torch.equal(again[name], value) for name, value in weights.items())
    assert (tmp_path / "stopped" / "rollouts.jsonl").read_text() == rollouts
    assert not any("reward model" in line for line in said)
    reward_model(tmp_path / "model", seed=1)
    _, said = resume()
    assert any("the weights of a reward model have changed" in line for line in said)


def test_the_plan_has_it_as_everything_else(tiny, tmp_path) -> None:
    path = reward_model(tmp_path / "model")
    plain = tiny({"task.rewards": {"right": {"scorer": "task"}}})
    config = tiny(rewarded(path))
    hardware = Hardware("h100", None, None, None, None, 8)
    (with_it, _, _), (without, _, _) = plan_offline(config, hardware), plan_offline(plain, hardware)
    phases, fewer = with_it.candidate.prediction.phases, without.candidate.prediction.phases
    assert phases["score"].device["reward_model"] > 0
    assert phases["score"].seconds > fewer["score"].seconds
    assert phases["score"].device["workspace"] > fewer["score"].device["workspace"]
    assert plan_holdings(config).table["evaluate"]["reward_model"] == "device"
    lean = plan_offline(tiny(rewarded(path, **{"memory.preset": "lean", "memory.plan": "manual"})), hardware)[0]
    there = {name for name, phase in lean.candidate.prediction.phases.items() if "reward_model" in phase.device}
    assert there == {"score", "evaluate"}


def test_the_plan_has_its_forwards_in_score_and_in_evaluations(tiny, tmp_path) -> None:
    """Those of an evaluation are when its KV cache is free again: the larger of the two is the peak."""
    hardware = Hardware("h100", None, None, None, None, 8)
    path = reward_model(tmp_path / "model")

    def planned(batch_tokens: int, problems: int = 8):
        rewards = {"liked": {"reward_model": {"path": path, "batch_tokens": batch_tokens}}}
        evaluate = {"every": 2, "problems": problems, "samples": 512, "temperature": 1.0}
        found = plan_offline(tiny({"task.rewards": rewards, "evaluate": evaluate}), hardware)[0].candidate
        return found.prediction

    small, large = planned(14), planned(10**6)
    for phase in ("score", "evaluate"):
        assert large.phases[phase].peak > small.phases[phase].peak, phase
    assert "kv_cache" in small.phases["evaluate"].device
    assert "kv_cache" not in large.phases["evaluate"].device
    assert large.generation.min_peak == pytest.approx(large.phases["evaluate"].peak, abs=2**27)
    assert planned(14, 4).phases["evaluate"].seconds < small.phases["evaluate"].seconds


def test_a_forward_is_filled_up_with_shorter_sequences(tiny, tmp_path) -> None:
    """Of 14 tokens the longest, with room for 27: two of 13 are more than one of 14."""
    hardware = Hardware("h100", None, None, None, None, 8)
    path, bytes_of = reward_model(tmp_path / "model"), {}
    for batch_tokens in (14, 27, 28, 10**6):
        rewards = {"liked": {"reward_model": {"path": path, "batch_tokens": batch_tokens}}}
        found = plan_offline(tiny({"task.rewards": rewards}), hardware)[0].candidate.prediction
        bytes_of[batch_tokens] = found.phases["score"].device["workspace"]
    assert bytes_of[14] < bytes_of[27] < bytes_of[28] < bytes_of[10**6]
