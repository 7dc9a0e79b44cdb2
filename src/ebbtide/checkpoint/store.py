"""Checkpoints on disk. One is a folder `step-000050` that appears by a rename when all of it is written and synced.

What is cut short stays under another name.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections.abc import Callable, Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path

from ebbtide.checkpoint.contents import check
from ebbtide.checkpoint.manifest import MANIFEST, Damaged, File, Files, Listed, Manifest, digest
from ebbtide.errors import UserError
from ebbtide.files import unwritable, write_whole

UNFINISHED = ".unfinished-"
COMPLETE = re.compile(r"step-([0-9]+)")
LOOKS = 20  # at a folder in which a run goes on


@dataclass(frozen=True)
class Saved:
    """A checkpoint that has its name."""

    path: Path
    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    bytes: int = 0
    damage: str | None = None
    """What is wrong with its manifest; then nothing more is known of it."""

    @classmethod
    def at(cls, path: Path, step: int) -> Saved:
        try:
            manifest = Listed(path).manifest
            if manifest.step != step:
                raise Damaged(path, f"{MANIFEST} is of step {manifest.step}")
        except Damaged as damage:
            return cls(path, step, damage=damage.why)
        return cls(path, step, manifest.metrics, sum(file.size for file in manifest.files.values()))

    def problem(self) -> str | None:
        """What is wrong with it, read whole, compared with its manifest, and fit to go on from; None if nothing is."""
        if self.damage is not None:
            return self.damage
        try:
            files = Listed(self.path)
            files.compare()
            check(files)
        except Damaged as damage:
            return damage.why
        return None


def failed(folder: Path, step: int, reason: object) -> UserError:
    return UserError(
        f"the checkpoint of step {step} could not be written to {folder}: {reason}. "
        "Earlier ones are untouched: go on from the last with `resume` when that is mended"
    )


def why(error: BaseException) -> str:
    """In words. Of a full disk torch says that a position is unexpected: what the system said lies beneath."""
    beneath: BaseException | None = error
    while beneath is not None and not isinstance(beneath, OSError):
        beneath = beneath.__cause__ or beneath.__context__
    return str(beneath) if beneath is not None else f"{type(error).__name__}: {error}"


def begin(folder: Path, step: int) -> Path:
    """An empty folder in which a checkpoint is made. A crash before `finish` leaves nothing that looks like one."""
    making = folder / f"{UNFINISHED}step-{step:06d}"
    folder.mkdir(exist_ok=True)  # not its parents: a run's folder that was removed stays so
    clear(folder)  # what was cut short before gives its room
    making.mkdir()
    return making


def finish(making: Path, metrics: dict[str, float], known: Files) -> None:
    """All files are there: lists them, syncs them, and gives the folder its name."""
    folder, place = making.parent, making.parent / making.name.removeprefix(UNFINISHED)
    listed = dict(sorted((known | digests(making, "**/*", but=known)).items()))
    step = int(place.name.removeprefix("step-"))
    (making / MANIFEST).write_bytes(_written(Manifest(step=step, metrics=metrics, files=listed)))
    for path in (*(making / name for name in listed), making / MANIFEST, *(path for path in making.rglob("*") if path.is_dir()), making):
        _sync(path)
    if place.exists():  # the same step again, after a resume: the new one is as good
        place.rename(folder / f"{UNFINISHED}replaced-{place.name}")
    making.rename(place)
    _sync(folder)
    clear(folder)


def _written(manifest: Manifest) -> bytes:
    """As strict JSON: a metric that is not finite is left out, and says nothing of which checkpoint is best."""
    finite = {name: value for name, value in manifest.metrics.items() if isfinite(value)}
    return f"{manifest.model_copy(update={'metrics': finite}).model_dump_json(indent=1)}\n".encode()


def clear(folder: Path) -> None:
    """Removes what is no checkpoint, or none any more."""
    for left in folder.glob(f"{UNFINISHED}*"):
        shutil.rmtree(left, ignore_errors=True)


def add_metrics(saved: Saved, figures: dict[str, float]) -> None:
    """To those that a checkpoint was made with: `prune` goes by them."""
    path = saved.path / MANIFEST
    manifest = Listed(saved.path).manifest
    try:
        write_whole(path, [_written(Manifest(step=manifest.step, metrics=manifest.metrics | figures, files=manifest.files))])
    except OSError as error:
        raise unwritable(path, error, "It is as it was: make room there, and go on from it with `resume`") from None


def listed(folder: Path) -> list[Saved]:
    """The checkpoints in a folder, oldest first, and those whose manifest is damaged among them."""
    named = [(path, COMPLETE.fullmatch(path.name)) for path in folder.glob("step-*") if path.is_dir()]
    found = (Saved.at(path, int(name[1])) for path, name in named if name)
    there = (saved for saved in found if saved.damage is None or saved.path.is_dir())  # a run that goes on removes some
    return sorted(there, key=lambda saved: saved.step)


def prune(folder: Path, last: int, best: int, metric: str) -> None:
    """Removes all but the newest `last` and the `best` by a metric, larger being better.

    A damaged one is neither counted nor removed.
    """
    found = [saved for saved in listed(folder) if saved.damage is None]
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


def newest_sound(look: Callable[[], Sequence[Saved]], say: Callable[[str], None]) -> Saved | None:
    """The newest checkpoint that is whole, of those that `look` finds; says which newer ones are not, and why.

    One that is gone when it was read was removed by a run that goes on, and has a newer one: so it looks again.
    """
    for _ in range(LOOKS):
        gone = False
        for place, saved in reversed(list(enumerate(look()))):
            problem = saved.problem()
            if problem is None:
                return saved
            if gone := not saved.path.is_dir():
                break
            then = "going back to the one before it" if place else "there is none before it"
            say(f"the checkpoint {saved.path} is damaged ({problem}): {then}")
        if not gone:
            break
    return None


def digests(folder: Path, pattern: str, but: Container[str] = ()) -> Files:
    """Size and SHA-256 of files by a pattern."""
    names = [str(path.relative_to(folder)) for path in folder.glob(pattern) if path.is_file()]
    wanted = [name for name in names if name not in but]
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda name: File(size=(folder / name).stat().st_size, sha256=digest(folder / name)), wanted)
        return dict(zip(wanted, found, strict=True))


def _sync(path: Path) -> None:
    """To the disk, contents or entries."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
