"""Starts the ranks of a run on this machine and waits for them: when one fails the others end too, and its error is the one that is shown. Imports no torch."""

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

from ebbtide.cluster.leash import LEASH, Failure, Job
from ebbtide.config.tree import Config
from ebbtide.errors import UserError
from ebbtide.stop import STOPPED, give_back, handled, in_order

GRACE = 5.0  # seconds for the others to end by themselves when one has failed
LAST_WORDS = 120.0  # seconds for the others when one has stopped as it was asked to: they were saved together, and one that still waits for another cannot hear
LAST_LINES = 20  # of what a rank said before it was killed
TICK = 1.0  # seconds between looks at ranks
STOPPED_LOOKS = 30
"""In which a rank may be found stopped in a row. Those that wait for it would find out after
`run.distributed_timeout_minutes`, each with an error of its own."""


def to_start(config: Config) -> int:
    """Ranks that this process is to start: none where it is one, or the only one."""
    if config.cluster is None or "WORLD_SIZE" in os.environ:
        return 0
    count = (config.cluster.ranks or 1) + config.cluster.rollout_gpus
    return count if count > 1 else 0


def launch(job: Job, count: int, say: Callable[[str], None]) -> int:
    """The exit code of a run of so many ranks; what a user can mend is raised."""
    with in_order(), tempfile.TemporaryDirectory(prefix="ebbtide-") as name:
        folder = Path(name)
        job.write(folder)
        started = _Started(folder, count)
        with _forwarded(started):
            code = started.wait()
        if code not in (0, STOPPED) and (failure := started.failure()) is not None:
            show(failure, count, say)
        return code


def show(failure: Failure, count: int, say: Callable[[str], None]) -> None:
    if failure.mendable:
        raise UserError(failure.text)
    say(f"rank {failure.rank} of {count} failed, and ended the run:\n{failure.text.rstrip()}")


def start_rank(folder: Path, environment: dict[str, str], leash: int, cwd: str | None = None) -> subprocess.Popen[bytes]:
    """One rank of the job in a folder. What others than the first say goes to a file there."""
    rank = environment["RANK"]
    path = os.pathsep.join(path for path in sys.path if path)
    with _log(folder, rank).open("wb") as log:
        return subprocess.Popen(  # noqa: S603
            [sys.executable, "-P", "-m", "ebbtide", "rank", str(folder)],
            env={**os.environ, "PYTHONPATH": path, **environment, LEASH: str(leash)},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=None if rank == "0" else log,
            stderr=None if rank == "0" else log,
            pass_fds=(leash,),
            start_new_session=True,  # a Ctrl-C reaches them once, from the one that started them
        )


def killed_by(folder: Path, rank: int, number: int, when: float) -> Failure:
    """Before whatever the others wrote down when they noticed: that is known at once, this when the system tells."""
    lines = _log(folder, str(rank)).read_text(errors="replace").splitlines()
    # Of one that died in a library: what it said before, and where each of its threads was, but not all that it had loaded.
    died = next((place for place, line in enumerate(lines) if line.startswith("Fatal Python error")), len(lines))
    lines = [*lines[max(0, died - LAST_LINES) : died], *(line for line in lines[died:] if not line.startswith("Extension modules"))]
    text = "\n".join([f"it was killed by signal {number} ({signal.Signals(number).name})", *lines])
    return Failure(rank, text, False, when - GRACE, lost=True)


def _log(folder: Path, rank: str) -> Path:
    return folder / f"rank-{rank}.log"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])


class Asked:
    """The signals that were passed on to ranks, and how long these may go on: after the second signal, or when one of them has ended, the others must end too."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self._end = math.inf

    def note(self, number: int) -> None:
        self.sent.append(number)
        if len(self.sent) > 1:
            self._at_most(GRACE)

    def ended(self, code: int) -> int:
        """A rank's exit code: one that had no chance to handle a signal has stopped as well."""
        code = STOPPED if -code in self.sent else code
        if code:
            self._at_most(LAST_WORDS if code == STOPPED else GRACE)
        return code

    @property
    def left(self) -> float:
        """Seconds."""
        return max(0.0, self._end - time.monotonic())

    def give_up(self) -> None:
        self._at_most(0.0)

    def _at_most(self, seconds: float) -> None:
        self._end = min(self._end, time.monotonic() + seconds)


class Looks:
    """At whether a rank is stopped (SIGSTOP), and not at a clock: what suspends a run stops this process too."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self._rank, self._process, self._stopped = rank, process, 0

    def failure(self) -> Failure | None:
        """Of a rank that has been stopped for too long; to be called once a tick."""
        try:
            found = os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # it has ended
            found = None
        self._stopped = self._stopped + 1 if found is not None else 0
        if self._stopped < STOPPED_LOOKS:
            return None
        text = (
            f"rank {self._rank} (process {self._process.pid}) was stopped (SIGSTOP) "
            f"and not continued (SIGCONT) within {STOPPED_LOOKS * TICK:g} s; "
            "the others wait for it, so the run has ended. Go on from its last checkpoint with `resume=auto`"
        )
        return Failure(self._rank, text, True, time.time())


class _Started:
    def __init__(self, folder: Path, count: int) -> None:
        self._folder = folder
        self._asked = Asked()
        self._ended: queue.Queue[tuple[int, int, float]] = queue.Queue()
        self._lost: list[Failure] = []
        leash, self._end = os.pipe()
        shared = {
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        if "OMP_NUM_THREADS" not in os.environ:
            shared["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // count))
        self._processes = [self._start(rank, shared, leash) for rank in range(count)]
        self._looks = [Looks(rank, process) for rank, process in enumerate(self._processes)]
        os.close(leash)

    def _start(self, rank: int, shared: dict[str, str], leash: int) -> subprocess.Popen[bytes]:
        process = start_rank(self._folder, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, leash)
        threading.Thread(target=lambda: self._ended.put((rank, process.wait(), time.time())), daemon=True).start()
        return process

    def wait(self) -> int:
        """The exit code of the first rank that failed, or 0."""
        going, code, killed = len(self._processes), 0, False
        while going:
            if not self._asked.left and not killed:
                killed = True
                for process in self._processes:
                    process.kill()
            try:
                rank, ended, when = self._ended.get(timeout=TICK)
            except queue.Empty:
                stopped = [failure for look in self._looks if (failure := look.failure()) is not None]
                if stopped and not code and not killed:
                    self._lost, code = stopped[:1], 2
                    self._asked.give_up()
                continue
            going -= 1
            ended = STOPPED if killed and self._asked.sent else self._asked.ended(ended)
            code = code or ended
            if ended < 0 and not killed:
                self._lost.append(killed_by(self._folder, rank, -ended, when))
        os.close(self._end)
        return code if code >= 0 else 1

    def failure(self) -> Failure | None:
        """The first one."""
        found = Failure.first(self._folder)
        return min([*self._lost, *([found] if found else [])], key=lambda one: one.when, default=None)

    def send(self, number: int) -> None:
        self._asked.note(number)
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)


@contextmanager
def _forwarded(started: _Started) -> Iterator[None]:
    """Ctrl-C and SIGTERM are the ranks' to handle: the step under way ends and is saved."""

    def forward(number: int, frame: FrameType | None) -> None:
        started.send(number)

    before = handled(forward)
    try:
        yield
    finally:
        give_back(before)
