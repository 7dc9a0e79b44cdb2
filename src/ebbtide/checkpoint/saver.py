"""Writes checkpoints: behind the loop, at most one at a time, or while it waits."""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from ebbtide.checkpoint.manifest import Files
from ebbtide.checkpoint.state import Snapshot, State
from ebbtide.checkpoint.store import begin, clear, failed, finish, prune, why
from ebbtide.checkpoint.tensors import Everyone, Share, finish_tensors, write_tensors
from ebbtide.checkpoint.writer import Writer
from ebbtide.config.tree import Checkpoint
from ebbtide.errors import UserError

log = logging.getLogger(__name__)


class Saver:
    def __init__(self, config: Checkpoint, folder: Path, state: State, say: Callable[[str], None]) -> None:
        self._config, self._folder, self._state, self._say = config, folder, state, say
        ranks = state.ranks
        self._share = Share(ranks.rank, ranks.count, config.fully_parallel_save)
        self._writer: Writer | None = None
        self._there = threading.Event()  # waited for in place of the thread: an interrupted join takes it for ended
        self._there.set()
        self._given_up = False
        self._step = 0
        self._problem: UserError | None = None
        self.seconds = 0.0
        """That the last checkpoint took until it was there."""

    def save(self, step: int, metrics: dict[str, float], *, last: bool = False) -> None:
        """Takes the run as it is now; where saves are asynchronous and it is not the last one, it is written while the run goes on."""
        beside = self._config.async_save and not last
        if not self._there.is_set():
            self._say(f"the checkpoint of step {self._step} is still being written: waiting for it")
        self.wait()
        self._step, start = step, time.perf_counter()
        snapshot = self._state.snapshot(step, copy=beside)
        log.info("step %d: %.3f s to copy what is to be saved", step, time.perf_counter() - start)
        self._there.clear()
        threading.Thread(target=self._write, args=(snapshot, step, metrics, start, beside), name="checkpoint", daemon=True).start()
        if not beside:
            self.wait()

    def wait(self) -> None:
        """Until the last checkpoint is there; what went wrong with it is raised here."""
        self._there.wait()
        self.check()

    def check(self) -> None:
        """Raises what went wrong with a checkpoint, if that is known."""
        if self._problem is not None:
            problem, self._problem = self._problem, None
            raise problem

    def close(self) -> None:
        """Gives up what is still being written."""
        self._given_up = True
        if (writer := self._writer) is not None and not self._there.is_set():
            writer.kill()  # the thread that has it notices, and closes it
        self._there.wait()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self, snapshot: Snapshot, step: int, metrics: dict[str, float], start: float, beside: bool) -> None:
        ranks = self._state.ranks
        try:
            making = self._together(step, lambda: begin(self._folder, step) if ranks.rank == 0 else None)[0]
            everyone = self._together(step, lambda: snapshot.entries)
            shares = self._together(step, lambda: self._fill(making, snapshot, everyone, beside))
            if ranks.rank == 0:
                known: Files = {name: file for _, files in shares for name, file in files.items()}
                self._together(step, lambda: self._finish(making, everyone, [results for results, _ in shares], metrics, known))
            else:
                self._together(step, lambda: None)
            self.seconds = time.perf_counter() - start
            log.info("step %d: there after %.3f s", step, self.seconds)
        except UserError as problem:
            self._problem = problem
        except Exception as error:
            log.exception("step %d", step)
            self._problem = failed(self._folder, step, why(error))
        finally:
            if self._problem is not None and ranks.rank == 0:
                clear(self._folder)  # all ranks have ended their part of it
            snapshot.release()
            self._there.set()

    def _together(self, step: int, work: Callable[[], Any]) -> list[Any]:
        """What each rank's work gave; where it failed on one, it failed. Whatever it was: the others must not wait for it, and the run must not believe in a checkpoint that is not there."""
        try:
            mine: tuple[Any, str | None] = work(), None
        except Exception as error:
            log.exception("step %d", step)
            mine = None, why(error)
        found = self._state.ranks.gather(mine)
        for rank, (_, problem) in enumerate(found):
            if problem is not None:
                raise failed(self._folder, step, problem if len(found) == 1 else f"rank {rank}: {problem}")
        return [result for result, _ in found]

    def _fill(self, making: Path, snapshot: Snapshot, everyone: Everyone, beside: bool) -> tuple[list[Any], Files]:
        """This rank's part of the files."""
        for name, text in snapshot.texts.items():
            (making / name).write_text(text)
        if not beside:
            entries = {entry.name: entry for entry in snapshot.entries}
            memory = mmap.mmap(-1, max([1, *(entry.bytes for entry in snapshot.entries)]))

            def find(name: str) -> Tensor:  # one after the other, in the same memory
                self._go_on()
                snapshot.fill(name, out := entries[name].within(memory, 0))
                return out

            return write_tensors(making, everyone, find, self._share), {}
        try:
            self._go_on()
            if self._writer is None:
                self._writer = Writer()
            return self._writer.write(making, everyone, snapshot.fill, self._share)
        except BaseException:
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.close()  # what it still has to say is of a write that failed
            raise

    def _go_on(self) -> None:
        if self._given_up:
            raise OSError("it was given up")

    def _finish(self, making: Path, everyone: Everyone, results: list[list[Any]], metrics: dict[str, float], known: Files) -> None:
        finish_tensors(making, everyone, results, self._share)
        finish(making, metrics, known)
        prune(self._folder, self._config.keep, self._config.keep_best, self._config.metric)
