"""The run folder: made, locked against a second run, and written line by line."""

from __future__ import annotations

import fcntl
import json
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from ebbtide.config.document import resolved
from ebbtide.config.tree import Config
from ebbtide.errors import UserError

LOCK = ".lock"


class RunFolder:
    """`config.yaml`, `metrics.jsonl`, `rollouts.jsonl`. One running process holds its lock."""

    def __init__(self, config: Config) -> None:
        self.path = _make(config)
        self._lock = _locked(self.path)
        if config.run.overwrite:
            _clear(self.path)
        elif any(entry.name != LOCK for entry in self.path.iterdir()):
            raise UserError(
                f"the run folder {self.path} is not empty: choose another `run.folder`, or replace what is there with `run.overwrite=true`"
            )
        (self.path / "config.yaml").write_text(resolved(config))
        self._metrics = (self.path / "metrics.jsonl").open("a", encoding="utf-8")
        self._rollouts = (self.path / "rollouts.jsonl").open("a", encoding="utf-8") if config.report.rollouts else None

    def write_metrics(self, line: dict[str, Any]) -> None:
        _write(self._metrics, [line])

    def write_rollouts(self, lines: list[dict[str, Any]]) -> None:
        if self._rollouts is not None:
            _write(self._rollouts, lines)

    def close(self) -> None:
        for file in (self._metrics, self._rollouts, self._lock):
            if file is not None:
                file.close()
        (self.path / LOCK).unlink(missing_ok=True)


def _make(config: Config) -> Path:
    try:
        if config.run.folder is not None:
            folder = Path(config.run.folder).expanduser()
            folder.mkdir(parents=True, exist_ok=True)
            return folder
        number = 1
        while True:
            folder = Path("runs") / f"{config.run.name}-{number:03d}"
            folder.parent.mkdir(exist_ok=True)
            try:
                folder.mkdir()
                return folder
            except FileExistsError:
                number += 1
    except OSError as error:
        raise UserError(f"the run folder cannot be made: {error}. Set `run.folder` to a place you can write to") from None


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


def _clear(folder: Path) -> None:
    """Removes an earlier run, and only a run: a folder with anything else at its top is refused."""
    if (folder / "config.yaml").is_file() or all(entry.name == LOCK for entry in folder.iterdir()):
        for entry in folder.iterdir():
            if entry.name != LOCK:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        return
    raise UserError(f"`run.overwrite` replaces a run, and {folder} holds no run (it has no config.yaml): choose another `run.folder`")


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until the block is done: no line of a file is cut in two."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})


def _write(file: TextIOWrapper, lines: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(line, ensure_ascii=False, allow_nan=True) + "\n" for line in lines)
    with _uninterrupted():
        file.write(text)
        file.flush()
