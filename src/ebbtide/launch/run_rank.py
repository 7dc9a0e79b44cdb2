"""Runs one rank from start to finish: the only one, one that `torchrun` started, or one that Ebbtide started."""

from __future__ import annotations

import os
import sys
from datetime import date

from ebbtide.algorithms.evaluate import is_eval_missing
from ebbtide.algorithms.loop import train
from ebbtide.checkpoint.resume import with_saved_choices
from ebbtide.checkpoint.store import Checkpoint
from ebbtide.config.planner_keys import with_chat_date
from ebbtide.config.root import Config
from ebbtide.config.train import Rehearsal
from ebbtide.errors import RunStopped
from ebbtide.launch.generation_worker import generation_worker
from ebbtide.launch.job import Job
from ebbtide.launch.join import join
from ebbtide.parallel.comm import Comm
from ebbtide.report.null_report import NullReport
from ebbtide.report.protocol import RankReport
from ebbtide.report.report import Report
from ebbtide.rollout.weights.channel import RolloutChannel
from ebbtide.system.signals import exit_on_signal, restore_handlers


def run_rank(job: Job) -> None:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # so that a user's own `task.python.object` is found
    before = exit_on_signal()
    try:
        with join(job.config) as (comm, channel):
            if channel is not None and channel.is_rollout_worker:
                generation_worker(job.config, channel)
                return
            resumed = comm.broadcast(job.resumed)
            config = job.config if resumed is None else with_saved_choices(job.config, resumed)
            config = with_chat_date(config, comm.broadcast(date.today().isoformat()))
            _run(config, job.rehearsal, comm, channel, _report(config, job, resumed, comm))
    finally:
        restore_handlers(before)


def _run(
    config: Config, rehearsal: Rehearsal | None, comm: Comm, channel: RolloutChannel | None, reported: RankReport
) -> None:
    with reported as report:
        try:
            if not _is_done(config, report.resumed):
                train(config, report, rehearsal, comm, channel)
        except KeyboardInterrupt:  # the loop has stopped (LoopStopped), or a second signal came
            if not report.has_begun:
                raise
            report.summarize_run(
                f"stopped after step {report.steps_done} of {config.train.steps}", rehearsed=rehearsal is not None
            )
            raise RunStopped from None
        steps = f"{config.train.steps} step{'s' * (config.train.steps != 1)}"
        report.summarize_run(
            f"{'done' if rehearsal is None else 'rehearsed'}: {steps}", rehearsed=rehearsal is not None
        )


def _is_done(config: Config, resumed: Checkpoint | None) -> bool:
    """Whether the run was stopped between its last checkpoint and its end: only its report page may be missing."""
    return resumed is not None and resumed.step == config.train.steps and not is_eval_missing(config, resumed)


def _report(config: Config, job: Job, resumed: Checkpoint | None, comm: Comm) -> RankReport:
    """This rank's report: rank 0 chooses the run's folder and broadcasts it."""
    report = Report(config, job.source, resumed=resumed, overrides=job.overrides) if comm.is_main else None
    if report is not None:
        exit_on_signal(report.close_before_first_step)  # until the steps begin: from then on a stop saves first
    path = comm.broadcast(report.path if report is not None else None)
    if report is not None:
        return report
    assert path is not None  # rank 0 has one
    return NullReport(path, resumed)
