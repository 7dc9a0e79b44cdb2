"""Starts the ranks of a run on this machine and waits for them. When one fails, the others end too, and only the first
error is shown. Imports no torch."""

from __future__ import annotations

import math
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from ebbtide.config.root import Config
from ebbtide.errors import UserError
from ebbtide.launch.job import LAUNCHER_PIPE, Failure, Job
from ebbtide.system.signals import STOPPED, install_handlers, interrupt_on_signal, restore_handlers

GRACE = 5.0  # seconds for the other ranks to end by themselves when one has failed
# Seconds for the other ranks when one has stopped after a signal: they save together, and a rank that still waits for
# another cannot handle the signal.
STOP_GRACE = 120.0
LAST_LINES = 20  # lines that are shown of a rank's output before it was killed
TICK = 1.0  # seconds between checks of the ranks
SUSPENDED_CHECKS = 30
"""After so many checks in a row that find a rank suspended (SIGSTOP), the run ends. The ranks that wait for it would
notice only after `run.distributed_timeout_minutes`, each with another error."""


def ranks_to_start(config: Config) -> int:
    """The number of ranks that this process has to start: 0 if it is a rank itself, or the only one."""
    if config.parallel is None or "WORLD_SIZE" in os.environ:
        return 0
    count = (config.parallel.ranks or 1) + config.parallel.rollout_gpus
    return count if count > 1 else 0


def launch_locally(job: Job, count: int, say: Callable[[str], None]) -> int:
    """Runs a job with `count` ranks and returns its exit code; a failure that the user can fix is raised."""
    with interrupt_on_signal(), tempfile.TemporaryDirectory(prefix="ebbtide-") as name:
        folder = Path(name)
        job.write(folder)
        ranks = _LocalRanks(folder, count)
        with _forward_signals(ranks):
            code = ranks.wait()
        if code not in (0, STOPPED) and (failure := ranks.failure()) is not None:
            show_failure(failure, count, say)
        return code


def show_failure(failure: Failure, count: int, say: Callable[[str], None]) -> None:
    """Raises a failure that the user can fix, and prints any other."""
    if failure.user_can_fix:
        raise UserError(failure.text)
    say(f"rank {failure.rank} of {count} failed, and ended the run:\n{failure.text.rstrip()}")


def start_rank(folder: Path, environment: dict[str, str], pipe: int, cwd: str | None = None) -> subprocess.Popen[bytes]:
    """Starts one rank of the job in a folder; the rank ends when the other end of `pipe` closes. The output of ranks
    other than 0 goes to a file in the folder."""
    rank = environment["RANK"]
    path = os.pathsep.join(path for path in sys.path if path)
    with _log(folder, rank).open("wb") as log:
        return subprocess.Popen(  # noqa: S603
            [sys.executable, "-P", "-m", "ebbtide", "rank", str(folder)],
            env={**os.environ, "PYTHONPATH": path, **environment, LAUNCHER_PIPE: str(pipe)},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=None if rank == "0" else log,
            stderr=None if rank == "0" else log,
            pass_fds=(pipe,),
            start_new_session=True,  # a Ctrl-C reaches each rank once, through the launcher
        )


def killed_failure(folder: Path, rank: int, number: int, when: float) -> Failure:
    """The failure of a rank that was killed by a signal. It is dated `GRACE` seconds back, so that it comes before the
    failures of ranks that noticed: those are written at once, this one when the system reports it."""
    lines = _log(folder, str(rank)).read_text(errors="replace").splitlines()
    # Of a rank that died in a library, this shows its output before that and where each of its threads was, but not the
    # list of loaded modules.
    died = next((index for index, line in enumerate(lines) if line.startswith("Fatal Python error")), len(lines))
    lines = [
        *lines[max(0, died - LAST_LINES) : died],
        *(line for line in lines[died:] if not line.startswith("Extension modules")),
    ]
    text = "\n".join([f"it was killed by signal {number} ({signal.Signals(number).name})", *lines])
    return Failure(rank, text, False, when - GRACE, lost=True)


def _log(folder: Path, rank: str) -> Path:
    return folder / f"rank-{rank}.log"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])


class ForwardedSignals:
    """The signals that were forwarded to the ranks, and the time that these have left: after the second signal, or when
    one rank has ended, the others must end too."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self._deadline = math.inf

    def record(self, number: int) -> None:
        self.sent.append(number)
        if len(self.sent) > 1:
            self._at_most(GRACE)

    def rank_ended(self, code: int) -> int:
        """Notes that a rank has ended, and returns its exit code: a rank that died of a forwarded signal counts as
        stopped."""
        code = STOPPED if -code in self.sent else code
        if code:
            self._at_most(STOP_GRACE if code == STOPPED else GRACE)
        return code

    @property
    def seconds_left(self) -> float:
        """The seconds that ranks may still run."""
        return max(0.0, self._deadline - time.monotonic())

    def give_up(self) -> None:
        self._at_most(0.0)

    def _at_most(self, seconds: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + seconds)


class SuspendWatch:
    """Counts the checks that find a rank suspended (SIGSTOP). It counts checks and not seconds, because whatever
    suspends a whole run suspends this process too."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self._rank, self._process, self._suspended_checks = rank, process, 0

    def failure(self) -> Failure | None:
        """The failure of a rank that has been suspended for too long; called once every `TICK`."""
        try:
            found = os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # the rank has ended
            found = None
        self._suspended_checks = self._suspended_checks + 1 if found is not None else 0
        if self._suspended_checks < SUSPENDED_CHECKS:
            return None
        text = (
            f"rank {self._rank} (process {self._process.pid}) was stopped (SIGSTOP)"
            f" and not continued (SIGCONT) within {SUSPENDED_CHECKS * TICK:g} s;"
            " the others wait for it, so the run has ended. Resume from its last checkpoint with `resume=auto`"
        )
        return Failure(self._rank, text, True, time.time())


class _LocalRanks:
    """The running ranks of a job on this machine."""

    def __init__(self, folder: Path, count: int) -> None:
        self._folder = folder
        self._signals = ForwardedSignals()
        self._ended: queue.Queue[tuple[int, int, float]] = queue.Queue()
        self._lost: list[Failure] = []
        pipe, self._pipe_end = os.pipe()
        shared = {
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        if "OMP_NUM_THREADS" not in os.environ:
            shared["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // count))
        self._processes = [self._start(rank, shared, pipe) for rank in range(count)]
        self._watches = [SuspendWatch(rank, process) for rank, process in enumerate(self._processes)]
        os.close(pipe)

    def _start(self, rank: int, shared: dict[str, str], pipe: int) -> subprocess.Popen[bytes]:
        process = start_rank(self._folder, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, pipe)
        threading.Thread(target=lambda: self._ended.put((rank, process.wait(), time.time())), daemon=True).start()
        return process

    def wait(self) -> int:
        """The exit code of the first rank that failed, or 0."""
        running, code, killed = len(self._processes), 0, False
        while running:
            if not self._signals.seconds_left and not killed:
                killed = True
                for process in self._processes:
                    process.kill()
            try:
                rank, ended, when = self._ended.get(timeout=TICK)
            except queue.Empty:
                stopped = [failure for watch in self._watches if (failure := watch.failure()) is not None]
                if stopped and not code and not killed:
                    self._lost, code = stopped[:1], 2
                    self._signals.give_up()
                continue
            running -= 1
            ended = STOPPED if killed and self._signals.sent else self._signals.rank_ended(ended)
            code = code or ended
            if ended < 0 and not killed:
                self._lost.append(killed_failure(self._folder, rank, -ended, when))
        os.close(self._pipe_end)
        return code if code >= 0 else 1

    def failure(self) -> Failure | None:
        """The first failure of a rank."""
        found = Failure.read_first(self._folder)
        return min([*self._lost, *([found] if found else [])], key=lambda one: one.when, default=None)

    def send(self, number: int) -> None:
        self._signals.record(number)
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)


@contextmanager
def _forward_signals(ranks: _LocalRanks) -> Iterator[None]:
    """Forwards Ctrl-C and SIGTERM to the ranks, which finish and save the step under way."""

    def forward(number: int, frame: FrameType | None) -> None:
        ranks.send(number)

    before = install_handlers(forward)
    try:
        yield
    finally:
        restore_handlers(before)
