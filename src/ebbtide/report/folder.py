"""The run folder: made, locked against a second run, and written line by line."""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from ebbtide.checkpoint.contents import read_tree
from ebbtide.checkpoint.manifest import Listed
from ebbtide.checkpoint.resume import FOLDER, anew_in, numbered, refuse_checkpoints
from ebbtide.checkpoint.store import UNFINISHED, Saved, set_aside
from ebbtide.config.document import resolved
from ebbtide.config.tree import Config
from ebbtide.errors import UserError
from ebbtide.files import made_as, unwritable, write_whole
from ebbtide.json_text import json_text
from ebbtide.steplog import add, complete, forget_after

LOCK = ".lock"
BEFORE = ".before"  # what a run replaces, until it has begun
METRICS, ROLLOUTS, VERSIONS = "metrics.jsonl", "rollouts.jsonl", "versions.jsonl"
SAVED = b'{"step": '  # how every line of `rollout.save_to` begins
HISTORY = "memory-history.pickle"
CHECKPOINTS = ("step-", "aside-step-", UNFINISHED)  # how all that a run puts there begins
FILES = ("config.yaml", METRICS, ROLLOUTS, VERSIONS, "plan.json", "report.html")
MAKING = {made_as(Path(name)).name for name in FILES}
CONTENTS = {*FILES, *MAKING, "tensorboard", "wandb", "checkpoints", "log.txt", HISTORY}


class RunFolder:
    """`config.yaml`, `metrics.jsonl`, `rollouts.jsonl`. One running process holds its lock."""

    def __init__(self, config: Config, resumed: Saved | None = None) -> None:
        self.aside: list[Path] = []
        """Checkpoints of steps that will be done again."""
        self._rollouts = config.report.rollouts
        anew = anew_in(config) if resumed is None else None
        same_file = resumed is not None and read_tree(Listed(resumed.path)).get("rollout", {}).get("save_to") == config.rollout.save_to
        _refuse_saved(config, goes_on=same_file or anew is not None)
        if resumed is not None:  # the run goes on in its own folder
            self.path, self._made = resumed.path.parent.parent, False
        else:
            self.path, self._made = (anew, False) if anew is not None else _make_folder(config)
            _refuse_what_is_there(self.path, config.run.overwrite or anew is not None)
            if config.resume is not None:
                refuse_checkpoints(self.path)
        if (save_to := config.rollout.save_to) is not None and Path(save_to).expanduser().resolve() in map(self._own, FILES):
            raise UserError(f"`rollout.save_to: {save_to}` is a file that the run itself writes: choose another")
        self._lock = _locked(self.path)
        try:
            self._begin(config, resumed)
        except (OSError, UserError) as error:
            with suppress(OSError):
                self.close(discard=resumed is None)
            raise _cannot_write(self.path, error) if isinstance(error, OSError) else error from None

    def _begin(self, config: Config, resumed: Saved | None) -> None:
        if resumed is not None:
            for name in (METRICS, ROLLOUTS):
                forget_after(self.path / name, resumed.step)
            self.aside = set_aside(resumed.path.parent, resumed.step)
        else:
            _put_by(self.path)
        self.write_config(config)
        for name in (METRICS, *([ROLLOUTS] if self._rollouts else [])):
            (self.path / name).touch()

    def _own(self, name: str) -> Path:
        return self.path.resolve() / name

    def write_config(self, config: Config) -> None:
        """Without the folder: run again, it goes to a folder of its own and never over this one."""
        elsewhere = config.run.model_copy(update={"folder": None, "overwrite": False})
        self._write("config.yaml", resolved(config.model_copy(update={"run": elsewhere, "resume": None})))

    @property
    def history(self) -> Path:
        """Where the allocator's history goes, should memory run out."""
        return self.path / HISTORY

    def write_plan(self, plan: dict[str, Any]) -> None:
        self._write("plan.json", json_text(plan, indent=1) + "\n")

    def write_start(self, line: dict[str, Any]) -> None:
        """What a process that begins or resumes the run has: one line for each."""
        (self.path / VERSIONS).touch()
        add(self.path / VERSIONS, [line])

    def _write(self, name: str, text: str) -> None:
        try:
            write_whole(self.path / name, [text.encode()])
        except OSError as error:
            raise unwritable(self.path / name, error, "Make room there, or set `run.folder` to another place") from None

    def write_metrics(self, line: dict[str, Any]) -> None:
        add(self.path / METRICS, [line])
        shutil.rmtree(self.path / BEFORE, ignore_errors=True)  # from now on this run takes its place

    def complete_metrics(self, step: int, figures: dict[str, float]) -> None:
        """Adds to the last step's line what was due in it when the run was stopped."""
        complete(self.path / METRICS, step, figures)

    def write_rollouts(self, lines: list[dict[str, Any]]) -> None:
        if self._rollouts:
            add(self.path / ROLLOUTS, lines)

    def close(self, discard: bool = False) -> None:
        """Lets go of the folder; `discard` takes back what this run made of it, when the run never began and the folder was new to it."""
        if discard:
            _remove_run(self.path)
            _bring_back(self.path)
        (self.path / LOCK).unlink(missing_ok=True)
        self._lock.close()
        if discard and self._made:
            with suppress(OSError):  # it was removed meanwhile, or a file was put into it
                self.path.rmdir()

    def leave(self) -> None:
        """Of a run that others began in it, and that took back what it had written: the folder goes too, where it was made for it."""
        if self._made and not any(self.path.iterdir()):
            self.path.rmdir()


def _refuse_saved(config: Config, *, goes_on: bool) -> None:
    """`rollout.save_to` is outside of the folder, and the same holds for it: only an empty file will do, or one that a run wrote and this one may replace or goes on in."""
    if config.rollout.save_to is None:
        return
    file, called = Path(config.rollout.save_to).expanduser(), f"`rollout.save_to: {config.rollout.save_to}`"
    try:
        if file.exists() and not file.is_file():
            raise UserError(f"{called} is {'a folder' if file.is_dir() else 'no ordinary file'}: name a file")
        begins = _beginning(file) if file.exists() else b""
    except OSError as error:
        raise UserError(f"{called} cannot be written: {error.strerror}. Name another file") from None
    if begins and not (goes_on or config.run.overwrite):
        raise UserError(
            f"{called} is not empty, and not the file that this run has written to: choose another one, or replace what is there "
            "with `run.overwrite=true`"
        )
    if begins and begins != SAVED:
        raise UserError(f"{called} is a file that no run wrote: choose another")


def _beginning(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(len(SAVED))


def _make_folder(config: Config) -> tuple[Path, bool]:
    """The run's folder, and whether it is new."""
    try:
        if config.run.folder is not None:
            folder = Path(config.run.folder).expanduser()
            new = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            return folder, new
        number = max(numbered(config.run.name).values(), default=0) + 1  # of two runs the newer one has the higher number
        while True:
            folder = Path("runs") / f"{config.run.name}-{number:03d}"
            folder.parent.mkdir(exist_ok=True)
            try:
                folder.mkdir()
                return folder, True
            except FileExistsError:
                number += 1
    except OSError as error:
        raise UserError(f"the run folder cannot be made: {error}. Set `run.folder` to a place you can write to") from None


def _refuse_what_is_there(folder: Path, overwrite: bool) -> None:
    """Nothing of the user's is touched: only an empty folder will do, or with `overwrite` one that holds a run and nothing else."""
    if (folder / LOCK).exists():
        _locked(folder).close()  # says so if that run is still going
    found = {entry.name for entry in folder.iterdir()} - {LOCK, BEFORE}
    if found and not overwrite:
        raise UserError(
            f"the run folder {folder} is not empty: choose another `run.folder`, or replace what is there with `run.overwrite=true`"
        )
    saved = {f"{FOLDER}/{entry.name}" for entry in (folder / FOLDER).glob("*") if not entry.name.startswith(CHECKPOINTS)}
    if foreign := sorted((found - CONTENTS) | saved):
        raise UserError(
            f"only a run is replaced, and {folder} holds other things as well ({', '.join(foreign[:3])}): choose another `run.folder`"
        )


def _put_by(folder: Path) -> None:
    """Clears the folder for a new run. The one that was there can be brought back until the new one has begun."""
    if (folder / BEFORE).is_dir():  # of a start that was killed: what is beside it is of that start
        _remove_run(folder)
        return
    for name in CONTENTS:
        if os.path.lexists(folder / name):
            (folder / BEFORE).mkdir(exist_ok=True)
            (folder / name).rename(folder / BEFORE / name)


def _bring_back(folder: Path) -> None:
    if (folder / BEFORE).is_dir():
        for entry in (folder / BEFORE).iterdir():
            entry.rename(folder / entry.name)
        (folder / BEFORE).rmdir()


def _remove_run(folder: Path) -> None:
    for name in CONTENTS:
        entry = folder / name
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)


def _locked(folder: Path) -> TextIOWrapper:
    try:
        lock = (folder / LOCK).open("w")
    except OSError as error:
        raise _cannot_write(folder, error) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise UserError(f"the run folder {folder} is in use by a run that is still going: choose another `run.folder`") from None
    return lock


def _cannot_write(folder: Path, error: OSError) -> UserError:
    fix = "Set `run.folder` to a place you can write to"
    return UserError(f"the run folder {folder} cannot be written to: {error}. {fix}")
