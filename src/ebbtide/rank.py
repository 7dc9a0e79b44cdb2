"""One rank of a run, from its config to its last words: the only one, one that `torchrun` started, or one that Ebbtide started."""

from __future__ import annotations

import os
import sys
from datetime import date

from ebbtide.checkpoint.resume import going_on
from ebbtide.checkpoint.store import Saved
from ebbtide.cluster.apart import serve
from ebbtide.cluster.leash import Job
from ebbtide.cluster.world import World, join
from ebbtide.config.decided import with_chat_date
from ebbtide.config.tree import Config, Rehearsal
from ebbtide.errors import Stopped
from ebbtide.evaluate import owed
from ebbtide.loop import seed_everything, train
from ebbtide.report.report import Report
from ebbtide.report.silent import Silent
from ebbtide.stop import at_once, give_back


def run_rank(job: Job) -> None:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # where `task.python.object` of a user's own is looked for
    before = at_once()
    try:
        with join(job.config) as world:
            if world.link is not None and world.link.generates:
                seed_everything(job.config.seed, job.config.deterministic)
                serve(job.config, world.link)
                return
            resumed = world.same(job.resumed)
            config = job.config if resumed is None else going_on(job.config, resumed)
            config = with_chat_date(config, world.same(date.today().isoformat()))
            _run(config, job.rehearsal, world, _report(config, job, resumed, world))
    finally:
        give_back(before)


def _run(config: Config, rehearsal: Rehearsal | None, world: World, reported: Report) -> None:
    with reported as report:
        try:
            if not _done(config, report.resumed):
                train(config, report, rehearsal, world)
        except KeyboardInterrupt:
            report.terminal.stop()
            if not report.began:
                raise
            report.end(f"stopped after step {report.steps_done} of {config.train.steps}", rehearsed=rehearsal is not None)
            raise Stopped from None
        report.terminal.stop()
        steps = f"{config.train.steps} step{'s' * (config.train.steps != 1)}"
        report.end(f"{'done' if rehearsal is None else 'rehearsed'}: {steps}", rehearsed=rehearsal is not None)


def _done(config: Config, resumed: Saved | None) -> bool:
    """It was stopped between its last checkpoint and its end: what may be missing is its page."""
    return resumed is not None and resumed.step == config.train.steps and not owed(config, resumed)


def _report(config: Config, job: Job, resumed: Saved | None, world: World) -> Report:
    """The first rank knows where to write, and tells the others."""
    report = Report(config, job.source, resumed=resumed, overrides=job.overrides) if world.first else None
    if report is not None:
        at_once(report.leave)  # until the steps begin: what they have is saved before a stop
    folder = world.same(report.folder.path if report is not None else None)
    if report is not None:
        return report
    assert folder is not None  # the first rank has one
    return Silent(config, folder, resumed)
