"""Between the one that starts ranks and each of them: what to do, what went wrong, and that neither outlives the other. Imports no torch."""

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

from ebbtide.checkpoint.store import Saved
from ebbtide.config.tree import Config, Rehearsal
from ebbtide.errors import UserError
from ebbtide.files import disk_full
from ebbtide.stop import SIGNALS, STOPPED, at_once

LEASH = "EBBTIDE_LEASH"
"""Names a pipe that ends with the one that started this rank."""


@dataclass(frozen=True)
class Job:
    """A run, as each rank is told of it."""

    source: str
    config: Config
    rehearsal: Rehearsal | None
    resumed: Saved | None = None
    """What it goes on from."""
    overrides: tuple[str, ...] = ()
    """Of a rehearsal: those that the run itself has."""

    def write(self, folder: Path) -> None:
        (folder / "job").write_bytes(pickle.dumps(self))

    @staticmethod
    def read(folder: Path) -> Job:
        job = pickle.loads((folder / "job").read_bytes())  # noqa: S301 (its own, in a folder of its own)
        assert isinstance(job, Job)
        return job


@dataclass(frozen=True)
class Failure:
    """What ended a rank."""

    rank: int
    text: str
    mendable: bool
    """By the user: the text says how."""
    when: float
    lost: bool = False
    """Its process, or its machine, is gone: not by an error of its own."""

    def write(self, folder: Path) -> None:
        made = folder / f".failure-{self.rank}"
        made.write_text(json.dumps([self.rank, self.text, self.mendable, self.when]))
        made.rename(folder / f"failure-{self.rank}.json")

    @staticmethod
    def first(folder: Path) -> Failure | None:
        found = [Failure(*json.loads(path.read_text())) for path in folder.glob("failure-*.json")]
        return min(found, key=lambda one: one.when, default=None)


@contextmanager
def told(folder: Path) -> Iterator[Job]:
    """What this rank is to do. What goes wrong is written down and not shown: of all ranks' errors, only the first is the cause."""
    at_once()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # a thread of Ray's that starts a rank has them blocked
    threading.Thread(target=_end_with, args=(int(os.environ[LEASH]),), daemon=True).start()
    rank = int(os.environ["RANK"])
    try:
        with disk_full():
            yield Job.read(folder)
    except KeyboardInterrupt:
        sys.exit(STOPPED)
    except UserError as error:
        Failure(rank, str(error), True, time.time()).write(folder)
        sys.exit(2)
    except Exception:  # noqa: BLE001 (shown by the one that started this rank)
        Failure(rank, traceback.format_exc(), False, time.time()).write(folder)
        leave()


def leave() -> NoReturn:
    """At once: threads that wait for other ranks would hold a rank that has failed."""
    sys.stdout.flush()
    os._exit(1)


def _end_with(leash: int) -> None:
    os.read(leash, 1)  # nothing is ever written: it returns when the other end is gone
    os._exit(1)
