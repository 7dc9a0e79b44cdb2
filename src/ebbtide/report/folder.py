"""The run folder: creates it, locks it against a second run, and writes its files line by line."""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from ebbtide.checkpoint.contents import read_tree
from ebbtide.checkpoint.manifest import CheckpointFiles
from ebbtide.checkpoint.resume import FOLDER, REPLACED, numbered_runs, refuse_checkpoints, restart_folder
from ebbtide.checkpoint.store import UNFINISHED, Checkpoint, set_aside
from ebbtide.config.document import to_yaml
from ebbtide.config.root import Config
from ebbtide.errors import UserError
from ebbtide.system.files import temporary_path, write_atomic, write_error
from ebbtide.system.json_text import json_text
from ebbtide.system.jsonl import append_lines, complete_line, drop_lines_after

LOCK = ".lock"
METRICS, ROLLOUTS, VERSIONS = "metrics.jsonl", "rollouts.jsonl", "versions.jsonl"
SAVED_ROLLOUT = b'{"step": '  # every line of a `rollout.save_to` file starts with this
HISTORY = "memory-history.pickle"
CHECKPOINT_PREFIXES = ("step-", "aside-step-", UNFINISHED)  # of everything that a run puts into checkpoints/
FILES = ("config.yaml", METRICS, ROLLOUTS, VERSIONS, "plan.json", "report.html")
TEMPORARY = {temporary_path(Path(name)).name for name in FILES}
CONTENTS = {*FILES, *TEMPORARY, "tensorboard", "wandb", "checkpoints", "log.txt", HISTORY}


class RunFolder:
    """The folder of one run: `config.yaml`, `metrics.jsonl`, `rollouts.jsonl` and more. One process holds its lock."""

    def __init__(self, config: Config, resumed: Checkpoint | None = None) -> None:
        self.set_aside_checkpoints: list[Path] = []
        """Later checkpoints that a resumed run has renamed, as it does their steps again."""
        self._rollouts = config.report.rollouts and "generate" in config.cycle
        restarted = restart_folder(config) if resumed is None else None
        same_file = (
            resumed is not None
            and read_tree(CheckpointFiles(resumed.path)).get("rollout", {}).get("save_to") == config.rollout.save_to
        )
        _check_save_to(config, may_continue=same_file or restarted is not None)
        if resumed is not None:  # the run continues in its own folder
            self.path, self._made = resumed.path.parent.parent, False
        else:
            self.path, self._made = (restarted, False) if restarted is not None else _make_folder(config)
            _check_replaceable(self.path, config.run.overwrite or restarted is not None)
            if config.resume is not None:
                refuse_checkpoints(self.path)
        if (save_to := config.rollout.save_to) is not None and Path(save_to).expanduser().resolve() in map(
            self._resolved, FILES
        ):
            raise UserError(f"`rollout.save_to: {save_to}` is a file that the run itself writes: choose another path")
        self._lock = _lock_folder(self.path)
        try:
            self._begin(resumed)
        except (OSError, UserError) as error:
            with suppress(OSError):
                self.close(discard=resumed is None)
            raise _cannot_write(self.path, error) if isinstance(error, OSError) else error from None

    def _begin(self, resumed: Checkpoint | None) -> None:
        if resumed is not None:
            for name in (METRICS, ROLLOUTS):
                drop_lines_after(self.path / name, resumed.step)
            self.set_aside_checkpoints = set_aside(resumed.path.parent, resumed.step)
        else:
            _set_replaced_aside(self.path)
        for name in (METRICS, *([ROLLOUTS] if self._rollouts else [])):
            (self.path / name).touch()

    def _resolved(self, name: str) -> Path:
        return self.path.resolve() / name

    def write_config(self, config: Config) -> None:
        """Writes config.yaml, once everything in it is decided. It has no `run.folder`: a run that is started from it
        gets a new folder and never overwrites this one."""
        run = config.run.model_copy(update={"folder": None, "overwrite": False})
        self._write("config.yaml", to_yaml(config.model_copy(update={"run": run, "resume": None})))

    @property
    def history(self) -> Path:
        """The file for the allocator's history, written if memory runs out."""
        return self.path / HISTORY

    def write_plan(self, plan: dict[str, Any]) -> None:
        self._write("plan.json", json_text(plan, indent=1) + "\n")

    def write_versions(self, line: dict[str, Any]) -> None:
        """Adds a line to versions.jsonl for a process that starts or resumes the run."""
        (self.path / VERSIONS).touch()
        append_lines(self.path / VERSIONS, [line])

    def _write(self, name: str, text: str) -> None:
        try:
            write_atomic(self.path / name, [text.encode()])
        except OSError as error:
            raise write_error(
                self.path / name, error, "Free space there, or set `run.folder` to another place"
            ) from None

    def write_metrics(self, line: dict[str, Any]) -> None:
        append_lines(self.path / METRICS, [line])
        shutil.rmtree(self.path / REPLACED, ignore_errors=True)  # from now on this run replaces the old one

    def complete_metrics(self, step: int, figures: dict[str, float]) -> None:
        """Adds the evaluation that the last step lacked when the run was stopped to that step's line."""
        complete_line(self.path / METRICS, step, figures)

    def write_rollouts(self, lines: list[dict[str, Any]]) -> None:
        if self._rollouts:
            append_lines(self.path / ROLLOUTS, lines)

    def close(self, discard: bool = False) -> None:
        """Releases the folder. `discard`, for a run that did no step, removes what it wrote and restores what it would
        have replaced."""
        if discard:
            _remove_run(self.path)
            _restore_replaced(self.path)
        (self.path / LOCK).unlink(missing_ok=True)
        self._lock.close()
        if discard and self._made:
            with suppress(OSError):  # somebody removed it meanwhile, or put a file into it
                self.path.rmdir()

    def remove_if_empty(self) -> None:
        """Removes the folder if it was created for this run and is empty. The launcher on Ray calls it when its ranks
        have discarded what they wrote."""
        if self._made and not any(self.path.iterdir()):
            self.path.rmdir()


def _check_save_to(config: Config, *, may_continue: bool) -> None:
    """Refuses a `rollout.save_to` file with contents, unless a run wrote it and this one may replace or continue it."""
    if config.rollout.save_to is None:
        return
    file, setting = Path(config.rollout.save_to).expanduser(), f"`rollout.save_to: {config.rollout.save_to}`"
    try:
        if file.exists() and not file.is_file():
            raise UserError(f"{setting} is {'a folder' if file.is_dir() else 'not an ordinary file'}: name a file")
        start = _first_bytes(file) if file.exists() else b""
    except OSError as error:
        raise UserError(f"{setting} cannot be written: {error.strerror}. Name another file") from None
    if start and not (may_continue or config.run.overwrite):
        raise UserError(
            f"{setting} is not empty, and is not the file that this run wrote: choose another path, or replace the file"
            " with `run.overwrite=true`"
        )
    if start and start != SAVED_ROLLOUT:
        raise UserError(f"{setting} is a file that no run wrote: choose another path")


def _first_bytes(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(len(SAVED_ROLLOUT))


def _make_folder(config: Config) -> tuple[Path, bool]:
    """Returns the run's folder and whether it is new."""
    try:
        if config.run.folder is not None:
            folder = Path(config.run.folder).expanduser()
            new = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            return folder, new
        # a newer run always gets a higher number
        number = max(numbered_runs(config.run.name).values(), default=0) + 1
        while True:
            folder = Path("runs") / f"{config.run.name}-{number:03d}"
            folder.parent.mkdir(exist_ok=True)
            try:
                folder.mkdir()
                return folder, True
            except FileExistsError:
                number += 1
    except OSError as error:
        raise UserError(
            f"the run folder cannot be created: {error}. Set `run.folder` to a place you can write to"
        ) from None


def _check_replaceable(folder: Path, overwrite: bool) -> None:
    """Refuses a folder with contents, unless `overwrite` is set and it holds a run and nothing else: no file of the
    user's is touched."""
    if (folder / LOCK).exists():
        _lock_folder(folder).close()  # raises if that run is still going
    found = {entry.name for entry in folder.iterdir()} - {LOCK, REPLACED}
    if found and not overwrite:
        raise UserError(
            f"the run folder {folder} is not empty: choose another `run.folder`, continue the run in it with"
            " `resume=auto`, or replace it with `run.overwrite=true`"
        )
    saved = {
        f"{FOLDER}/{entry.name}"
        for entry in (folder / FOLDER).glob("*")
        if not entry.name.startswith(CHECKPOINT_PREFIXES)
    }
    if foreign := sorted((found - CONTENTS) | saved):
        raise UserError(
            f"a run may replace only the files of another run, and {folder} has others as well"
            f" ({', '.join(foreign[:3])}): choose another `run.folder`"
        )


def _set_replaced_aside(folder: Path) -> None:
    """Clears the folder for a new run. The old run can be restored until the new one has done its first step."""
    if (folder / REPLACED).is_dir():  # left by a start that was killed: the files beside it belong to that start
        _remove_run(folder)
        return
    for name in CONTENTS:
        if os.path.lexists(folder / name):
            (folder / REPLACED).mkdir(exist_ok=True)
            (folder / name).rename(folder / REPLACED / name)


def _restore_replaced(folder: Path) -> None:
    if (folder / REPLACED).is_dir():
        for entry in (folder / REPLACED).iterdir():
            entry.rename(folder / entry.name)
        (folder / REPLACED).rmdir()


def _remove_run(folder: Path) -> None:
    for name in CONTENTS:
        entry = folder / name
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)


def _lock_folder(folder: Path) -> TextIOWrapper:
    try:
        lock = (folder / LOCK).open("w")
    except OSError as error:
        raise _cannot_write(folder, error) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise UserError(
            f"the run folder {folder} is in use by a run that is still going: choose another `run.folder`, or wait"
        ) from None
    return lock


def _cannot_write(folder: Path, error: OSError) -> UserError:
    fix = "Set `run.folder` to a place you can write to"
    return UserError(f"the run folder {folder} cannot be written to: {error}. {fix}")
