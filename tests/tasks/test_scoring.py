"""Scoring in processes: whatever a scorer does costs its own sample, never another and never the run."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ebbtide.config.task import TaskConfig
from ebbtide.errors import UserError
from ebbtide.tasks import guarded_process
from ebbtide.tasks.score_message import MAX_MESSAGE
from ebbtide.tasks.scoring import ScoringPool
from ebbtide.tasks.task import Problem, ask
from patience import PATIENCE

PROBLEM = Problem(ask("p"), 1)


def task(seconds: float = 3.0, workers: int = 2) -> TaskConfig:
    return TaskConfig.model_validate(
        {"python": {"object": "misbehaving:Misbehaving"}, "scoring": {"timeout_s": seconds, "workers": workers}}
    )


@pytest.fixture(scope="module")
def patient():
    """A pool for tests that wait for no time limit."""
    with ScoringPool(task(seconds=PATIENCE, workers=1), seed=0) as pool:
        yield pool


def test_each_failure_costs_its_sample_alone(capfd) -> None:
    expected = {
        "fine": None,
        "hang": "timeout",
        "exit": "crash",
        "raise": "error",
        "segfault": "crash",
        "nan": "not_finite",
        "nan part": "not_finite",
        "huge": "too_large",
        "huge part": "too_large",
        "many parts": "error",
        "nothing": "error",
        "print": None,
        "half a message": "timeout",
        "half a message, then exit": "crash",
        "no message": "crash",
        "a message without end": "crash",
        "two messages": "crash",
        "stop": "timeout",
    }
    said = [text for bad in expected for text in (bad, "fine")]
    seen: list[tuple[int, int]] = []
    with ScoringPool(task(workers=3), seed=0) as pool:
        scored = pool.score([(PROBLEM, text) for text in said], lambda done, of: seen.append((done, of)))
        again = pool.score([(PROBLEM, "fine")] * 3)
    assert {text: score.failure for text, score in zip(said, scored, strict=True)} == expected
    assert all(score.value == (0.5 if score.failure is None else 0.0) for score in scored)
    messages = {text: score.message for text, score in zip(said, scored, strict=True)}
    assert "no idea" in messages["raise"]
    assert "SIGSEGV" in messages["segfault"]
    assert "exit code 3" in messages["exit"]
    assert "1e+300" in messages["huge"]
    assert [score.value for score in again] == [0.5] * 3
    assert seen == [(done, len(said)) for done in range(1, len(said) + 1)]
    assert "chatter" not in "".join(capfd.readouterr())


def test_a_failure_costs_its_sample_alone_where_many_are_sent_at_once() -> None:
    bad = {7: "exit", 20: "raise", 21: "segfault", 60: "hang", 119: "exit"}
    said = [bad.get(number, "fine") for number in range(120)]
    with ScoringPool(task(workers=2), seed=0) as pool:
        scored = pool.score([(PROBLEM, text) for text in said])
    failures = {number: score.failure for number, score in enumerate(scored) if score.failure is not None}
    assert failures == {7: "crash", 20: "error", 21: "crash", 60: "timeout", 119: "crash"}


def test_results_come_back_in_order() -> None:
    config = TaskConfig.model_validate({"builtin": {"name": "add"}, "held_out": 1, "scoring": {"workers": 3}})
    with ScoringPool(config, seed=0) as pool:
        scored = pool.score([(Problem(ask("p"), str(i)), str(i if i % 3 else -1)) for i in range(200)])
    assert [score.value for score in scored] == [float(bool(i % 3)) for i in range(200)]


def test_a_child_of_the_scorer_answers_for_nobody(patient) -> None:
    """One that raises in a child that it forked: the child must not go on as a second worker, whose answers would be
    taken for those of others."""
    scored = [patient.score([(PROBLEM, text)])[0] for text in ("fork", "raise", "fine", "fork", "nan", "fine")]
    assert [score.failure for score in scored] == [None, "error", None, None, "not_finite", None]


def test_texts_from_a_scorer_are_limited(patient) -> None:
    error, named = patient.score([(PROBLEM, "long error"), (PROBLEM, "odd name")])
    assert error.failure == "error"
    assert len(error.message) < MAX_MESSAGE + 10
    (name,) = named.parts
    assert len(name) < 200
    assert name.startswith(r"\x1b[31m\ud800nnn")


def test_workers_hold_nothing_out() -> None:
    """As the run that asks them, which has no evaluation: there are 55 sums, and 64 held out would leave none."""
    with ScoringPool(
        TaskConfig.model_validate({"builtin": {"name": "add"}, "scoring": {"workers": 1}}), seed=0
    ) as pool:
        assert pool.score([(Problem(ask("p"), "3"), "3")])[0].value == 1.0


def test_nothing_to_score(patient) -> None:
    assert patient.score([]) == []


def test_a_process_that_stops_between_completions_takes_no_more_and_is_replaced() -> None:
    """A completion that is larger than what a channel holds: the run must not wait for it to be read."""
    with ScoringPool(task(workers=1), seed=0) as pool:
        os.kill(int(pool.score([(PROBLEM, "who")])[0].message.split()[-1]), signal.SIGSTOP)
        scored = pool.score([(PROBLEM, "x" * 10_000_000), (PROBLEM, "fine")])
    assert [score.failure for score in scored] == ["timeout", None]


def test_a_process_that_dies_between_completions_costs_none(tmp_path, patient) -> None:
    os.mkfifo(tmp_path / "now")
    assert patient.score([(PROBLEM, f"exit when told: {tmp_path / 'now'}")])[0].failure is None
    (tmp_path / "now").write_text("now")
    assert select.select([patient._workers[0].process], [], [], PATIENCE)[0]
    assert [score.failure for score in patient.score([(PROBLEM, "fine")] * 2)] == [None] * 2


@pytest.fixture
def others(tmp_path):
    """A pipe that all hold that a scorer has started, and its end to read from."""
    os.mkfifo(tmp_path / "pipe")
    end = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    yield tmp_path / "pipe", end
    os.close(end)


@pytest.mark.parametrize(("text", "failure"), [("leave others", None), ("leave others and hang", "timeout")])
def test_what_a_scorer_started_ends_with_it(others, text, failure) -> None:
    """Also what has a session of its own, and what has no parent any more."""
    pipe, end = others
    with ScoringPool(task(workers=1), seed=0) as pool:
        assert pool.score([(PROBLEM, f"{text}: {pipe}")])[0].failure == failure
        assert os.read(end, 1) == b"x"
    assert os.read(end, 1) == b""  # nobody holds it any more; it would block else


def test_a_scorer_that_stops_what_watches_it_is_ended_too(monkeypatch) -> None:
    monkeypatch.setattr(guarded_process, "GRACE", 0.1)
    with ScoringPool(task(workers=1), seed=0) as pool:
        assert [score.failure for score in pool.score([(PROBLEM, "stop all"), (PROBLEM, "fine")])] == ["timeout", None]


RUN = """
import sys
from ebbtide.config.task import TaskConfig
from ebbtide.tasks.scoring import ScoringPool
from ebbtide.tasks.task import Problem, ask
config = {"python": {"object": "misbehaving:Misbehaving"}, "scoring": {"timeout_s": 1000.0, "workers": 1}}
if __name__ == "__main__":
    ScoringPool(TaskConfig.model_validate(config), 0).score([(Problem(ask("p")), sys.argv[1])])
"""


def test_scorers_end_with_a_run_that_is_killed(others) -> None:
    pipe, end = others
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path}
    run = subprocess.Popen([sys.executable, "-c", RUN, f"leave others and hang: {pipe}"], env=environment)
    try:
        there = select.poll()
        there.register(end, select.POLLIN)
        assert there.poll(60_000)
        assert os.read(end, 1) == b"x"
    finally:
        run.kill()
        run.wait()
    assert there.poll(20_000) == [(end, select.POLLHUP)]  # the last of them is gone


class Unwilling:
    def __reduce__(self):
        raise RuntimeError("not this one")


def test_a_problem_that_cannot_be_sent_costs_itself(patient) -> None:
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    answers = [lambda: None, deep, Unwilling(), 1]
    scored = patient.score([(Problem(ask("p"), answer), "fine") for answer in answers])
    assert [score.failure for score in scored] == ["error", "error", "error", None]
    assert "cannot be sent" in scored[0].message


def test_a_problem_that_cannot_be_sent_costs_itself_where_many_are_sent_at_once(patient) -> None:
    answers = [Unwilling() if number == 13 else number for number in range(40)]
    scored = patient.score([(Problem(ask("p"), answer), "fine") for answer in answers])
    assert [number for number, score in enumerate(scored) if score.failure is not None] == [13]


def test_a_task_that_cannot_be_built_again_ends_the_run_with_its_error(tmp_path) -> None:
    config = TaskConfig.model_validate(
        {
            "python": {"object": "misbehaving:OnceOnly", "options": {"folder": str(tmp_path / "made")}},
            "scoring": {"workers": 1, "timeout_s": PATIENCE},
        }
    )
    with ScoringPool(config, seed=0) as pool:
        assert pool.score([(PROBLEM, "fine")])[0].value == 0.5
        with pytest.raises(UserError, match=r"(?s)could not build the task: .*FileExistsError"):
            pool.score([(PROBLEM, "exit"), (PROBLEM, "fine")])


@pytest.mark.parametrize("text", ["hang", "exit"])
def test_every_completion_may_fail(text) -> None:
    with ScoringPool(task(seconds=0.2, workers=1), seed=0) as pool:
        assert all(score.failure for score in pool.score([(PROBLEM, text)] * 2))
