"""Ranks that the command starts, or joins: one report, the first error, and none that outlives the others."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from conftest import TINY, merged

HERE = Path(__file__).parent


def command(tmp_path, changes=None, *, start=("-m", "ebbtide")):
    """The process of a run of `train`."""
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(merged(TINY, {"run.folder": str(tmp_path / "run"), "checkpoint": None, **(changes or {})})))
    path = os.pathsep.join([str(HERE), *(entry for entry in sys.path if entry)])
    return subprocess.Popen(
        [sys.executable, *start, "train", str(file)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )


def steps(tmp_path) -> list[int]:
    return [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


def test_the_command_starts_ranks_and_one_of_them_reports(tmp_path) -> None:
    with command(tmp_path, {"cluster": {"gpus": 2}}) as process:
        out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert "2 ranks, each with one part in 2 of the model: data 2, tensor 1, replicate 1" in out
    assert out.count("step 1/2") == 1
    assert steps(tmp_path) == [1, 2]


def test_torchrun_starts_ranks_too(tmp_path) -> None:
    """Without a section in the config: its number of ranks is theirs."""
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ebbtide")
    with command(tmp_path, start=start) as process:
        out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert "2 ranks, each with one part in 2 of the model" in out
    assert out.count("step 1/2") == 1
    assert steps(tmp_path) == [1, 2]


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("raises", 1, "rank 1 of 2 failed, and ended the run:\nTraceback (most recent call last):"),
        ("killed", 1, "rank 1 of 2 failed, and ended the run:\nit was killed by signal 9 (SIGKILL)"),
        ("mendable", 2, "error: rank 1 wants other problems"),
    ],
)
def test_the_first_error_is_shown_and_ends_the_others(tmp_path, how, code, said) -> None:
    changes = {"cluster": {"gpus": 2}, "task": {"python": {"object": "rank_task:Ends", "options": {"how": how}}}}
    start = time.monotonic()
    with command(tmp_path, changes) as process:
        out, err = process.communicate(timeout=100)
    assert process.returncode == code, err
    assert said in err
    assert err.count("Traceback") == (how == "raises")
    assert ("rank 1 has had enough" in err) == (how == "raises")
    assert "step 1" not in out
    assert time.monotonic() - start < 60  # and not the minutes of a timeout
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or steps(tmp_path) == []
