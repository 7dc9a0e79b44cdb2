"""Checkpoints on disk. A checkpoint is a folder `step-000050`, which gets this name by a rename when all of it is
written and fsynced. An unfinished one has another name.
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

from ebbtide.checkpoint.contents import check_resumable
from ebbtide.checkpoint.manifest import (
    MANIFEST,
    CheckpointFiles,
    DamagedCheckpoint,
    FileDigest,
    Files,
    Manifest,
    digest,
)
from ebbtide.errors import UserError
from ebbtide.system.files import write_atomic, write_error

UNFINISHED = ".unfinished-"
COMPLETE = re.compile(r"step-([0-9]+)")
LOOKS = 20  # attempts to find a checkpoint that a running run does not remove meanwhile


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    bytes: int = 0
    damage: str | None = None
    """What is wrong with its manifest, if anything. Then its metrics and bytes are not known."""

    @classmethod
    def read(cls, path: Path, step: int) -> Checkpoint:
        try:
            manifest = CheckpointFiles(path).manifest
            if manifest.step != step:
                raise DamagedCheckpoint(path, f"{MANIFEST} is of step {manifest.step}")
        except DamagedCheckpoint as damage:
            return cls(path, step, damage=damage.why)
        return cls(path, step, manifest.metrics, sum(file.size for file in manifest.files.values()))

    def find_problem(self) -> str | None:
        """What is wrong with it, or None: reads all files, compares them with the manifest, and checks that a run can
        resume from them."""
        if self.damage is not None:
            return self.damage
        try:
            files = CheckpointFiles(self.path)
            files.verify()
            check_resumable(files)
        except DamagedCheckpoint as damage:
            return damage.why
        return None


def save_error(folder: Path, step: int, reason: object) -> UserError:
    return UserError(
        f"the checkpoint of step {step} could not be written to {folder}: {reason}."
        " Earlier ones are untouched: fix this, then resume from the last one with `resume`"
    )


def describe_error(error: BaseException) -> str:
    """The text of an error. For a full disk torch raises an error about an unexpected position, whose cause is the
    system's error: that one is shown."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return str(cause) if cause is not None else f"{type(error).__name__}: {error}"


def begin_checkpoint(folder: Path, step: int) -> Path:
    """Makes an empty folder to write a checkpoint to. A crash before `finish_checkpoint` never
    leaves a partial checkpoint."""
    unfinished = folder / f"{UNFINISHED}step-{step:06d}"
    folder.mkdir(exist_ok=True)  # without parents: a run's folder that was removed stays removed
    remove_unfinished(folder)  # frees the disk space of what was left unfinished before
    unfinished.mkdir()
    return unfinished


def finish_checkpoint(unfinished: Path, metrics: dict[str, float], known: Files) -> None:
    """Called when all files are written: lists them in the manifest, fsyncs them, and gives the folder its name."""
    folder, final = unfinished.parent, unfinished.parent / unfinished.name.removeprefix(UNFINISHED)
    files = dict(sorted((known | compute_digests(unfinished, "**/*", but=known)).items()))
    step = int(final.name.removeprefix("step-"))
    (unfinished / MANIFEST).write_bytes(_to_json(Manifest(step=step, metrics=metrics, files=files)))
    for path in (
        *(unfinished / name for name in files),
        unfinished / MANIFEST,
        *(path for path in unfinished.rglob("*") if path.is_dir()),
        unfinished,
    ):
        _sync(path)
    if final.exists():  # the same step again, after a resume: the new one is as good
        final.rename(folder / f"{UNFINISHED}replaced-{final.name}")
    unfinished.rename(final)
    _sync(folder)
    remove_unfinished(folder)


def _to_json(manifest: Manifest) -> bytes:
    """A manifest as strict JSON: a metric that is not finite is left out, and does not rank the checkpoint."""
    finite = {name: value for name, value in manifest.metrics.items() if isfinite(value)}
    return f"{manifest.model_copy(update={'metrics': finite}).model_dump_json(indent=1)}\n".encode()


def remove_unfinished(folder: Path) -> None:
    """Removes unfinished, replaced and pruned checkpoints."""
    for left in folder.glob(f"{UNFINISHED}*"):
        shutil.rmtree(left, ignore_errors=True)


def add_metrics(saved: Checkpoint, figures: dict[str, float]) -> None:
    """Adds metrics to a checkpoint's manifest, by which `prune` ranks it."""
    path = saved.path / MANIFEST
    manifest = CheckpointFiles(saved.path).manifest
    try:
        write_atomic(
            path, [_to_json(Manifest(step=manifest.step, metrics=manifest.metrics | figures, files=manifest.files))]
        )
    except OSError as error:
        raise write_error(path, error, "It is unchanged: make room there, and resume from it with `resume`") from None


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """The checkpoints in a folder, oldest first, with those whose manifest is damaged."""
    named = [(path, COMPLETE.fullmatch(path.name)) for path in folder.glob("step-*") if path.is_dir()]
    found = (Checkpoint.read(path, int(name[1])) for path, name in named if name)
    existing = (saved for saved in found if saved.damage is None or saved.path.is_dir())  # a running run removes some
    return sorted(existing, key=lambda saved: saved.step)


def prune(folder: Path, last: int, best: int, metric: str) -> None:
    """Removes all checkpoints but the newest `last` and the `best` by a metric, of which larger is better.

    Damaged ones are neither counted nor removed.
    """
    found = [saved for saved in list_checkpoints(folder) if saved.damage is None]
    ranked = sorted((saved for saved in found if metric in saved.metrics), key=lambda saved: saved.metrics[metric])
    kept = {saved.path for saved in (*found[-last:], *(ranked[-best:] if best else []))}
    for saved in found:
        if saved.path not in kept:
            pruned = folder / f"{UNFINISHED}old-{saved.path.name}"
            saved.path.rename(pruned)  # first, so that a half-removed checkpoint is never listed
            shutil.rmtree(pruned, ignore_errors=True)


def set_aside(folder: Path, after: int) -> list[Path]:
    """Renames the checkpoints after the step that a run resumes from, so that they are never listed or pruned, nor
    collide with those to come. Returns the new paths."""
    aside = []
    for path in sorted(folder.glob("step-*")):
        step = path.name.removeprefix("step-")
        if step.isdigit() and int(step) > after:
            names = (
                folder / f"aside-{path.name}{mark}"
                for mark in itertools.chain([""], (f".{n}" for n in itertools.count(2)))
            )
            aside.append(path.rename(next(name for name in names if not name.exists())))
    return aside


def newest_valid(look: Callable[[], Sequence[Checkpoint]], say: Callable[[str], None]) -> Checkpoint | None:
    """The newest valid checkpoint of those that `look` finds; prints which newer ones are damaged, and why.

    A checkpoint that is gone after it was read was removed by a running run, which has a newer one: then `look` is
    called again.
    """
    for _ in range(LOOKS):
        gone = False
        for index, saved in reversed(list(enumerate(look()))):
            problem = saved.find_problem()
            if problem is None:
                return saved
            if gone := not saved.path.is_dir():
                break
            then = "going back to the one before it" if index else "there is none before it"
            say(f"the checkpoint {saved.path} is damaged ({problem}): {then}")
        if not gone:
            break
    return None


def compute_digests(folder: Path, pattern: str, but: Container[str] = ()) -> Files:
    """The size and SHA-256 of the files of a pattern, without those in `but`."""
    names = [str(path.relative_to(folder)) for path in folder.glob(pattern) if path.is_file()]
    wanted = [name for name in names if name not in but]
    with ThreadPoolExecutor() as pool:
        found = pool.map(
            lambda name: FileDigest(size=(folder / name).stat().st_size, sha256=digest(folder / name)), wanted
        )
        return dict(zip(wanted, found, strict=True))


def _sync(path: Path) -> None:
    """Fsyncs a file's contents or a folder's entries."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
