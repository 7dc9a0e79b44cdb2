"""Decides when a checkpoint is due, when a run must stop for one, and handles Ctrl-C and SIGTERM."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from ebbtide.checkpoint.saver import Saver
from ebbtide.config.checkpoint import CheckpointConfig
from ebbtide.config.root import Config
from ebbtide.errors import UserError
from ebbtide.parallel.comm import Comm
from ebbtide.system.signals import exit_on_signal, install_handlers, restore_handlers

SPARE = 1.5  # a step or a save may take up to this many times as long as the last one


class Checkpointer:
    """A context around the steps of a run. After the first Ctrl-C or SIGTERM the current step is finished and saved;
    the second stops the run at once. Without checkpoints the first one stops it at once."""

    def __init__(
        self,
        config: Config,
        saver: Saver | None,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        comm: Comm | None = None,
    ) -> None:
        """`saver` writes the checkpoints; None: there are none."""
        self._config, self._saver, self._say = config, saver, say
        self._clock, self._comm = clock, comm or Comm()
        self._began = self._stepped = self._saved = clock()
        self._step_seconds = self._blocked_seconds = 0.0
        self._stop_requested = self._stop_now = False
        self.stopping = False
        """Whether the run ends with the step that just ended. `step_done` decides it, and `save` decides it again; a
        signal in between counts for the next step."""
        self._handlers_before: dict[int, Any] = {}

    def __enter__(self) -> Checkpointer:
        self._handlers_before = install_handlers(self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits until the last checkpoint is on disk, or abandons it, before the run's memory is freed."""
        try:
            if self._saver is not None and not self._stop_now:
                self._saver.wait()
        except UserError as problem:
            if kind is None or issubclass(kind, KeyboardInterrupt):
                raise
            self._say(str(problem))  # in addition to the error that ended the run
        finally:
            try:
                if self._saver is not None:
                    self._saver.close()
            finally:
                restore_handlers(self._handlers_before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._stop_requested or self._saver is None:
            self._stop_now = True
            exit_on_signal()  # a further signal does not wait for the clean-up that this one starts
            raise KeyboardInterrupt
        self._stop_requested = True
        self._say("stopping: this step is finished and saved first (repeat the signal to stop at once)")

    @property
    def must_stop(self) -> bool:
        """Whether this rank must skip work that can be done after a resume: it got a signal to stop, or has time left
        only to save."""
        config = self._config.checkpoint
        return self._stop_requested or (config is not None and self._late(config, self._clock(), 0.0))

    def step_done(self, step: int) -> bool:
        """Whether the step that just ended must be saved. All ranks call this together."""
        if self._saver is not None:
            self._saver.check()
        now, config = self._clock(), self._config.checkpoint
        self._step_seconds, self._stepped = now - self._stepped, now
        if config is None:
            return False
        overdue = self._comm.any(config.minutes is not None and now - self._saved >= 60 * config.minutes)
        self.stopping = self._comm.any(self._stop_requested or self._too_late_for_another(config))
        return (
            step == self._config.train.steps
            or (config.every is not None and step % config.every == 0)
            or overdue
            or self.stopping
        )

    def _too_late_for_another(self, config: CheckpointConfig) -> bool:
        return self._late(config, self._stepped, self._step_seconds)

    def _late(self, config: CheckpointConfig, now: float, work: float) -> bool:
        """Whether `work` seconds of work and a save would end after the deadline."""
        more = SPARE * (work + self._blocked_seconds + (self._saver.seconds if self._saver else 0.0))
        return config.deadline_minutes is not None and now - self._began + more > 60 * config.deadline_minutes

    def save(self, step: int, metrics: dict[str, float]) -> None:
        """Saves a step; once it is on disk, checkpoints that `keep` and `keep_best` do not cover are removed. All ranks
        call this together."""
        assert self._saver is not None
        assert self._config.checkpoint is not None
        start = self._clock()
        self._saver.save(step, metrics, last=self.stopping or step == self._config.train.steps)
        self._saved = self._stepped = self._clock()
        self._blocked_seconds = self._saved - start
        self.stopping = self._comm.any(
            self.stopping or self._stop_requested or self._too_late_for_another(self._config.checkpoint)
        )
