"""Scoring in processes: whatever a scorer does costs its own sample, never another and never the run."""

import pytest

from ebbtide.config.tree import Task
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


def test_nothing_to_score() -> None:
    with ScoringPool(task(workers=1), seed=0) as pool:
        assert pool.score([]) == []


def test_workers_are_gone_afterwards() -> None:
    with ScoringPool(task(), seed=0) as pool:
        pool.score([(PROBLEM, "fine")])
        processes = [worker.process for worker in pool._workers]
    assert not any(process.is_alive() for process in processes)


@pytest.mark.parametrize("text", ["hang", "exit"])
def test_every_completion_may_fail(text) -> None:
    with ScoringPool(task(seconds=0.2, workers=1), seed=0) as pool:
        assert all(score.failure for score in pool.score([(PROBLEM, text)] * 2))
