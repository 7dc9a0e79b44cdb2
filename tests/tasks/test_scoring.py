"""Scoring in processes: whatever a scorer does costs its own sample, never another and never the run."""

import subprocess

import pytest

from ebbtide.config.tree import Task
from ebbtide.errors import UserError
from ebbtide.tasks.scoring import ScoringPool
from ebbtide.tasks.task import Problem, ask

PROBLEM = Problem(ask("p"), 1)


def task(seconds: float = 1.0, workers: int = 2) -> Task:
    return Task.model_validate({"python": {"object": "misbehaving:Misbehaving"}, "scoring": {"seconds": seconds, "workers": workers}})


def test_each_failure_costs_its_sample_alone(capfd) -> None:
    said = ["fine", "hang", "fine", "exit", "raise", "segfault", "nan", "nan part", "nothing", "print", "fine"]
    seen: list[tuple[int, int]] = []
    with ScoringPool(task(), seed=0) as pool:
        scored = pool.score([(PROBLEM, text) for text in said], lambda done, of: seen.append((done, of)))
        again = pool.score([(PROBLEM, "fine")] * 3)
    failures = {text: score.failure for text, score in zip(said, scored, strict=True)}
    assert failures == {
        "fine": None,
        "hang": "timeout",
        "exit": "crash",
        "raise": "error",
        "segfault": "crash",
        "nan": "not_finite",
        "nan part": "not_finite",
        "nothing": "error",
        "print": None,
    }
    assert all(score.value == (0.5 if score.failure is None else 0.0) for score in scored)
    assert "no idea" in scored[4].message
    assert [score.value for score in again] == [0.5] * 3
    assert seen == [(done, len(said)) for done in range(1, len(said) + 1)]
    assert "chatter" not in capfd.readouterr().out


def test_results_come_back_in_order() -> None:
    config = Task.model_validate({"builtin": {"name": "add"}, "held_out": 1, "scoring": {"workers": 3}})
    with ScoringPool(config, seed=0) as pool:
        scored = pool.score([(Problem(ask("p"), str(i)), str(i if i % 3 else -1)) for i in range(200)])
    assert [score.value for score in scored] == [float(bool(i % 3)) for i in range(200)]


def test_a_child_of_the_scorer_answers_for_nobody() -> None:
    """One that raises in a child that it forked: the child must not go on as a second worker, whose answers would be taken for those of others."""
    with ScoringPool(task(seconds=20.0, workers=1), seed=0) as pool:
        scored = [pool.score([(PROBLEM, text)])[0] for text in ("fork", "raise", "fine", "fork", "nan", "fine")]
    assert [score.failure for score in scored] == [None, "error", None, None, "not_finite", None]


def test_workers_hold_nothing_out() -> None:
    """As the run that asks them, which has no evaluation: there are 55 sums, and 64 held out would leave none."""
    with ScoringPool(Task.model_validate({"builtin": {"name": "add"}, "scoring": {"workers": 1}}), seed=0) as pool:
        assert pool.score([(Problem(ask("p"), "3"), "3")])[0].value == 1.0


def test_nothing_to_score() -> None:
    with ScoringPool(task(workers=1), seed=0) as pool:
        assert pool.score([]) == []


def test_workers_are_gone_afterwards() -> None:
    with ScoringPool(task(), seed=0) as pool:
        pool.score([(PROBLEM, "fine")])
        processes = [worker.process for worker in pool._workers]
    assert not any(process.is_alive() for process in processes)


def test_what_a_scorer_started_ends_with_it() -> None:
    with ScoringPool(task(seconds=0.5, workers=1), seed=0) as pool:
        pool.score([(PROBLEM, "fine")])
        group = pool._workers[0].process.pid
        assert pool.score([(PROBLEM, "child")])[0].failure == "timeout"
    states = subprocess.run(["ps", "-o", "stat=", "-g", str(group)], capture_output=True, text=True, check=False).stdout.split()
    assert [state for state in states if not state.startswith("Z")] == []  # a zombie is dead, only nobody has asked how it died


def test_a_problem_that_cannot_be_sent_costs_itself() -> None:
    with ScoringPool(task(workers=1), seed=0) as pool:
        scored = pool.score([(Problem(ask("p"), lambda: None), "fine"), (PROBLEM, "fine")])
    assert [score.failure for score in scored] == ["error", None]
    assert "cannot be sent" in scored[0].message


def test_a_task_that_cannot_be_built_again_ends_the_run_with_an_error(tmp_path) -> None:
    config = Task.model_validate(
        {
            "python": {"object": "misbehaving:OnceOnly", "options": {"folder": str(tmp_path / "made")}},
            "scoring": {"workers": 1, "seconds": 5.0},
        }
    )
    with ScoringPool(config, seed=0) as pool:
        assert pool.score([(PROBLEM, "fine")])[0].value == 0.5
        with pytest.raises(UserError, match="could not build the task"):
            pool.score([(PROBLEM, "exit"), (PROBLEM, "fine")])


@pytest.mark.parametrize("text", ["hang", "exit"])
def test_every_completion_may_fail(text) -> None:
    with ScoringPool(task(seconds=0.2, workers=1), seed=0) as pool:
        assert all(score.failure for score in pool.score([(PROBLEM, text)] * 2))
