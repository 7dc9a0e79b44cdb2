"""The run folder: numbered, locked, never overwritten unasked; and the terminal's manners with model text."""

import io
import json
import logging
import os
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from disk import room_for
from ebbtide.checkpoint.resume import find_checkpoint
from ebbtide.config import load
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.errors import UserError
from ebbtide.report.folder import RunFolder
from ebbtide.report.log import LogFile
from ebbtide.report.report import Report
from ebbtide.report.sinks import Sinks
from ebbtide.report.terminal import FailsafeStdout, Terminal
from ebbtide.system.printable import printable


def folder(tmp_path, *overrides: str) -> RunFolder:
    return RunFolder(load("quickstart", [f"run.folder={tmp_path / 'run'}", *overrides]))


def begun(config: GrpoConfig) -> RunFolder:
    """The folder of a run that has decided everything, and so has written its config."""
    run = RunFolder(config)
    run.write_config(config)
    return run


def test_lines_are_whole_and_config_reads_back(tmp_path) -> None:
    run = begun(load("quickstart", [f"run.folder={tmp_path / 'run'}"]))
    run.write_metrics({"step": 1, "reward": 0.5})
    # an answer may be any object
    run.write_rollouts([{"completion": "é\n\x1b"}, {"completion": "", "answer": {1, 2}.__class__}])
    assert [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()] == [
        {"step": 1, "reward": 0.5}
    ]
    assert len((run.path / "rollouts.jsonl").read_text().splitlines()) == 2
    run.write_rollouts(
        [
            {"step": 1, "answer": "half an emoji: \ud83d"},
            {"step": 1, "answer": {(1, 2): "a key of its own"}, "reward": 1.0},
        ]
    )
    *_, half, odd = (json.loads(line) for line in (run.path / "rollouts.jsonl").read_text().splitlines())
    assert half["answer"] == "half an emoji: \ud83d"
    assert odd == {"step": 1, "answer": {"(1, 2)": "a key of its own"}, "reward": 1.0}
    written = load(str(run.path / "config.yaml"))
    assert written == load("quickstart")  # run again, it takes a folder of its own
    run.close()
    assert sorted(entry.name for entry in run.path.iterdir()) == ["config.yaml", "metrics.jsonl", "rollouts.jsonl"]


def test_a_figure_that_is_not_finite_is_null_in_every_file(tmp_path) -> None:
    run = folder(tmp_path)
    deep: list = []
    deep.append(deep)
    run.write_metrics({"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "reward": 0.5})
    run.write_rollouts([{"answer": {"limits": [float("-inf"), 1.0]}}, {"answer": deep, "reward": 1.0}])
    run.write_plan({"seconds": float("nan")})
    run.close()
    lines = [*(run.path / "metrics.jsonl").open(), *(run.path / "rollouts.jsonl").open()]
    metrics, limits, endless = (json.loads(line, parse_constant=pytest.fail) for line in lines)
    assert metrics == {"step": 1, "loss": None, "grad_norm": None, "reward": 0.5}
    assert limits["answer"] == {"limits": [None, 1.0]}
    assert endless["reward"] == 1.0
    assert json.loads((run.path / "plan.json").read_text(), parse_constant=pytest.fail) == {"seconds": None}


def test_a_second_run_is_refused_while_the_first_goes_on(tmp_path) -> None:
    run = folder(tmp_path)
    for overrides in ((), ("run.overwrite=true",)):
        with pytest.raises(UserError, match="in use by a run that is still going"):
            folder(tmp_path, *overrides)
    run.close()


def test_a_finished_run_is_kept_unless_told(tmp_path) -> None:
    run = folder(tmp_path)
    run.write_metrics({"step": 1})
    run.close()
    with pytest.raises(UserError, match=r"not empty.*run.overwrite=true"):
        folder(tmp_path)
    assert "step" in (run.path / "metrics.jsonl").read_text()
    folder(tmp_path, "run.overwrite=true").close()
    assert (run.path / "metrics.jsonl").read_text() == ""


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew_in_place(tmp_path) -> None:
    """As often as it takes, with what it had saved outside of the folder too."""
    save_to = tmp_path / "saved.jsonl"
    resume = ("resume=auto", f"rollout.save_to={save_to}")
    said: list[str] = []
    for step in (3, 2):
        config = load("quickstart", [f"run.folder={tmp_path / 'run'}", *resume])
        assert find_checkpoint(config, said.append) is None
        run = begun(config)
        assert (run.path / "metrics.jsonl").read_text() == ""
        run.write_metrics({"step": step})
        save_to.write_text('{"step": 1}\n')
        (run.path / "checkpoints" / ".unfinished-step-000050").mkdir(parents=True)
        run._lock.close()  # as a kill does: the file stays
    assert said == [
        f"`resume: auto` found no run in {run.path}: starting a new one",
        f"the run in {run.path} has no checkpoint yet: starting it again in the same folder",
    ]
    with pytest.raises(UserError, match=r"cannot continue the run in .*`seed` was 0 and is 1"):
        folder(tmp_path, *resume, "seed=1")
    RunFolder(config)._lock.close()  # a start that was killed before it wrote its config
    assert not (run.path / "config.yaml").exists()
    with pytest.raises(UserError, match=r"cannot continue the run in .*`seed` was 0 and is 1"):
        folder(tmp_path, *resume, "seed=1")
    with pytest.raises(UserError, match="not empty"):
        folder(tmp_path)


def test_of_numbered_runs_the_newest_is_the_one_to_resume(tmp_path, monkeypatch) -> None:
    """Also where it has no checkpoint and an older one has."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "quickstart-001" / "checkpoints" / "step-000100").mkdir(parents=True)
    (tmp_path / "runs" / "quickstart-002").mkdir()
    killed = begun(load("quickstart"))
    killed.write_metrics({"step": 7})
    killed.close()
    config = load("quickstart", ["resume=auto"])
    assert find_checkpoint(config, print) is None
    run = begun(config)
    assert run.path == killed.path
    run.write_metrics({"step": 100})
    run.close()
    with pytest.raises(UserError, match="has done its 100 steps and kept no checkpoint"):
        find_checkpoint(config, print)


def test_a_new_run_has_the_highest_number(tmp_path, monkeypatch) -> None:
    """Else `resume: auto` would take an older run for the newest."""
    monkeypatch.chdir(tmp_path)
    for number in ("002", "999", "1000"):
        (tmp_path / "runs" / f"quickstart-{number}").mkdir(parents=True)
    run = RunFolder(load("quickstart"))
    assert run.path.name == "quickstart-1001"
    run.close()


def test_what_a_run_replaces_comes_back_where_it_never_began(tmp_path) -> None:
    """A file that it cannot replay, or Ctrl-C while it loads, must not cost the run before it."""
    old = folder(tmp_path)
    old.write_metrics({"step": 7})
    (old.path / "checkpoints" / "step-000007").mkdir(parents=True)
    old.close()
    folder(tmp_path, "run.overwrite=true").close(discard=True)
    assert '"step": 7' in (old.path / "metrics.jsonl").read_text()
    assert (old.path / "checkpoints" / "step-000007").is_dir()
    killed = folder(tmp_path, "run.overwrite=true")
    killed._lock.close()  # as a kill does
    folder(tmp_path, "run.overwrite=true").close(discard=True)
    assert '"step": 7' in (old.path / "metrics.jsonl").read_text()
    new = begun(load("quickstart", [f"run.folder={tmp_path / 'run'}", "run.overwrite=true"]))
    new.write_metrics({"step": 1})
    new.close()
    assert sorted(path.name for path in new.path.iterdir()) == ["config.yaml", "metrics.jsonl", "rollouts.jsonl"]


def test_what_is_no_checkpoint_is_not_replaced_with_a_run(tmp_path) -> None:
    folder(tmp_path).close()
    (tmp_path / "run" / "checkpoints").mkdir()
    (tmp_path / "run" / "checkpoints" / "thesis.txt").touch()
    with pytest.raises(UserError, match=r"has others as well \(checkpoints/thesis.txt\)"):
        folder(tmp_path, "run.overwrite=true")


@pytest.mark.parametrize("overwrite", ["true", "false"])
def test_no_checkpoint_is_removed_by_a_run_that_is_to_resume(tmp_path, overwrite) -> None:
    folder(tmp_path).close()
    (tmp_path / "run" / "checkpoints" / "step-000050").mkdir(parents=True)  # whose manifest is gone
    options = ("resume=auto", f"run.overwrite={overwrite}")
    with pytest.raises(
        UserError, match=r"no checkpoint in .* is valid, and what is there \(step-000050\) is not removed"
    ):
        find_checkpoint(load("quickstart", [f"run.folder={tmp_path / 'run'}", *options]), print)
    with pytest.raises(UserError, match=r"is not removed|is not empty"):
        folder(tmp_path, *options)
    assert (tmp_path / "run" / "checkpoints" / "step-000050").exists()


@pytest.mark.parametrize("beside", [(), ("config.yaml", "metrics.jsonl")])
def test_overwrite_removes_runs_only(tmp_path, beside) -> None:
    (tmp_path / "run").mkdir()
    for name in ("thesis.tex", *beside):
        (tmp_path / "run" / name).write_text("years of work")
    for overrides in ((), ("run.overwrite=true",)):
        with pytest.raises(UserError, match=r"thesis\.tex|not empty"):
            folder(tmp_path, *overrides)
        assert sorted(entry.name for entry in (tmp_path / "run").iterdir()) == sorted(["thesis.tex", *beside])


def test_a_run_that_never_began_leaves_nothing(tmp_path) -> None:
    folder(tmp_path).close(discard=True)
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    folder(tmp_path).close(discard=True)
    assert list((tmp_path / "run").iterdir()) == []


def test_a_disk_without_room_for_a_run_is_left_as_it_was(tmp_path) -> None:
    config = load("quickstart", [f"run.folder={tmp_path / 'run'}"])
    expected = pytest.raises(UserError, match=r"config\.yaml cannot be written: File too large")
    with room_for(100), expected, Report(config, "test") as report:
        report.set_plan(config, None)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_is_removed_while_the_run_goes_on_is_said(tmp_path) -> None:
    run = folder(tmp_path)
    shutil.rmtree(run.path)
    with pytest.raises(UserError, match=r"metrics\.jsonl was moved or removed while the run wrote to it"):
        run.write_metrics({"step": 1})
    run.close(discard=True)
    assert not run.path.exists()


def test_what_shows_a_run_never_ends_it(tmp_path, capfd) -> None:
    """log.txt, TensorBoard and the output itself: each says once that it cannot go on."""
    said: list[str] = []
    log, record = LogFile(tmp_path / "gone" / "log.txt", said.append), logging.makeLogRecord({"msg": "hello"})
    full = LogFile(tmp_path / "log.txt", said.append)
    shown = Sinks(said.append)
    shown.open(load("quickstart"), tmp_path)
    with room_for(100), Path("/dev/full").open("w") as nowhere:
        for _ in range(3):
            log.handle(record)
            full.handle(logging.makeLogRecord({"msg": "a" * 200}))
            shown.log(1, {f"figure {number}": 0.5 for number in range(100)})
            Terminal(1, Console(file=FailsafeStdout(nowhere))).say("hello")
        full.close()
    assert [text.split(" (")[0] for text in said] == [
        "log.txt cannot be written",
        "log.txt cannot be written",
        "TensorBoard cannot be written",
    ]
    assert (
        capfd.readouterr().err
        == "the output cannot be written (No space left on device): the run continues without it\n"
    )


def test_a_place_that_cannot_be_written(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be created.*run.folder"):
        RunFolder(load("quickstart", [f"run.folder={tmp_path / 'file' / 'run'}"]))


@pytest.mark.parametrize(("place", "what"), [("taken", "is a folder"), (os.devnull, "is not an ordinary file")])
def test_completions_are_saved_to_files_only(tmp_path, place, what) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(UserError, match=rf"`rollout.save_to: .*` {what}: name a file"):
        folder(tmp_path, f"rollout.save_to={tmp_path / place}", "run.overwrite=true")
    assert [entry.name for entry in tmp_path.iterdir()] == ["taken"]


def test_saved_completions_are_kept_unless_told(tmp_path) -> None:
    file = tmp_path / "saved.jsonl"
    file.write_text('{"step": 1}\n')
    with pytest.raises(UserError, match=r"`rollout.save_to: .*saved.jsonl` is not empty.*run.overwrite=true"):
        folder(tmp_path, f"rollout.save_to={file}")
    assert not (tmp_path / "run").exists()
    folder(tmp_path, f"rollout.save_to={file}", "run.overwrite=true").close()
    file.write_text("years of work")
    with pytest.raises(UserError, match="a file that the run itself writes"):
        folder(tmp_path, f"rollout.save_to={tmp_path / 'run' / 'metrics.jsonl'}", "run.overwrite=true")
    with pytest.raises(UserError, match="a file that no run wrote"):
        folder(tmp_path, f"rollout.save_to={file}", "run.overwrite=true")
    assert file.read_text() == "years of work"
    file.write_text("")  # of a run that never began
    RunFolder(load("quickstart", [f"run.folder={tmp_path / 'other'}", f"rollout.save_to={file}"])).close()


def test_numbered_folders(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [RunFolder(load("quickstart")) for _ in range(3)]
    assert [str(run.path) for run in runs] == [f"runs/quickstart-00{i}" for i in (1, 2, 3)]


def test_model_text_is_shown_not_obeyed() -> None:
    assert printable("a\x1b[31mred\x07\u202e", 100) == "a\\x1b[31mred\\x07\\u202e"
    assert printable("é好", 100) == "é好"
    assert len(printable("x" * 500, 60)) < 70


def test_whatever_is_said_is_shown_not_obeyed() -> None:
    out = io.StringIO()
    terminal = Terminal(3, Console(file=out))
    terminal.say("writing to runs/\x1b]0;title\x07\x9b31m\ud800\nand on")
    terminal.table([["na\x1b[2Jme", "1"]])
    assert out.getvalue() == "writing to runs/\\x1b]0;title\\x07\\x9b31m\\ud800\nand on\n  na\\x1b[2Jme  1\n"


def test_markup_in_model_text_is_text() -> None:
    out = io.StringIO()
    Terminal(3, Console(file=out)).say("[bold]not bold[/bold] [link=x]y")
    assert out.getvalue().strip() == "[bold]not bold[/bold] [link=x]y"


def test_a_narrow_terminal_gets_the_figures_that_fit() -> None:
    metrics = {
        "seconds": 1.0,
        "reward": 0.5,
        "loss": 0.1,
        "entropy": 2.0,
        "mismatch": 1e-7,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "peak_gib": 1.0,
    }
    wide, narrow, piped = (io.StringIO() for _ in range(3))
    Terminal(10, Console(file=wide, width=200, force_terminal=True, no_color=True)).step_line(3, metrics)
    Terminal(10, Console(file=narrow, width=60, force_terminal=True, no_color=True)).step_line(3, metrics)
    Terminal(10, Console(file=piped, width=60, soft_wrap=True)).step_line(3, metrics)
    assert "lr" in wide.getvalue()
    assert "reward" in narrow.getvalue()
    assert "lr" not in narrow.getvalue()
    assert "lr" in piped.getvalue()


def test_step_line_leaves_out_what_there_is_not() -> None:
    out = io.StringIO()
    terminal = Terminal(10, Console(file=out, width=200))
    terminal.step_line(
        3, {"seconds": 1.234, "reward": 0.5, "samples_trained": 0, "score_failures/timeout": 2, "updates_skipped": 1}
    )
    line = out.getvalue()
    assert "step  3/10  1.23 s  reward 0.500" in line
    assert "2 samples could not be scored" in line
    assert "no update: no sample carries a signal" in line
    assert "1 updates skipped" in line
    assert "loss" not in line
