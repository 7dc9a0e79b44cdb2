"""What a person sees while a run goes on: the question, the time left, and signs of life where there is no bar."""

import io
import threading

import pytest
from rich.console import Console

from ebbtide.progress import format_duration
from ebbtide.report.heartbeat import SILENCE, Heartbeat
from ebbtide.report.report import Report
from ebbtide.report.terminal import Terminal
from ebbtide.rollout.batch import Sample
from ebbtide.rollout.engine import Completion
from ebbtide.rollout.prompts import Prompt
from ebbtide.tasks.scoring import ScoreResult
from ebbtide.tasks.task import Problem
from patience import PATIENCE


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_samples_show_the_question_and_not_the_templates_head() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many legs have 3 cats?"}]
    head = "<|im_start|>system\nBe brief." + " Think step by step." * 20 + "<|im_end|>\n"
    tail = "<|im_start|>user\nHow many legs have 3 cats?<|im_end|>\n<|im_start|>assistant\n"
    completion = Completion([2], [0.0], [0.0], "stop", "12")
    out = io.StringIO()
    shown = Sample(Prompt(Problem(messages), head + tail, [1]), completion, ScoreResult(1.0), 0.5, trained=True)
    Terminal(1, Console(file=out, width=120)).samples([shown])
    assert "How many legs have 3 cats?" in out.getvalue()
    assert "im_start" not in out.getvalue()


@pytest.mark.parametrize(
    ("messages", "question"),
    [
        ([("user", "first"), ("assistant", "said"), ("user", "last"), ("assistant", "begun")], "last"),
        ([("system", "alone")], "alone"),
        ([], ""),
    ],
)
def test_the_question_of_a_problem(messages, question) -> None:
    assert Problem([{"role": role, "content": content} for role, content in messages]).question == question


def test_a_step_line_says_how_long_the_rest_will_take() -> None:
    """By the pace of this process's steps; the first has only its own seconds to go by, and the last nothing left."""
    clock, out, lines = Clock(), io.StringIO(), []
    terminal = Terminal(100, Console(file=out, width=200), clock)
    for step, ended in ((11, 100.0), (12, 130.0), (13, 190.0), (100, 200.0)):
        clock.now = ended
        terminal.step_line(step, {"seconds": 20.0, "reward": 0.5})
        lines.append(out.getvalue().splitlines()[-1])
    assert lines[0].endswith(f"left {format_duration(20 * 89)}")
    assert lines[1].endswith(f"left {format_duration(30 * 88)}")
    assert lines[2].endswith(f"left {format_duration(45 * 87)}")
    assert "left" not in lines[3]


@pytest.mark.parametrize(("seconds", "said"), [(0.4, "0 s"), (119, "119 s"), (120, "2 min"), (9000, "2.5 h")])
def test_durations_have_units(seconds, said) -> None:
    assert format_duration(seconds) == said


def test_long_work_says_that_it_goes_on_where_there_is_no_bar() -> None:
    clock, said = Clock(), []
    heart = Heartbeat(said.append, clock)
    with heart.show_progress("loading the model"), heart.show_progress("step 3/10  generate") as progress:
        clock.now += SILENCE - 1
        heart.beat()
        assert said == []
        clock.now += 1
        progress(120, 480)
        heart.beat()
        heart.beat()  # what was just said is not said again
        assert said == ["  step 3/10  generate  25% after 15 s"]
        clock.now += SILENCE - 1
        heart.note_output()
        clock.now += 1
        heart.beat()
        assert len(said) == 1
    clock.now += SILENCE
    heart.beat()  # nothing is under way
    with heart.show_progress("encoding prompts"):
        heart.beat()  # and this has only begun
    assert len(said) == 1


def test_a_log_hears_the_heartbeat_and_a_terminal_does_not() -> None:
    for terminal, heard in ((False, True), (True, False)):
        clock, out = Clock(), io.StringIO()
        shown = Terminal(10, Console(file=out, force_terminal=terminal, width=80), clock)
        with shown.show_progress("loading the model"):
            clock.now += SILENCE
            shown._heartbeat.beat()
        assert ("loading the model  after 15 s" in out.getvalue()) == heard


def test_the_heart_beats_by_itself(monkeypatch) -> None:
    monkeypatch.setattr("ebbtide.report.heartbeat.SILENCE", 0.0)
    monkeypatch.setattr("ebbtide.report.heartbeat.LOOKS", 0.001)
    beaten = threading.Event()
    heart = Heartbeat(lambda text: beaten.set())
    heart.start()
    with heart.show_progress("loading the model"):
        assert beaten.wait(timeout=PATIENCE)
    heart.stop()


def test_the_last_words_name_the_page(tiny, tmp_path, capsys) -> None:
    with Report(tiny({"run.folder": str(tmp_path / "run")}), "test") as report:
        report.summarize_run("done: 2 steps")
    assert f"ebbtide report {tmp_path / 'run'} --serve" in capsys.readouterr().out.partition("next:")[2]
