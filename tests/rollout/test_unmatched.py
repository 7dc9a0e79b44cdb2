"""A run whose completions never match `task.extract` is warned of, and ended after a few steps; and no other is."""

import pytest

from ebbtide.algorithms.loop import train
from ebbtide.errors import UserError
from ebbtide.report.report import Report
from ebbtide.rollout.batch import Sample
from ebbtide.rollout.engine import Completion
from ebbtide.rollout.prompts import Prompt
from ebbtide.rollout.unmatched import MIN_COMPLETIONS, UnmatchedGuard
from ebbtide.tasks.scoring import ScoreResult
from ebbtide.tasks.task import Problem, ask

NONE, FOUND = ScoreResult(0.0, {"extracted": 0.0}), ScoreResult(0.0, {"extracted": 1.0})
FAILED = ScoreResult(0.0, failure="crash", message="died")


def samples(
    *scored: ScoreResult, count: int = 16, text: str = "so it is \x1b[31m12", finish: str = "stop"
) -> list[Sample]:
    """The first ones as told, and others that match nothing."""
    prompt = Prompt(Problem(ask("?")), "?", [1])
    rest = [NONE] * (count - len(scored))
    return [
        Sample(prompt, Completion([2], [0.0], [0.0], finish, text), one, 0.0, trained=True) for one in (*scored, *rest)
    ]


def test_a_run_without_a_match_is_warned_and_then_ended(tiny) -> None:
    unmatched = UnmatchedGuard(tiny({"task.extract": "<answer>(.*)</answer>"}))
    warning = unmatched.after_step(samples(count=MIN_COMPLETIONS, finish="length"))
    assert warning is not None
    assert f"none of {MIN_COMPLETIONS} completions" in warning
    assert "`task.extract: <answer>(.*)</answer>`" in warning
    assert "so it is" in warning
    assert "\x1b" not in warning
    assert "`rollout.max_new_tokens: 6`, which cut 100% of them off" in warning
    assert unmatched.after_step(samples(count=MIN_COMPLETIONS)) is None
    with pytest.raises(UserError, match=rf"none of {3 * MIN_COMPLETIONS} completions.*`task.unmatched_steps: null`"):
        unmatched.after_step(samples(count=MIN_COMPLETIONS))


@pytest.mark.parametrize(
    ("changes", "first", "count"),
    [
        ({"task.extract": None}, (), MIN_COMPLETIONS),
        ({}, (FOUND,), MIN_COMPLETIONS),  # reward 0, and a match: there is something to learn
        ({}, (), 4),  # too few to tell
        ({"task.unmatched_steps": None}, (), MIN_COMPLETIONS),
    ],
    ids=["no pattern", "one match", "few completions", "told to go on"],
)
def test_other_runs_go_on(tiny, changes, first, count) -> None:
    unmatched = UnmatchedGuard(tiny({"task.extract": "(never)", **changes}))
    unmatched.after_step(samples(*first, count=count))
    for _ in range(5):
        assert unmatched.after_step(samples(count=count)) is None


def test_a_sample_that_could_not_be_scored_may_have_matched(tiny) -> None:
    unmatched = UnmatchedGuard(tiny({"task.extract": "(never)", "task.unmatched_steps": 1}))
    assert unmatched.after_step(samples(FAILED, count=MIN_COMPLETIONS)) is None
    with pytest.raises(UserError):
        unmatched.after_step(samples(count=MIN_COMPLETIONS))


def test_a_run_in_which_nothing_can_be_scored_ends(tiny) -> None:
    unmatched = UnmatchedGuard(tiny())
    for _ in range(2):
        unmatched.after_step(samples(*[FAILED] * MIN_COMPLETIONS))
    with pytest.raises(
        UserError, match=rf"none of {3 * MIN_COMPLETIONS} completions so far could be scored \(crash: died\)"
    ):
        unmatched.after_step(samples(*[FAILED] * MIN_COMPLETIONS))
    once = UnmatchedGuard(tiny())
    once.after_step(samples(FOUND, *[FAILED] * MIN_COMPLETIONS))
    for _ in range(4):
        assert once.after_step(samples(*[FAILED] * MIN_COMPLETIONS)) is None


def test_the_loop_ends_such_a_run(tiny, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("ebbtide.rollout.unmatched.MIN_COMPLETIONS", 32)
    changes = {"task.extract": "(never)", "task.unmatched_steps": 2, "train.steps": 9}
    config = tiny({**changes, "run.folder": str(tmp_path / "run")})
    with pytest.raises(UserError, match=r"none of 32 completions"), Report(config, "test") as report:
        train(config, report)
    assert capsys.readouterr().out.count("none of 16 completions so far matches `task.extract: (never)`") == 1
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
