"""A run that is stopped saves before anything that can be made up for, and the run that goes on from it does so
first."""

import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from test_resume import keeper, run, same

import ebbtide.algorithms.grpo
from conftest import TINY, merged
from ebbtide.algorithms.evaluate import evaluate, is_eval_missing
from ebbtide.checkpoint.resume import find_checkpoint
from ebbtide.checkpoint.store import Checkpoint, list_checkpoints
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.launch.job import Job
from ebbtide.launch.run_rank import run_rank
from ebbtide.rollout.partitioned_scoring import PartitionedScoring

LAST = 3
CHANGES = {
    "train.steps": LAST,
    "evaluate": {"every": 2, "problems": 4},
    "checkpoint": {"every": None, "keep": 9, "async_save": False},
    "advantage.drop_zero_std_groups": False,
}


def config(folder: Path, **changes) -> GrpoConfig:
    return GrpoConfig.model_validate(merged(TINY, {**CHANGES, "run.folder": str(folder), **changes}))


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """(the folder of a run that nothing stopped, what came of it)."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    return folder, run(config(folder))


def stop(monkeypatch, when: str, at: int) -> list[int]:
    """Has a run asked to stop at some moment of a step; gives the steps of evaluations that ended."""
    ended: list[int] = []
    step = 0
    assemble = ebbtide.algorithms.grpo.assemble

    def assembled(*args):
        nonlocal step
        step += 1
        if (when, step) == ("before", at):
            signal.raise_signal(signal.SIGINT)
        return assemble(*args)

    def evaluated(config, attempt, tests, progress, *, last):
        if (when, step) == ("generating", at):
            signal.raise_signal(signal.SIGTERM)
        found = evaluate(config, attempt, tests, progress, last=last)
        ended.append(step)
        return found

    score = PartitionedScoring.score

    def scored(self, *args):
        if (when, step) == ("scoring", at):
            signal.raise_signal(signal.SIGTERM)
        return score(self, *args)

    monkeypatch.setattr(PartitionedScoring, "score", scored)
    monkeypatch.setattr("ebbtide.algorithms.grpo.assemble", assembled)
    monkeypatch.setattr("ebbtide.algorithms.task.evaluate", evaluated)
    return ended


@pytest.mark.parametrize(("when", "at"), [("before", 2), ("generating", 2), ("scoring", LAST)])
def test_a_stop_saves_without_the_evaluation_that_is_due_and_the_resumed_run_makes_up_for_it(
    straight, tmp_path, monkeypatch, capsys, when, at
) -> None:
    with monkeypatch.context() as patched:
        ended = stop(patched, when, at)
        with pytest.raises(KeyboardInterrupt):
            run(config(tmp_path / "run"))
    assert ended == [step for step in (0, 2) if step < at]
    (saved,) = list_checkpoints(tmp_path / "run" / "checkpoints")
    assert saved.step == at
    assert "evaluate/reward" not in saved.metrics
    assert "its evaluation is left to the run that resumes" in capsys.readouterr().out
    again = config(tmp_path / "run", resume="auto")
    assert same(run(again, find_checkpoint(again, print)), straight[1])
    # `checkpoint.metric` may go by it
    assert "evaluate/reward" in list_checkpoints(tmp_path / "run" / "checkpoints")[0].metrics


def test_a_stop_in_the_evaluation_before_the_first_step_stops_at_once(tmp_path, monkeypatch) -> None:
    stop(monkeypatch, "generating", 0)
    with pytest.raises(KeyboardInterrupt):
        run(config(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_an_evaluation_gives_way_to_the_deadline(tiny, tmp_path) -> None:
    made, clock = keeper(tiny, tmp_path, deadline_minutes=10.0)
    made._blocked_seconds = 60.0
    clock.now = 500
    assert not made.must_stop
    clock.now = 520
    assert made.must_stop  # a save of 60 s, half as long again, would end after 600 s


def test_what_was_due_because_the_run_was_to_end_is_not_owed_to_a_longer_one(tmp_path) -> None:
    saved = Checkpoint(tmp_path, LAST, {"reward": 0.5}, 0)
    assert is_eval_missing(config(tmp_path), saved)
    assert not is_eval_missing(config(tmp_path, **{"train.steps": LAST + 2}), saved)
    assert not is_eval_missing(config(tmp_path), replace(saved, metrics={"evaluate/reward": 0.5}))


def test_of_a_run_that_was_killed_after_its_last_checkpoint_what_is_missing_is_made(
    straight, tmp_path, monkeypatch
) -> None:
    """Nothing is loaded for it."""
    folder = tmp_path / "run"
    shutil.copytree(straight[0], folder)
    assert not (folder / "report.html").exists()
    for load in ("load_model", "load_initial"):
        monkeypatch.setattr(f"ebbtide.worker.{load}", lambda *_, **__: pytest.fail("loaded"))
    said: list[str] = []
    again = config(folder, resume="auto")
    run_rank(Job("test", again, None, find_checkpoint(again, said.append)))
    assert "is of the last step" in said[0]
    assert (folder / "report.html").exists()
    assert (folder / "metrics.jsonl").read_bytes() == (straight[0] / "metrics.jsonl").read_bytes()
