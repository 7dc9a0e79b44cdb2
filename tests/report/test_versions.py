"""What a run says that it ran with."""

import json
import subprocess
from importlib import metadata

import pytest
import torch

from ebbtide import __version__
from ebbtide.algorithms.loop import train
from ebbtide.report.report import Report
from ebbtide.report.versions import checkout_commit, find_commit


def git(folder, *arguments: str) -> str:
    who = ["-c", "user.name=someone", "-c", "user.email=someone@example.com"]
    return subprocess.run(
        ["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_a_run_writes_what_it_started_with(tiny, tmp_path) -> None:
    config = tiny({"run.folder": str(tmp_path / "run"), "train.steps": 1})
    with Report(config, "test") as report:
        train(config, report)
    (line,) = (json.loads(line) for line in (tmp_path / "run" / "versions.jsonl").read_text().splitlines())
    assert line["step"] == 0
    assert line["ebbtide"] == __version__
    assert (line["torch"], line["transformers"]) == (torch.__version__, metadata.version("transformers"))
    assert "cores" in line["device"]
    assert line["time"].endswith("+00:00")


def test_the_commit_is_that_of_the_checkout_which_tracks_the_package(tmp_path) -> None:
    package = tmp_path / "src" / "ebbtide"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    git(tmp_path, "init", "-q")
    assert checkout_commit(package) is None  # it lies in somebody's repository and is no part of it
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert checkout_commit(package) == head
    (package / "__init__.py").write_text("changed = True")
    assert checkout_commit(package) == f"{head} with changes"


@pytest.mark.parametrize("told", ["{}", '{"vcs_info": {"commit_id": "abc123"}}'])
def test_the_commit_that_pip_installed_comes_first(monkeypatch, told) -> None:
    class Installed:
        def read_text(self, name: str) -> str:
            return told

    monkeypatch.setattr("ebbtide.report.versions.metadata.distribution", lambda name: Installed())
    monkeypatch.setattr("ebbtide.report.versions.checkout_commit", lambda package: "of the checkout")
    assert find_commit() == ("abc123" if "abc123" in told else "of the checkout")
