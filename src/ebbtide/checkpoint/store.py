"""Checkpoints on disk. One is a folder `step-000050` that appears by a rename when all of it is written and synced; what is cut short stays under another name.

`manifest.json` in it has the size and the SHA-256 of every other file.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ebbtide.errors import UserError

MANIFEST = "manifest.json"
UNFINISHED = ".unfinished-"

Files = dict[str, dict[str, object]]
"""Name -> size and SHA-256."""


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint."""

    path: Path
    step: int
    metrics: dict[str, float]
    bytes: int

    def problem(self) -> str | None:
        """What is wrong with it, read whole and compared with its manifest; None if nothing is."""
        listed = json.loads((self.path / MANIFEST).read_text())["files"]
        with ThreadPoolExecutor() as pool:
            found = pool.map(lambda name: _difference(self.path / name, listed[name]), listed)
            return next((problem for problem in found if problem is not None), None)


def failed(folder: Path, step: int, reason: object) -> UserError:
    return UserError(f"the checkpoint of step {step} could not be written to {folder}: {reason}. Earlier ones are untouched")


def begin(folder: Path, step: int) -> Path:
    """An empty folder in which a checkpoint is made. A crash before `finish` leaves nothing that looks like one."""
    making = folder / f"{UNFINISHED}step-{step:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir()
    return making


def finish(making: Path, metrics: dict[str, float], known: Files) -> None:
    """All files are there: lists them, syncs them, and gives the folder its name."""
    folder, place = making.parent, making.parent / making.name.removeprefix(UNFINISHED)
    listed = dict(sorted((known | digests(making, "**/*", but=known)).items()))
    step = int(place.name.removeprefix("step-"))
    (making / MANIFEST).write_text(json.dumps({"step": step, "metrics": metrics, "files": listed}, indent=1) + "\n")
    for path in (*(making / name for name in listed), making / MANIFEST, *(path for path in making.rglob("*") if path.is_dir()), making):
        _sync(path)
    if place.exists():  # the same step again, after a resume: the new one is as good
        place.rename(folder / f"{UNFINISHED}replaced-{place.name}")
    making.rename(place)
    _sync(folder)
    for left in folder.glob(f"{UNFINISHED}*"):
        shutil.rmtree(left, ignore_errors=True)


def listed(folder: Path) -> list[Saved]:
    """The complete checkpoints in a folder, oldest first."""
    found = []
    for path in sorted(folder.glob("step-*")):
        try:
            manifest = json.loads((path / MANIFEST).read_text())
            found.append(Saved(path, manifest["step"], manifest["metrics"], sum(file["size"] for file in manifest["files"].values())))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # without a readable manifest it is none
    return sorted(found, key=lambda saved: saved.step)


def prune(folder: Path, last: int, best: int, metric: str) -> None:
    """Removes all but the newest `last` and the `best` by a metric, larger being better."""
    found = listed(folder)
    ranked = sorted((saved for saved in found if metric in saved.metrics), key=lambda saved: saved.metrics[metric])
    kept = {saved.path for saved in (*found[-last:], *(ranked[-best:] if best else []))}
    for saved in found:
        if saved.path not in kept:
            going = folder / f"{UNFINISHED}old-{saved.path.name}"
            saved.path.rename(going)  # first out of sight, so that half of one is never offered
            shutil.rmtree(going, ignore_errors=True)


def set_aside(folder: Path, after: int) -> list[Path]:
    """Those after a step that a run goes on from anew, under names that are no checkpoint's: never offered or pruned, nor in the way of those to come."""
    aside = []
    for path in sorted(folder.glob("step-*")):
        step = path.name.removeprefix("step-")
        if step.isdigit() and int(step) > after:
            names = (folder / f"aside-{path.name}{mark}" for mark in itertools.chain([""], (f".{n}" for n in itertools.count(2))))
            aside.append(path.rename(next(name for name in names if not name.exists())))
    return aside


def newest_sound(found: Sequence[Saved], say: Callable[[str], None]) -> Saved | None:
    """The newest checkpoint that is whole; says which newer ones are not, and why."""
    for saved in reversed(found):
        problem = saved.problem()
        if problem is None:
            return saved
        say(f"the checkpoint {saved.path} is damaged ({problem}): going back to the one before it")
    return None


def _difference(path: Path, listed: dict[str, object]) -> str | None:
    if not path.exists():
        return f"{path.name} is missing"
    if path.stat().st_size != listed["size"]:
        return f"{path.name} has {path.stat().st_size} bytes instead of {listed['size']}"
    return None if _digest(path) == listed["sha256"] else f"{path.name} has other contents than were written"


def digests(folder: Path, pattern: str, but: Container[str] = ()) -> Files:
    """Size and SHA-256 of files by a pattern."""
    names = [str(path.relative_to(folder)) for path in folder.glob(pattern) if path.is_file()]
    wanted = [name for name in names if name not in but]
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda name: {"size": (folder / name).stat().st_size, "sha256": _digest(folder / name)}, wanted)
        return dict(zip(wanted, found, strict=True))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """To the disk, contents or entries."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
