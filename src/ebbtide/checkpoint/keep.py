"""When a checkpoint is due, when a run must stop for one, and which earlier ones go when it is there."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from ebbtide.checkpoint.resume import FOLDER
from ebbtide.checkpoint.saver import Saver
from ebbtide.checkpoint.state import State
from ebbtide.config.tree import Checkpoint, Config
from ebbtide.errors import UserError
from ebbtide.stop import at_once, give_back, handled

SPARE = 1.5  # a step or a save may take so many times as long as the last one


class Keeper:
    """Around the steps of a run: the first Ctrl-C or SIGTERM lets the step under way end and be saved, the second stops
    at once. Without checkpoints the first one does."""

    def __init__(
        self,
        config: Config,
        run: Path,
        state: State | None,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        agreed: Callable[[bool], bool] = bool,
    ) -> None:
        """`agreed`: what one rank says is true for all."""
        self._config, self._say, self._clock, self._agreed = config, say, clock, agreed
        self._saver = None
        if config.checkpoint is not None:
            assert state is not None  # there is something to save
            self._saver = Saver(config.checkpoint, run / FOLDER, state, say)
        self._began = self._stepped = self._saved = clock()
        self._step_seconds = self._blocked_seconds = 0.0
        self._asked = self._hurried = False
        self.stopping = False
        """The run is to end with the step that just ended: decided in `step_done`, and again once that step is saved. What is asked for in between is for the next step."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Keeper:
        self._before = handled(self._ask)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """The last checkpoint is there, or was given up, before the run's memory goes."""
        try:
            if self._saver is not None and not self._hurried:
                self._saver.wait()
        except UserError as problem:
            if kind is None or issubclass(kind, KeyboardInterrupt):
                raise
            self._say(str(problem))  # beside what ended the run
        finally:
            try:
                if self._saver is not None:
                    self._saver.close()
            finally:
                give_back(self._before)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._asked or self._saver is None:
            self._hurried = True
            at_once()  # one more does not wait for what this one ends
            raise KeyboardInterrupt
        self._asked = True
        self._say("stopping: this step is finished and saved first (again to stop at once)")

    @property
    def in_haste(self) -> bool:
        """Nothing is waited for that can be made up for: this rank was asked to stop, or has just the time to save."""
        config = self._config.checkpoint
        return self._asked or (config is not None and self._late(config, self._clock(), 0.0))

    def step_done(self, step: int) -> bool:
        """Whether the step that just ended is to be saved. All ranks ask together."""
        if self._saver is not None:
            self._saver.check()
        now, config = self._clock(), self._config.checkpoint
        self._step_seconds, self._stepped = now - self._stepped, now
        if config is None:
            return False
        old = self._agreed(config.minutes is not None and now - self._saved >= 60 * config.minutes)
        self.stopping = self._agreed(self._asked or self._too_late_for_another(config))
        return step == self._config.train.steps or (config.every is not None and step % config.every == 0) or old or self.stopping

    def _too_late_for_another(self, config: Checkpoint) -> bool:
        return self._late(config, self._stepped, self._step_seconds)

    def _late(self, config: Checkpoint, now: float, work: float) -> bool:
        """Whether so many seconds of work, and a save, would end after the deadline."""
        more = SPARE * (work + self._blocked_seconds + (self._saver.seconds if self._saver else 0.0))
        return config.deadline_minutes is not None and now - self._began + more > 60 * config.deadline_minutes

    def save(self, step: int, metrics: dict[str, float]) -> None:
        """Saves a step; those that are neither new nor good enough go when it is there. All ranks come here together."""
        assert self._saver is not None
        assert self._config.checkpoint is not None
        start = self._clock()
        self._saver.save(step, metrics, last=self.stopping or step == self._config.train.steps)
        self._saved = self._stepped = self._clock()
        self._blocked_seconds = self._saved - start
        self.stopping = self._agreed(self.stopping or self._asked or self._too_late_for_another(self._config.checkpoint))
