"""The library as docs/api.md describes it: its script runs as it stands, and its names are there without torch."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ebbtide
from ebbtide.checkpoint.store import list_checkpoints
from patience import PATIENCE

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "api.md").read_text()


def python(*arguments: str, cwd: Path | None = None) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_script_of_the_page_runs_as_it_stands(tmp_path: Path) -> None:
    script = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[0]
    assert len(script.splitlines()) <= 40
    (tmp_path / "script.py").write_text(script)
    rewards = [float(found) for found in re.findall(r"reward (\S+),", python("script.py", cwd=tmp_path))]
    assert len(rewards) == 20
    assert sum(rewards[-5:]) > 1.3 * sum(rewards[:5])
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path / "runs" / "mine" / "checkpoints")] == [20]


@pytest.mark.slow
def test_the_functions_of_the_page_are_losses_that_a_config_can_name(tmp_path: Path) -> None:
    """The second block is a module with a loss, and a run uses it by name."""
    module = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[1]
    name, function = re.findall(r"`loss\.kind=(\w+):(\w+)`", PAGE)[0]
    (tmp_path / f"{name}.py").write_text(module)
    settings = ["train.steps=2", "evaluate=null", f"loss.kind={name}:{function}", "run.folder=run", "task.size=100"]
    python("-m", "ebbtide", "train", "quickstart", *settings, cwd=tmp_path)
    assert '"surprise":' in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_importing_the_package_imports_no_torch() -> None:
    loaded = python("-c", "import sys, ebbtide; print(dir(ebbtide)); print(*sys.modules)").splitlines()
    assert "'Worker'" in loaded[0]
    assert not {"torch", "pydantic", "ebbtide.config"} & set(loaded[1].split())


@pytest.mark.parametrize("name", ebbtide.__all__)
def test_every_exported_name_is_there_and_on_the_page(name: str) -> None:
    assert getattr(ebbtide, name).__name__ == name
    assert f"`{name}" in PAGE


def test_other_names_are_not_there() -> None:
    assert not hasattr(ebbtide, "worker_of_nothing")
