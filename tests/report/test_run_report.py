"""What a run's report writes and shows: one config, written once it is decided; notes in order; and nothing on the
ranks other than rank 0."""

import inspect

import pytest
import torch
import yaml

from ebbtide.algorithms.loop import train
from ebbtide.checkpoint.store import list_checkpoints
from ebbtide.errors import UserError
from ebbtide.planner.host_memory import COPIES
from ebbtide.report.folder import RunFolder
from ebbtide.report.null_report import NullReport
from ebbtide.report.protocol import RankReport
from ebbtide.report.report import Report

# Host memory for nothing: saves cannot copy, and the run decides to write them synchronously.
NO_COPIES = {"memory.host_budget_gib": 1e-6, "checkpoint": {"every": 1, "async_save": True}, "train.steps": 1}
SYNCHRONOUS = "checkpoints are written synchronously, while the loop waits"


def test_config_yaml_is_written_once_and_is_that_of_the_checkpoint(tiny, tmp_path, monkeypatch) -> None:
    written = []
    write_config = RunFolder.write_config
    monkeypatch.setattr(
        RunFolder, "write_config", lambda self, config: written.append(config) or write_config(self, config)
    )
    config = tiny({**NO_COPIES, "run.folder": str(tmp_path / "run")})
    with Report(config, "test") as report:
        train(config, report)
    assert len(written) == 1
    in_folder = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert in_folder["checkpoint"]["async_save"] is False
    (saved,) = list_checkpoints(tmp_path / "run" / "checkpoints")
    in_checkpoint = yaml.safe_load((saved.path / "config.yaml").read_text())
    # A run that is started from the folder's config gets a folder of its own.
    assert in_checkpoint["run"].pop("folder") == str(tmp_path / "run")
    assert in_folder["run"].pop("folder", None) is None
    assert in_folder == in_checkpoint


def test_a_folder_has_no_config_before_everything_is_decided(tiny, tmp_path, monkeypatch) -> None:
    config = tiny({"run.folder": str(tmp_path / "run")})
    monkeypatch.setattr("ebbtide.worker.fit_to_host", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError), Report(config, "test") as report:
        train(config, report)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["metrics.jsonl", "rollouts.jsonl"]


def test_notes_follow_what_the_run_is_in_the_order_in_which_they_were_made(tiny, tmp_path, capsys, monkeypatch) -> None:
    def no_room_for_copies(needs: dict[str, int], *_: object, **__: object) -> None:
        if COPIES in needs:
            raise UserError("no room")

    monkeypatch.setattr("ebbtide.planner.host_memory.check_host_budget", no_room_for_copies)
    changes = {
        "checkpoint": {"every": 1, "async_save": True},
        "memory.budget_gib": 1.0,
        "memory.activations": {"preset": "recompute"},
        "optimizer.place": "cpu",
        "train.steps": 1,
        "run.folder": str(tmp_path / "run"),
    }
    config = tiny(changes)
    with Report(config, "test") as report:
        train(config, report)
        report.note("a note at the end")
    lines = capsys.readouterr().out.splitlines()
    starts = ("test: ", "plan: ", SYNCHRONOUS, "the CPU steps", "activations: ", "step 1/1", "a note at the end")
    places = [next(number for number, line in enumerate(lines) if line.startswith(start)) for start in starts]
    assert places == sorted(places)


def test_other_ranks_run_the_same_and_leave_nothing(tiny, tmp_path, capsys) -> None:
    config = tiny({"checkpoint": None, "evaluate": {"every": 2, "problems": 4}, "run.folder": str(tmp_path / "run")})
    with Report(config, "test") as report:
        policy = train(config, report)
    capsys.readouterr()
    with NullReport(tmp_path / "elsewhere") as null:
        other = train(config, null)
    assert capsys.readouterr().out == ""
    assert (null.steps_done, null.has_begun) == (report.steps_done, report.has_begun) == (2, True)
    assert not (tmp_path / "elsewhere").exists()
    weights = other.model.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in policy.model.state_dict().items())


def test_both_reports_have_all_that_is_called_on_them(tiny, tmp_path) -> None:
    """mypy checks the types; this checks that neither inherits from the other, so that none is half built."""
    assert not issubclass(NullReport, Report)
    names = {name for name in vars(RankReport) if not name.startswith("_")}
    assert {"note", "warn", "phase", "step", "path"} <= names
    with Report(tiny({"run.folder": str(tmp_path / "run")}), "test") as report:
        for made in (report, NullReport(tmp_path)):
            assert {name for name in names if not hasattr(made, name)} == set()
    for name in names:
        method = getattr(RankReport, name)
        if inspect.isfunction(method):
            wanted = list(inspect.signature(method).parameters)
            for kind in (Report, NullReport):
                assert list(inspect.signature(getattr(kind, name)).parameters) == wanted, (kind, name)
