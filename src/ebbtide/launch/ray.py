"""Starts the ranks of a run over the nodes of a Ray cluster: an actor runs each rank, and when one is lost all restart
from the last checkpoint. Imports no torch."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from ebbtide.checkpoint.resume import FOLDER
from ebbtide.checkpoint.store import list_checkpoints, newest_valid
from ebbtide.config.root import Config
from ebbtide.errors import UserError
from ebbtide.launch.job import Failure, Job
from ebbtide.launch.local import (
    TICK,
    ForwardedSignals,
    SuspendWatch,
    free_port,
    killed_failure,
    show_failure,
    start_rank,
)
from ebbtide.report.folder import RunFolder
from ebbtide.system.signals import STOPPED, install_handlers, interrupt_on_signal, restore_handlers

Ended = tuple[int, Failure | None]
"""The exit code of a rank or a run, and its failure if there was one."""


class RankActor:
    """Runs one rank as a process on its node. The process ends with the actor, however the actor ends, and Ray streams
    the output of rank 0 to the driver."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._signals = ForwardedSignals()
        self._starting = threading.Lock()

    def locate(self) -> tuple[str, str, int]:
        """The node that the actor runs on, its address, and a free port there."""
        import ray

        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), free_port()

    def run(self, job: Job, environment: dict[str, str], cwd: str) -> Ended:
        """Runs the rank until it ends."""
        with tempfile.TemporaryDirectory(prefix="ebbtide-") as name:
            folder = Path(name)
            job.write(folder)
            with self._starting:
                if self._signals.sent:
                    return STOPPED, None
                pipe, pipe_end = os.pipe()
                self._process = start_rank(folder, environment, pipe, cwd)
            os.close(pipe)
            watch, stopped = SuspendWatch(int(environment["RANK"]), self._process), None
            while (ended := _ended_within(self._process, TICK)) is None:
                if (stopped := stopped or watch.failure()) is not None:
                    self._process.kill()
            os.close(pipe_end)
            if stopped is not None:
                return 2, stopped
            code = self._signals.rank_ended(ended)
            return (
                (code, Failure.read_first(folder))
                if code >= 0
                else (1, killed_failure(folder, int(environment["RANK"]), -code, time.time()))
            )

    def send(self, number: int) -> None:
        """Forwards a signal to the rank."""
        with self._starting:
            self._signals.record(number)
            if self._process is not None and self._process.poll() is None:
                self._process.send_signal(number)


def _ended_within(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """The exit code of a process, or None if it still runs after so many seconds."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def launch_on_ray(job: Job, count: int, say: Callable[[str], None]) -> int:
    """Runs a job with `count` ranks and returns its exit code; a failure that the user can fix is raised."""
    with interrupt_on_signal():
        return _launch(job, count, say)


def _launch(job: Job, count: int, say: Callable[[str], None]) -> int:
    parallel = job.config.parallel
    assert parallel is not None  # the config has the section
    ray = _connect(parallel.ray or "auto", count, job.config)
    try:
        resources = _resources(ray, job.config, count)
        folder: RunFolder | None = None
        for left in range(parallel.max_restarts, -1, -1):
            with _Group(ray, count, resources, job.config.run.distributed_timeout_minutes) as group:
                if folder is None:
                    folder, job = _claim_folder(job, say)
                code, failure = group.run(job)
            if failure is None or not failure.lost or left == 0:
                if code == 2 and job.resumed is None:
                    folder.remove_if_empty()
                if failure is not None:
                    show_failure(failure, count, say)
                return code
            saved = newest_valid(partial(list_checkpoints, folder.path / FOLDER), say)
            begin = "from the beginning" if saved is None else f"after step {saved.step}"
            say(
                f"rank {failure.rank} of {count} was lost ({failure.text.splitlines()[0]}):"
                f" restarting {begin}, {left} restarts left"
            )
            job = replace(job, resumed=saved)
        raise AssertionError("the last attempt returns")
    finally:
        ray.shutdown()


def _claim_folder(job: Job, say: Callable[[str], None]) -> tuple[RunFolder, Job]:
    """The run's folder, and the job with that folder: what is written there from now on belongs to this run, however
    early a rank is lost."""
    folder = RunFolder(job.config, job.resumed)
    folder.close()
    for path in folder.set_aside_checkpoints:
        say(f"a later checkpoint was set aside, remove it if you do not need it: {path}")
    run = job.config.run.model_copy(update={"folder": str(folder.path.absolute()), "overwrite": True})
    # A restart resumes: the checkpoints that exist by then are never removed.
    return folder, replace(job, config=job.config.model_copy(update={"run": run, "resume": "auto"}))


def _connect(address: str, count: int, config: Config) -> Any:
    if importlib.util.find_spec("ray") is None:
        raise UserError(f"`parallel.ray: {address}` needs the package ray: pip install 'ebbtide[ray]'")
    # Ray does not hide the GPUs from ranks that reserve none.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # only rank 0 prints: a line that comes twice was printed twice
    import ray

    paths = os.pathsep.join(path for path in sys.path if path)
    options: dict[str, Any] = {"runtime_env": {"env_vars": {"PYTHONPATH": paths}}, "logging_level": logging.ERROR}
    try:
        ray.init(address=address, **options)
    except ConnectionError as error:
        if address != "auto":
            raise UserError(
                f"`parallel.ray: {address}`: no Ray cluster answers there ({error}):"
                " check the address, or set `parallel.ray: auto`"
            ) from None
        # Starts a cluster for this run. On a CPU there may be more ranks than cores.
        ray.init(address="local", num_cpus=max(count, os.cpu_count() or 1), include_dashboard=False, **options)
    return ray


def _resources(ray: Any, config: Config, count: int) -> dict[str, float]:
    """The resources of each rank; raises if the cluster does not have them for all ranks. (After a rank is lost it may
    take a while until they are free again: `_Group` waits for that.)"""
    available = ray.cluster_resources()
    wanted = {"CPU": 1.0} if config.device == "cpu" or not available.get("GPU") else {"CPU": 1.0, "GPU": 1.0}
    for kind, each in wanted.items():
        if available.get(kind, 0) < each * count:
            raise UserError(
                f"`parallel.ray`: {count} ranks need {each * count:g} {kind}s, but the Ray cluster has"
                f" {available.get(kind, 0):g}: start fewer ranks (`parallel.gpus`), or add nodes"
            )
    return wanted


class _Group:
    """The ranks of one attempt."""

    def __init__(self, ray: Any, count: int, resources: dict[str, float], minutes: float) -> None:
        """Places all ranks, or raises after `minutes` without room for them."""
        self._ray, self._signals = ray, ForwardedSignals()
        self._actors: list[Any] = []
        self._placed = ray.util.placement_group([resources] * count, strategy="PACK")
        try:
            if not ray.wait([self._placed.ready()], timeout=60 * minutes)[0]:
                raise UserError(
                    f"`parallel.ray`: the cluster had no room for {count} ranks of {resources} within"
                    f" {minutes:g} minutes (`run.distributed_timeout_minutes`): start fewer ranks (`parallel.gpus`),"
                    " or add nodes"
                )
            self._actors = [self._actor(resources, place) for place in range(count)]
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> _Group:
        return self

    def __exit__(self, *_: object) -> None:
        """Kills the actors and frees their resources, however the attempt ended."""
        for actor in self._actors:
            self._ray.kill(actor)
        self._ray.util.remove_placement_group(self._placed)

    def _start(self, job: Job, failures: list[Failure]) -> dict[Any, int]:
        """Starts the ranks. Returns the future of each rank's end with the rank's number, or nothing if a rank is lost
        before it starts."""
        ray, count = self._ray, len(self._actors)
        places = []
        for place, found in enumerate([actor.locate.remote() for actor in self._actors]):
            try:
                places.append(ray.get(found))
            except ray.exceptions.RayActorError as error:
                failures.append(_lost(place, error))
                return {}
        order = sorted(range(count), key=lambda place: places[place][0])  # ranks of a node are neighbours
        self._actors = [self._actors[place] for place in order]
        nodes = [places[place][0] for place in order]
        _, address, port = places[order[0]]
        shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
        running = {}
        for rank, (actor, node) in enumerate(zip(self._actors, nodes, strict=True)):
            # Ray shows each actor only its own GPU, as number 0.
            mine = {"RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(nodes.count(node))}
            running[actor.run.remote(job, {**shared, **mine}, os.getcwd())] = rank
        return running

    def _actor(self, resources: dict[str, float], place: int) -> Any:
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._placed, placement_group_bundle_index=place
        )
        # max_concurrency=2: a signal must reach an actor that waits for its rank.
        actor_class = self._ray.remote(RankActor).options(
            num_cpus=resources["CPU"], num_gpus=resources.get("GPU", 0), scheduling_strategy=strategy, max_concurrency=2
        )
        return actor_class.remote()

    def run(self, job: Job) -> Ended:
        """Runs the ranks, and returns how the run ended: with the first failure, where a lost rank comes before the
        errors that followed from it."""
        codes: list[int] = []
        failures: list[Failure] = []
        running = self._start(job, failures)
        before = install_handlers(self._forward)
        try:
            while running:
                done, _ = self._ray.wait(list(running), timeout=1.0)
                if not done and not self._signals.seconds_left:
                    break
                for one in done:
                    code, failure = self._ended(one, running.pop(one))
                    codes.append(self._signals.rank_ended(code))
                    failures += [failure] if failure is not None else []
        finally:
            restore_handlers(before)
        first = min(failures, key=lambda one: (not one.lost, one.when), default=None)
        if self._signals.sent and (first is None or first.lost) and (running or first is not None):
            # The run was stopped by a signal: ranks that did not handle it, or were lost meanwhile, do not restart.
            return STOPPED, None
        return next((code for code in codes if code), 1 if failures else 0), first

    def _ended(self, one: Any, rank: int) -> Ended:
        try:
            code, failure = self._ray.get(one)
            return code, failure if code not in (0, STOPPED) else None
        except self._ray.exceptions.RayActorError as error:
            return 1, _lost(rank, error)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """Forwards Ctrl-C and SIGTERM to the ranks, which finish and save the step under way."""
        self._signals.record(number)
        for actor in self._actors:
            actor.send.remote(number)


def _lost(rank: int, error: Exception) -> Failure:
    return Failure(rank, " ".join(str(error).split()), False, time.time(), lost=True)
