"""The steps of a run, whatever its algorithm: evaluation, report, checkpoints, and stopping."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from importlib import import_module
from typing import Any

from ebbtide.algorithms.data import read_data
from ebbtide.algorithms.evaluate import is_eval_missing
from ebbtide.algorithms.task import HeldOutTask
from ebbtide.algorithms.updates import StepResult
from ebbtide.checkpoint.checkpointer import Checkpointer
from ebbtide.config.root import Config
from ebbtide.config.train import Rehearsal
from ebbtide.errors import LoopStopped
from ebbtide.memory.host import frozen_gc
from ebbtide.parallel.comm import Comm
from ebbtide.policy.policy import Policy
from ebbtide.progress import AbandonableProgress, Progress, WorkAbandoned
from ebbtide.report.protocol import RankReport
from ebbtide.rollout.batch import Sample
from ebbtide.rollout.weights.channel import RolloutChannel
from ebbtide.system.clock import process_seconds
from ebbtide.worker import Worker, seed_everything


class Algorithm(ABC):
    """An algorithm on a worker, for the length of a run. Its module in algorithms/ has a class `Run`, an `Algorithm`
    that is built from the worker and the data (`RunData`)."""

    about: str
    """What is trained on, for the lines that introduce the run."""

    parts: Sequence[HeldOutTask] = ()
    """The problems that the run samples completions of or evaluates on: contexts around the steps."""

    @abstractmethod
    def step(self, step: int) -> StepResult:
        """Does one step."""

    def evaluate(self, progress: Progress) -> dict[str, float]:
        """The metrics of an evaluation, in addition to those of the parts. It uses no random state of the run."""
        return {}

    def after_step(self, samples: Sequence[Sample]) -> None:  # noqa: B027 (most do nothing then)
        """Called when a step has been reported."""


def train(
    config: Config,
    report: RankReport,
    rehearsal: Rehearsal | None = None,
    comm: Comm | None = None,
    channel: RolloutChannel | None = None,
) -> Policy:
    """Runs one whole run and returns the trained policy; the report has what happened. A rehearsal (dry run) does
    everything except the updates."""
    module: Any = import_module(f"ebbtide.algorithms.{config.algorithm}")
    seed_everything(config.seed, config.deterministic)
    with report.working("reading the data"):
        data = read_data(config)
    with Worker(config, report, rehearsal=rehearsal, comm=comm, channel=channel) as worker:
        algorithm: Algorithm = module.Run(worker, data)
        report.begin(worker.policy.model, worker.policy.tokenizer, worker.residency, algorithm.about)
        _Loop(worker, algorithm).run()
        return worker.policy


class _Loop:
    def __init__(self, worker: Worker, algorithm: Algorithm) -> None:
        self._worker, self._algorithm = worker, algorithm
        self._config, self._report = worker.config, worker.report

    def run(self) -> None:
        """Does all steps that are left. Raises LoopStopped if the run has to stop before the last one."""
        worker, config, report = self._worker, self._config, self._report
        start_step = 0
        if worker.resumed is not None:
            with report.working("reading the checkpoint"):
                start_step = worker.load(worker.resumed.path)
        saver = worker.saver if config.checkpoint is not None else None
        self._checkpointer = Checkpointer(config, saver, report.note, comm=worker.comm)
        with ExitStack() as stack:
            for part in self._algorithm.parts:
                stack.enter_context(part)
            stack.enter_context(self._checkpointer)
            stack.enter_context(frozen_gc())
            self._steps(start_step)

    def _steps(self, start_step: int) -> None:
        worker, config, report = self._worker, self._config, self._report
        startup = {} if (age := process_seconds()) is None else {"seconds_startup": age}
        eval_first = config.evaluate is not None if report.resumed is None else is_eval_missing(config, report.resumed)
        if eval_first:
            if not (evaluation := self._evaluate(start_step)):
                raise LoopStopped
            report.note_evaluation(start_step, evaluation | worker.residency.meter.drain())

        for step in range(start_step + 1, config.train.steps + 1):
            started = time.perf_counter()
            metrics, lengths, samples = self._algorithm.step(step)
            metrics["seconds"] = time.perf_counter() - started
            evaluation = self._evaluate(step) if config.is_eval_due(step) else {}
            metrics |= evaluation | (startup if step == start_step + 1 else {})
            report.step(step, metrics | worker.residency.meter.drain(), samples, lengths)
            self._algorithm.after_step(samples)
            if self._checkpointer.step_done(step):
                with worker.phase("save"):
                    self._checkpointer.save(step, metrics)
            complete = step == config.train.steps and (config.evaluate is None or bool(evaluation))
            if self._checkpointer.stopping and not complete:
                raise LoopStopped

    def _evaluate(self, step: int) -> dict[str, float]:
        """Evaluates and returns the metrics. Returns none if the run has to stop: no save waits for an evaluation that
        the resumed run can do."""
        checkpointer = self._checkpointer
        if self._worker.comm.any(checkpointer.must_stop):
            return {}
        try:
            with self._worker.phase("evaluate") as shown:
                progress = AbandonableProgress(shown, lambda: checkpointer.must_stop)
                found = self._algorithm.evaluate(progress)
                for part in self._algorithm.parts:
                    found |= part.evaluate(step, progress)
                return found
        except WorkAbandoned:
            return {}
