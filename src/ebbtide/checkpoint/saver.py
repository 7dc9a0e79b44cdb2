"""Writes checkpoints: asynchronously behind the loop, at most one at a time, or while the loop waits."""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from ebbtide.checkpoint.entries import RankEntries, WriteShare
from ebbtide.checkpoint.manifest import Files
from ebbtide.checkpoint.state import RunState, Snapshot
from ebbtide.checkpoint.store import (
    begin_checkpoint,
    describe_error,
    finish_checkpoint,
    prune,
    remove_unfinished,
    save_error,
)
from ebbtide.checkpoint.tensors import finish_tensors, write_tensors
from ebbtide.checkpoint.writer import Writer
from ebbtide.config.checkpoint import CheckpointConfig
from ebbtide.errors import UserError

log = logging.getLogger(__name__)

HEARD_AFTER = 0.5
"""Seconds after which a wait begins anew. Python hears of a signal between two lines, or if it interrupts a wait: one
that comes in between, as a wait begins, is heard when the wait ends."""


class Saver:
    """Saves a run on this rank: `save` for each checkpoint, `close` at the end."""

    def __init__(self, config: CheckpointConfig, folder: Path, state: RunState, say: Callable[[str], None]) -> None:
        self._config, self._folder, self._state, self._say = config, folder, state, say
        ranks = state.ranks
        self._share = WriteShare(ranks.rank, ranks.size, config.fully_parallel_save)
        self._writer: Writer | None = None
        # The loop waits for this event instead of the thread: an interrupted join marks the thread as ended.
        self._idle = threading.Event()
        self._idle.set()
        self._thread: threading.Thread | None = None
        self._abandoned = False
        self._step = 0
        self._problem: UserError | None = None
        self.seconds = 0.0
        """The seconds that the last checkpoint took until it was on disk."""

    def save(self, step: int, metrics: dict[str, float], *, last: bool = False) -> None:
        """Saves the run as it is now. With asynchronous saves it is written while the run continues, except for the
        last checkpoint."""
        asynchronous = self._config.async_save and not last
        if not self._idle.is_set():
            self._say(f"the checkpoint of step {self._step} is still being written: waiting for it")
        self.wait()
        self._step, start = step, time.perf_counter()
        snapshot = self._state.snapshot(step, copy=asynchronous)
        log.info("step %d: %.3f s to copy what is to be saved", step, time.perf_counter() - start)
        self._idle.clear()
        self._thread = threading.Thread(
            target=self._write, args=(snapshot, step, metrics, start, asynchronous), name="checkpoint", daemon=True
        )
        self._thread.start()
        if not asynchronous:
            self.wait()

    def wait(self) -> None:
        """Waits until the last checkpoint is on disk; raises its error if it failed."""
        self._wait_until_idle()
        self.check()

    def check(self) -> None:
        """Raises the error of a failed checkpoint, if one is known."""
        if self._problem is not None:
            problem, self._problem = self._problem, None
            raise problem

    def close(self) -> None:
        """Abandons what is still being written."""
        self._abandoned = True
        if (writer := self._writer) is not None and not self._idle.is_set():
            writer.kill()  # the thread that uses it notices, and closes it
        self._wait_until_idle()
        if self._thread is not None:  # it still frees tensors, and Python aborts if it ends while a thread does that
            self._thread.join()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _wait_until_idle(self) -> None:
        while not self._idle.wait(HEARD_AFTER):
            pass

    def _write(
        self, snapshot: Snapshot, step: int, metrics: dict[str, float], start: float, asynchronous: bool
    ) -> None:
        ranks = self._state.ranks
        try:
            unfinished = self._on_all_ranks(
                step, lambda: begin_checkpoint(self._folder, step) if ranks.rank == 0 else None
            )[0]
            everyone = self._on_all_ranks(step, lambda: snapshot.entries)
            shares = self._on_all_ranks(step, lambda: self._write_share(unfinished, snapshot, everyone, asynchronous))
            if ranks.rank == 0:
                known: Files = {name: file for _, files in shares for name, file in files.items()}
                results = [found for found, _ in shares]
                self._on_all_ranks(step, lambda: self._finish(unfinished, everyone, results, metrics, known))
            else:
                self._on_all_ranks(step, lambda: None)
            self.seconds = time.perf_counter() - start
            log.info("step %d: on disk after %.3f s", step, self.seconds)
        except UserError as problem:
            self._problem = problem
        except Exception as error:
            log.exception("step %d", step)
            self._problem = save_error(self._folder, step, describe_error(error))
        finally:
            if self._problem is not None and ranks.rank == 0:
                remove_unfinished(self._folder)  # no rank writes to it any more
            snapshot.release()
            self._idle.set()

    def _on_all_ranks(self, step: int, work: Callable[[], Any]) -> list[Any]:
        """The results of `work` on every rank; if it failed on one, this raises on all. It catches every exception: the
        other ranks must not wait for a rank that failed, and the run must not count on a checkpoint that does not
        exist."""
        try:
            mine: tuple[Any, str | None] = work(), None
        except Exception as error:
            log.exception("step %d", step)
            mine = None, describe_error(error)
        found = self._state.ranks.all_gather(mine)
        for rank, (_, problem) in enumerate(found):
            if problem is not None:
                raise save_error(self._folder, step, problem if len(found) == 1 else f"rank {rank}: {problem}")
        return [result for result, _ in found]

    def _write_share(
        self, unfinished: Path, snapshot: Snapshot, everyone: RankEntries, asynchronous: bool
    ) -> tuple[list[Any], Files]:
        """Writes this rank's share of the files."""
        for name, text in snapshot.texts.items():
            (unfinished / name).write_text(text)
        if not asynchronous:
            entries = {entry.name: entry for entry in snapshot.entries}
            memory = mmap.mmap(-1, max([1, *(entry.bytes for entry in snapshot.entries)]))

            def find(name: str) -> Tensor:  # one tensor after the other uses the same memory
                self._check_not_abandoned()
                snapshot.fill(name, out := entries[name].within(memory, 0))
                return out

            return write_tensors(unfinished, everyone, find, self._share), {}
        try:
            self._check_not_abandoned()
            if self._writer is None:
                self._writer = Writer()
            return self._writer.write(unfinished, everyone, snapshot.fill, self._share)
        except BaseException:
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.close()  # its next messages are about the write that failed
            raise

    def _check_not_abandoned(self) -> None:
        if self._abandoned:
            raise OSError("the save was abandoned")

    def _finish(
        self, unfinished: Path, everyone: RankEntries, results: list[list[Any]], metrics: dict[str, float], known: Files
    ) -> None:
        finish_tensors(unfinished, everyone, results, self._share)
        finish_checkpoint(unfinished, metrics, known)
        prune(self._folder, self._config.keep, self._config.keep_best, self._config.metric)
