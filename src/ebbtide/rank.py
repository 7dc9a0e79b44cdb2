"""One rank of a run, from its config to its last words: the only one, one that `torchrun` started, or one that Ebbtide started."""

from __future__ import annotations

import os
import sys

from ebbtide.checkpoint.resume import going_on
from ebbtide.checkpoint.store import Saved
from ebbtide.cluster.apart import serve
from ebbtide.cluster.leash import Job
from ebbtide.cluster.world import World, join
from ebbtide.config.tree import Config, Rehearsal
from ebbtide.errors import Stopped
from ebbtide.loop import seed_everything, train
from ebbtide.report.report import Report
from ebbtide.report.silent import Silent


def run_rank(job: Job) -> None:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # where `task.python.object` of a user's own is looked for
    rehearsal = job.rehearsal
    with join(job.config) as world:
        if world.link is not None and world.link.generates:
            seed_everything(job.config.seed, job.config.deterministic)
            serve(job.config, world.link)
            return
        resumed = world.same(job.resumed)
        config = job.config if resumed is None else going_on(job.config, resumed)
        _run(config, rehearsal, world, _report(config, job, resumed, world))


def _run(config: Config, rehearsal: Rehearsal | None, world: World, reported: Report) -> None:
    with reported as report:
        try:
            train(config, report, rehearsal, world)
        except KeyboardInterrupt:
            report.terminal.stop()
            if not report.began:
                raise
            report.end(f"stopped after step {report.steps_done} of {config.train.steps}", rehearsed=rehearsal is not None)
            raise Stopped from None
        report.terminal.stop()
        report.end(f"{'done' if rehearsal is None else 'rehearsed'}: {config.train.steps} steps", rehearsed=rehearsal is not None)


def _report(config: Config, job: Job, resumed: Saved | None, world: World) -> Report:
    """The first rank knows where to write, and tells the others."""
    report = Report(config, job.source, resumed=resumed, overrides=job.overrides) if world.first else None
    folder = world.same(report.folder.path if report is not None else None)
    if report is not None:
        return report
    assert folder is not None  # the first rank has one
    return Silent(config, folder, resumed)
