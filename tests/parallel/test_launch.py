"""Ranks that the command starts, or joins: one report, the first error, and none that outlives the others."""

import json
import math
import os
import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from conftest import TINY, merged
from ebbtide.checkpoint.store import list_checkpoints
from ebbtide.errors import UserError
from ebbtide.launch import ray as on_ray
from ebbtide.launch.job import Failure, Job
from ebbtide.launch.local import (
    SUSPENDED_CHECKS,
    ForwardedSignals,
    SuspendWatch,
    free_port,
    launch_locally,
    show_failure,
)
from patience import PATIENCE

HERE = Path(__file__).parent


def command(tmp_path, changes=None, *, start=("-m", "ebbtide"), **environment):
    """The process of a run of `train`."""
    file = tmp_path / "tiny.yaml"
    file.write_text(
        yaml.safe_dump(merged(TINY, {"run.folder": str(tmp_path / "run"), "checkpoint": None, **(changes or {})}))
    )
    path = os.pathsep.join([str(HERE), *(entry for entry in sys.path if entry)])
    return subprocess.Popen(
        [sys.executable, *start, "train", str(file)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )


def steps(tmp_path) -> list[int]:
    return [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_the_command_starts_ranks_that_stop_together_with_a_checkpoint(tmp_path) -> None:
    """SIGTERM to the command: each rank ends its step, and all save it."""
    changes = {"parallel": {"gpus": 2}, "train.steps": 100000, "checkpoint": {"every": None}, "report.samples_every": 0}
    with command(tmp_path, changes) as process:
        lines = []
        while not lines or not lines[-1].startswith("step "):
            lines.append(process.stdout.readline())
            assert lines[-1], process.stderr.read()
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, err
    assert "2 ranks, each with one part in 2 of the model: data 2, tensor 1, replicate 1\n" in lines
    assert out.count("stopping: this step is finished and saved first") == 1
    (saved,) = list_checkpoints(tmp_path / "run" / "checkpoints")
    assert f"stopped after step {saved.step} of 100000" in out
    assert steps(tmp_path) == list(range(1, saved.step + 1))


@pytest.mark.slow
def test_torchrun_starts_ranks_too(tmp_path) -> None:
    """Without a section in the config: its number of ranks is theirs."""
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ebbtide")
    with command(tmp_path, start=start) as process:
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    assert "2 ranks, each with one part in 2 of the model" in out
    assert len(re.findall(r"^step 1/2 ", out, re.MULTILINE)) == 1
    assert steps(tmp_path) == [1, 2]


FAILS = """
import os, sys; from datetime import timedelta
import torch, torch.distributed as dist
import ebbtide.launch.run_rank; from ebbtide.cli import main

def run_rank(job):
    rank = int(os.environ["RANK"])
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, rank == 0)
    group = dist.ProcessGroupGloo(store, rank, 2, timedelta(days=1))
    if rank == 1:
        sys.stdin.read()
    waits = group.broadcast(torch.zeros(1), 1)
    raise RuntimeError("it has waited for too long")

ebbtide.launch.run_rank.run_rank = run_rank
main()
"""


@pytest.mark.slow
def test_a_rank_that_another_started_ends_though_it_waits_for_one_that_hangs(tmp_path) -> None:
    def rank(number):
        (folder := tmp_path / number).mkdir()
        return command(
            folder, start=("-c", FAILS), RANK=number, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port
        )

    port = str(free_port())
    with rank("0") as fails, rank("1") as hangs:
        fails.wait(timeout=PATIENCE)
        assert hangs.poll() is None
        hangs.kill()
        assert fails.returncode == 1
        assert "RuntimeError: it has waited for too long" in fails.stderr.read()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("raises", 1, "rank 1 of 2 failed, and ended the run:\nTraceback (most recent call last):"),
        ("raises in a pass", 1, "rank 1 of 2 failed, and ended the run:\nTraceback (most recent call last):"),
        ("killed", 1, "rank 1 of 2 failed, and ended the run:\nit was killed by signal 9 (SIGKILL)"),
        ("aborts", 1, "rank 1 of 2 failed, and ended the run:\nit was killed by signal 6 (SIGABRT)"),
    ],
)
def test_the_first_error_is_shown_and_ends_the_others(tmp_path, how, code, said) -> None:
    changes = {
        "parallel": {"gpus": 2, "rollout_weights": "layerwise"},
        "run.distributed_timeout_minutes": 1000.0,  # none of them waits for it
        "task": {"python": {"object": "rank_task:Ends", "options": {"how": how}}},
    }
    with command(tmp_path, changes) as process:
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, err
    assert said in err
    assert err.count("Traceback") == how.startswith("raises")
    assert ("rank 1 has had enough" in err) == how.startswith("raises")
    # also of what dies in a library, the line that was in it is shown
    assert ("rank_task.py" in err) == (how != "killed")
    assert ("layerwise" in out) == (how == "raises in a pass")  # the table is shown as the first phase begins
    assert not re.search(r"^step 1", out, re.MULTILINE)  # only a sign of life may name it, further to the right
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or steps(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("deaf", [[1], [0, 1]])
def test_a_run_that_is_stopped_as_it_begins_ends_also_where_ranks_hear_nothing(tmp_path, deaf) -> None:
    os.mkfifo(tmp_path / "pipe")
    waits = {"object": "rank_task:Waits", "options": {"pipe": str(tmp_path / "pipe"), "deaf": deaf}}
    changes = {"parallel": {"gpus": 2}, "task": {"python": waits}}
    with command(tmp_path, changes) as process:
        while "the other waits: it does" not in (line := process.stdout.readline()):
            assert line, process.stderr.read()
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, err
    assert "failed" not in err


def test_how_long_ranks_may_go_on() -> None:
    def left(codes=(), signals=()) -> float:
        asked = ForwardedSignals()
        for number in signals:
            asked.record(number)
        for code in codes:
            assert asked.rank_ended(-code) == (130 if code in signals else -code)
        return asked.seconds_left

    assert left([0]) == left([0], [signal.SIGTERM]) == math.inf
    assert left([-130]) > 60  # its own deadline was near, or it heard the one signal
    assert left([signal.SIGTERM], [signal.SIGTERM]) > 60
    for soon in (
        left([-1]),
        left([-130, -1]),
        left([signal.SIGTERM]),
        left([signal.SIGKILL], [signal.SIGTERM]),
        left([], [signal.SIGTERM, signal.SIGINT]),
    ):
        assert soon < 20


def sleeping(*_) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "1000"])


def test_a_rank_that_is_stopped_ends_the_run_and_is_named(tmp_path, tiny, monkeypatch) -> None:
    ranks: list[subprocess.Popen[bytes]] = []

    def start(*_) -> subprocess.Popen[bytes]:
        ranks.append(sleeping())
        if len(ranks) == 2:
            ranks[1].send_signal(signal.SIGSTOP)
        return ranks[-1]

    monkeypatch.setattr("ebbtide.launch.local.start_rank", start)
    monkeypatch.setattr("ebbtide.launch.local.TICK", 0.01)
    with pytest.raises(UserError, match=r"rank 1 \(process \d+\) was stopped \(SIGSTOP\)"):
        launch_locally(Job("test", tiny(), None), 2, print)
    assert [rank.wait() for rank in ranks] == [-signal.SIGKILL] * 2


def test_a_rank_that_goes_on_in_time_is_left_alone() -> None:
    with sleeping() as rank:
        looks = SuspendWatch(1, rank)
        rank.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, rank.pid, os.WSTOPPED | os.WNOWAIT)
        assert [looks.failure() for _ in range(SUSPENDED_CHECKS - 1)] == [None] * (SUSPENDED_CHECKS - 1)
        rank.send_signal(signal.SIGCONT)
        os.waitid(os.P_PID, rank.pid, os.WCONTINUED | os.WNOWAIT)
        assert [looks.failure() for _ in range(SUSPENDED_CHECKS)] == [None] * SUSPENDED_CHECKS
        rank.kill()
        rank.wait()
        assert looks.failure() is None


def test_of_several_errors_the_first_is_shown_and_one_that_a_user_can_mend_as_such(tmp_path) -> None:
    for rank, when in ((0, 3.0), (1, 2.0), (2, 4.0)):
        Failure(rank, f"rank {rank} says so", rank == 1, when).write(tmp_path)
    first = Failure.read_first(tmp_path)
    assert first is not None
    with pytest.raises(UserError, match="rank 1 says so"):
        show_failure(first, 3, print)


def test_a_rank_hears_signals_that_its_starter_had_blocked(tmp_path, tiny) -> None:
    """As threads of Ray's have: what they start inherits it."""
    Job("test", tiny(), None).write(tmp_path)
    script = (
        "import os, signal, sys; from pathlib import Path; from ebbtide.launch.job import LAUNCHER_PIPE, read_job\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))\n"
        "os.environ |= {LAUNCHER_PIPE: str(os.pipe()[0]), 'RANK': '0'}\n"
        "with read_job(Path(sys.argv[1])): print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


def test_on_ray_a_run_takes_its_folder_before_a_rank_can_be_lost(tmp_path, tiny, monkeypatch) -> None:
    """What is there when it starts again is its own: nothing of an earlier run is taken for it, or removed."""
    jobs: list[Job] = []

    class Group(nullcontext):
        def __init__(self, *_: object) -> None:
            super().__init__(self)

        def run(self, job: Job) -> on_ray.Ended:
            jobs.append(job)
            return (1, Failure(1, "gone", False, 0.0, lost=True)) if len(jobs) == 1 else (0, None)

    monkeypatch.setattr(on_ray, "_connect", lambda *_: SimpleNamespace(shutdown=lambda: None))
    monkeypatch.setattr(on_ray, "_resources", lambda *_: {})
    monkeypatch.setattr(on_ray, "_Group", Group)
    config = tiny({"parallel": {"gpus": 2, "ray": "auto"}, "run.folder": str(tmp_path / "run")})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("an earlier run's")
    with pytest.raises(UserError, match="is not empty"):
        on_ray.launch_on_ray(Job("test", config, None), 2, print)
    assert not jobs
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "an earlier run's"

    overwriting = config.model_copy(update={"run": config.run.model_copy(update={"overwrite": True})})
    said: list[str] = []
    assert on_ray.launch_on_ray(Job("test", overwriting, None), 2, said.append) == 0
    assert said == ["rank 1 of 2 was lost (gone): restarting from the beginning, 3 restarts left"]
    assert [(job.resumed, job.config.run.folder) for job in jobs] == [(None, str(tmp_path / "run"))] * 2
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == ""


@pytest.mark.parametrize("lost", [False, True])
def test_on_ray_a_run_that_was_told_to_stop_does_not_start_again(lost, monkeypatch) -> None:
    """Ranks that hear nothing, and one that is lost meanwhile: either way it has stopped."""

    class Ray:
        exceptions = SimpleNamespace(RayActorError=ConnectionError)

        def wait(self, going, timeout):
            signal.raise_signal(signal.SIGTERM)
            return (going, []) if lost else ([], going)

        def get(self, one):
            raise ConnectionError("gone")

    group = object.__new__(on_ray._Group)
    group._ray, group._actors, group._signals = Ray(), [], ForwardedSignals()
    monkeypatch.setattr("ebbtide.launch.local.GRACE", 0.0)
    monkeypatch.setattr(group, "_start", lambda job, failures: {"its end": 0})
    assert group.run(None) == (130, None)
