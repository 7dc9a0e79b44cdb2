"""The run folder: made, locked against a second run, and written line by line."""

from __future__ import annotations

import fcntl
import shutil
from io import FileIO, TextIOWrapper
from pathlib import Path
from typing import Any

from ebbtide.checkpoint.store import Saved, set_aside
from ebbtide.config.document import resolved
from ebbtide.config.tree import Config
from ebbtide.errors import UserError
from ebbtide.json_text import json_bytes, json_text
from ebbtide.steplog import forget_after

LOCK = ".lock"
SAVED = b'{"step": '  # how every line of `rollout.save_to` begins
HISTORY = "memory-history.pickle"
CONTENTS = {
    "config.yaml",
    "metrics.jsonl",
    "rollouts.jsonl",
    "tensorboard",
    "wandb",
    "checkpoints",
    "log.txt",
    "plan.json",
    "versions.jsonl",
    HISTORY,
    "report.html",
    ".report.html.new",
}


class RunFolder:
    """`config.yaml`, `metrics.jsonl`, `rollouts.jsonl`. One running process holds its lock."""

    def __init__(self, config: Config, resumed: Saved | None = None) -> None:
        self.aside: list[Path] = []
        """Checkpoints of steps that will be done again."""
        _refuse_saved(config, goes_on=resumed is not None)
        if resumed is not None:  # the run goes on in its own folder
            self.path, self._made = resumed.path.parent.parent, False
            self._lock = _locked(self.path)
            for name in ("metrics.jsonl", "rollouts.jsonl"):
                forget_after(self.path / name, resumed.step)
            self.aside = set_aside(resumed.path.parent, resumed.step)
        else:
            self.path, self._made = _make_folder(config)
            _refuse_what_is_there(self.path, config.run.overwrite)
            self._lock = _locked(self.path)
            _remove_run(self.path)
        self.write_config(config)
        self._metrics = (self.path / "metrics.jsonl").open("ab", buffering=0)
        self._rollouts = (self.path / "rollouts.jsonl").open("ab", buffering=0) if config.report.rollouts else None

    def write_config(self, config: Config) -> None:
        """Without the folder: run again, it goes to a folder of its own and never over this one."""
        elsewhere = config.run.model_copy(update={"folder": None, "overwrite": False})
        (self.path / "config.yaml").write_text(resolved(config.model_copy(update={"run": elsewhere, "resume": None})))

    @property
    def history(self) -> Path:
        """Where the allocator's history goes, should memory run out."""
        return self.path / HISTORY

    def write_plan(self, plan: dict[str, Any]) -> None:
        (self.path / "plan.json").write_text(json_text(plan, indent=1) + "\n")

    def write_start(self, line: dict[str, Any]) -> None:
        """What a process that begins or resumes the run has: one line for each."""
        with (self.path / "versions.jsonl").open("ab", buffering=0) as file:
            _write(file, [line])

    def write_metrics(self, line: dict[str, Any]) -> None:
        _write(self._metrics, [line])

    def write_rollouts(self, lines: list[dict[str, Any]]) -> None:
        if self._rollouts is not None:
            _write(self._rollouts, lines)

    def close(self, discard: bool = False) -> None:
        """Lets go of the folder; `discard` takes back what this run made of it, when the run never began and the folder was new to it."""
        for file in (self._metrics, self._rollouts):
            if file is not None:
                file.close()
        if discard:
            _remove_run(self.path)
        (self.path / LOCK).unlink(missing_ok=True)
        self._lock.close()
        if discard and self._made:
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
        raise UserError(f"{called} is not empty: choose another file, or replace what is there with `run.overwrite=true`")
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
        number = 1
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
    found = {entry.name for entry in folder.iterdir()} - {LOCK}
    if found and not overwrite:
        raise UserError(
            f"the run folder {folder} is not empty: choose another `run.folder`, or replace what is there with `run.overwrite=true`"
        )
    if foreign := sorted(found - CONTENTS):
        raise UserError(
            f"`run.overwrite` replaces a run, and {folder} holds other things as well ({', '.join(foreign[:3])}): choose another `run.folder`"
        )


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
        raise UserError(f"the run folder {folder} cannot be written to: {error}. Set `run.folder` to a place you can write to") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise UserError(f"the run folder {folder} is in use by a run that is still going: choose another `run.folder`") from None
    return lock


def _write(file: FileIO, lines: list[dict[str, Any]]) -> None:
    """All lines in one write to the file: Ctrl-C comes before or after it, and no line is cut in two."""
    file.write(b"".join(json_bytes(line) + b"\n" for line in lines))
