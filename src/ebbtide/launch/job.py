"""What passes between the launcher and each rank: the job, the failure that ended a rank, and a pipe that ends the rank
with the launcher. Imports no torch."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ebbtide.checkpoint.store import Checkpoint
from ebbtide.config.root import Config
from ebbtide.config.train import Rehearsal
from ebbtide.errors import UserError
from ebbtide.system.files import user_error_on_full_disk
from ebbtide.system.signals import SIGNALS, STOPPED, exit_on_signal

LAUNCHER_PIPE = "EBBTIDE_LAUNCHER_PIPE"
"""The environment variable with the file descriptor of a pipe that closes when the launcher of this rank ends."""


@dataclass(frozen=True)
class Job:
    """A run, as the launcher passes it to each rank."""

    source: str
    config: Config
    rehearsal: Rehearsal | None
    resumed: Checkpoint | None = None
    """The checkpoint to resume from."""
    overrides: tuple[str, ...] = ()
    """For a rehearsal, the overrides of the run that is rehearsed."""

    def write(self, folder: Path) -> None:
        (folder / "job").write_bytes(pickle.dumps(self))

    @staticmethod
    def read(folder: Path) -> Job:
        job = pickle.loads((folder / "job").read_bytes())  # noqa: S301 (our own file, in a folder of our own)
        assert isinstance(job, Job)
        return job


@dataclass(frozen=True)
class Failure:
    """The failure that ended a rank."""

    rank: int
    text: str
    user_can_fix: bool
    """Whether the user can fix it; then the text says how."""
    when: float
    lost: bool = False
    """Whether the rank's process or its machine is gone, without an error from the rank itself."""

    def write(self, folder: Path) -> None:
        unfinished = folder / f".failure-{self.rank}"
        unfinished.write_text(json.dumps([self.rank, self.text, self.user_can_fix, self.when]))
        unfinished.rename(folder / f"failure-{self.rank}.json")

    @staticmethod
    def read_first(folder: Path) -> Failure | None:
        """The first failure that a rank wrote to the folder."""
        found = [Failure(*json.loads(path.read_text())) for path in folder.glob("failure-*.json")]
        return min(found, key=lambda one: one.when, default=None)


@contextmanager
def read_job(folder: Path) -> Iterator[Job]:
    """The job of this rank, for the length of the context. An error in it is written to the folder and not printed: of
    all ranks' errors, only the first is the cause."""
    exit_on_signal()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # they are blocked in the thread of Ray that starts a rank
    threading.Thread(target=_end_with_launcher, args=(int(os.environ[LAUNCHER_PIPE]),), daemon=True).start()
    rank = int(os.environ["RANK"])
    try:
        with user_error_on_full_disk():
            yield Job.read(folder)
    except KeyboardInterrupt:
        sys.exit(STOPPED)
    except UserError as error:
        Failure(rank, str(error), True, time.time()).write(folder)
        sys.exit(2)
    except Exception:  # noqa: BLE001 (the launcher shows it)
        Failure(rank, traceback.format_exc(), False, time.time()).write(folder)
        exit_now()


def exit_now() -> NoReturn:
    """Exits at once: threads that wait for other ranks would keep a failed rank alive."""
    sys.stdout.flush()
    os._exit(1)


def _end_with_launcher(pipe: int) -> None:
    """Waits for the launcher to end, and then ends this process."""
    os.read(pipe, 1)  # nothing is ever written: this returns when the launcher has ended
    os._exit(1)
