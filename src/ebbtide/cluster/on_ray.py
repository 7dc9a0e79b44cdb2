"""Ranks placed by Ray over the nodes of its cluster: an actor keeps each, and when one is lost all start again from the last checkpoint. Imports no torch."""

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
from ebbtide.checkpoint.store import listed, newest_sound
from ebbtide.cluster.launch import TICK, Asked, Looks, free_port, killed_by, show, start_rank
from ebbtide.cluster.leash import Failure, Job
from ebbtide.config.tree import Config
from ebbtide.errors import UserError
from ebbtide.report.folder import RunFolder
from ebbtide.stop import STOPPED, give_back, handled, in_order

Ended = tuple[int, Failure | None]
"""Exit code of a rank, and what ended it if that was an error."""


class RankActor:
    """Keeps one rank, a process on its node: that ends with the actor, however the actor ends. What the first rank says, Ray streams to the driver."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._asked = Asked()
        self._starting = threading.Lock()

    def where(self) -> tuple[str, str, int]:
        """(node, its address, a free port there)."""
        import ray

        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), free_port()

    def run(self, job: Job, environment: dict[str, str], cwd: str) -> Ended:
        with tempfile.TemporaryDirectory(prefix="ebbtide-") as name:
            folder = Path(name)
            job.write(folder)
            with self._starting:
                if self._asked.sent:
                    return STOPPED, None
                leash, end = os.pipe()
                self._process = start_rank(folder, environment, leash, cwd)
            os.close(leash)
            looks, stopped = Looks(int(environment["RANK"]), self._process), None
            while (ended := _ended_within(self._process, TICK)) is None:
                if (stopped := stopped or looks.failure()) is not None:
                    self._process.kill()
            os.close(end)
            if stopped is not None:
                return 2, stopped
            code = self._asked.ended(ended)
            return (code, Failure.first(folder)) if code >= 0 else (1, killed_by(folder, int(environment["RANK"]), -code, time.time()))

    def send(self, number: int) -> None:
        """Passes a signal on to the rank."""
        with self._starting:
            self._asked.note(number)
            if self._process is not None and self._process.poll() is None:
                self._process.send_signal(number)


def _ended_within(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Its exit code."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def launch_on_ray(job: Job, count: int, say: Callable[[str], None]) -> int:
    """The exit code of a run of so many ranks; what a user can mend is raised."""
    with in_order():
        return _launch(job, count, say)


def _launch(job: Job, count: int, say: Callable[[str], None]) -> int:
    cluster = job.config.cluster
    assert cluster is not None  # the config has the section
    ray = _connected(cluster.ray or "auto", count, job.config)
    try:
        resources = _resources(ray, job.config, count)
        folder: RunFolder | None = None
        for left in range(cluster.tries, -1, -1):
            with _Group(ray, count, resources, job.config.run.distributed_timeout_minutes) as group:
                if folder is None:
                    folder, job = _taken(job, say)
                code, failure = group.run(job)
            if failure is None or not failure.lost or left == 0:
                if code == 2 and job.resumed is None:
                    folder.leave()
                if failure is not None:
                    show(failure, count, say)
                return code
            saved = newest_sound(partial(listed, folder.path / FOLDER), say)
            begin = "anew" if saved is None else f"after step {saved.step}"
            say(f"rank {failure.rank} of {count} was lost ({failure.text.splitlines()[0]}): starting again {begin}, {left} tries left")
            job = replace(job, resumed=saved)
        raise AssertionError("the last try returns")
    finally:
        ray.shutdown()


def _taken(job: Job, say: Callable[[str], None]) -> tuple[RunFolder, Job]:
    """The run's folder, and the job with it: what is in it from now on is of this run, however early its first rank is lost."""
    folder = RunFolder(job.config, job.resumed)
    folder.close()
    for path in folder.aside:
        say(f"a later checkpoint is kept aside, and yours to remove: {path}")
    run = job.config.run.model_copy(update={"folder": str(folder.path.absolute()), "overwrite": True})
    # Whoever starts again resumes: what checkpoints there are by then are never removed.
    return folder, replace(job, config=job.config.model_copy(update={"run": run, "resume": "auto"}))


def _connected(address: str, count: int, config: Config) -> Any:
    if importlib.util.find_spec("ray") is None:
        raise UserError(f"`cluster.ray: {address}` needs the package ray: pip install 'ebbtide[ray]'")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # ranks without a GPU keep their view of the devices
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # one rank speaks: what it says twice, it means twice
    import ray

    paths = os.pathsep.join(path for path in sys.path if path)
    options: dict[str, Any] = {"runtime_env": {"env_vars": {"PYTHONPATH": paths}}, "logging_level": logging.ERROR}
    try:
        ray.init(address=address, **options)
    except ConnectionError as error:
        if address != "auto":
            raise UserError(
                f"`cluster.ray: {address}`: no Ray answers there ({error}): check the address, or set `cluster.ray: auto`"
            ) from None
        # One for this run. On a CPU ranks may be more than cores.
        ray.init(address="local", num_cpus=max(count, os.cpu_count() or 1), include_dashboard=False, **options)
    return ray


def _resources(ray: Any, config: Config, count: int) -> dict[str, float]:
    """Of each rank, where the cluster has them for all. When one is lost it may take a while until it has them again."""
    there = ray.cluster_resources()
    wanted = {"CPU": 1.0} if config.device == "cpu" or not there.get("GPU") else {"CPU": 1.0, "GPU": 1.0}
    for kind, each in wanted.items():
        if there.get(kind, 0) < each * count:
            raise UserError(
                f"`cluster.ray`: {count} ranks need {each * count:g} {kind}s, and the Ray cluster has {there.get(kind, 0):g}: start fewer, or add nodes"
            )
    return wanted


class _Group:
    """The ranks of one try."""

    def __init__(self, ray: Any, count: int, resources: dict[str, float], minutes: float) -> None:
        """There is room for all of them within so many minutes, or an error."""
        self._ray, self._asked = ray, Asked()
        self._actors: list[Any] = []
        self._placed = ray.util.placement_group([resources] * count, strategy="PACK")
        try:
            if not ray.wait([self._placed.ready()], timeout=60 * minutes)[0]:
                raise UserError(
                    f"`cluster.ray`: no room for {count} ranks of {resources} within {minutes:g} minutes: start fewer, or add nodes"
                )
            self._actors = [self._actor(resources, place) for place in range(count)]
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> _Group:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing of it stays, whatever came of it."""
        for actor in self._actors:
            self._ray.kill(actor)
        self._ray.util.remove_placement_group(self._placed)

    def _start(self, job: Job, failures: list[Failure]) -> dict[Any, int]:
        """What each rank's end will be, and its number; nothing where one is lost before it begins."""
        ray, count = self._ray, len(self._actors)
        places = []
        for place, found in enumerate([actor.where.remote() for actor in self._actors]):
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
            # Ray shows each actor its own GPU only: that is number 0 there.
            mine = {"RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(nodes.count(node))}
            running[actor.run.remote(job, {**shared, **mine}, os.getcwd())] = rank
        return running

    def _actor(self, resources: dict[str, float], place: int) -> Any:
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._placed, placement_group_bundle_index=place)
        # Two at once: a signal must reach an actor that waits for its rank.
        made = self._ray.remote(RankActor).options(
            num_cpus=resources["CPU"], num_gpus=resources.get("GPU", 0), scheduling_strategy=strategy, max_concurrency=2
        )
        return made.remote()

    def run(self, job: Job) -> Ended:
        """How the run ended: with the first failure, and a rank that was lost before any error that followed from it."""
        codes: list[int] = []
        failures: list[Failure] = []
        going = self._start(job, failures)
        before = handled(self._forward)
        try:
            while going:
                done, _ = self._ray.wait(list(going), timeout=1.0)
                if not done and not self._asked.left:
                    break
                for one in done:
                    code, failure = self._ended(one, going.pop(one))
                    codes.append(self._asked.ended(code))
                    failures += [failure] if failure is not None else []
        finally:
            give_back(before)
        first = min(failures, key=lambda one: (not one.lost, one.when), default=None)
        if self._asked.sent and (first is None or first.lost) and (going or first is not None):
            return STOPPED, None  # it was told to stop: those that did not hear it, or were lost meanwhile, are not to start again
        return next((code for code in codes if code), 1 if failures else 0), first

    def _ended(self, one: Any, rank: int) -> Ended:
        try:
            code, failure = self._ray.get(one)
            return code, failure if code not in (0, STOPPED) else None
        except self._ray.exceptions.RayActorError as error:
            return 1, _lost(rank, error)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-C and SIGTERM are the ranks' to handle: the step under way ends and is saved."""
        self._asked.note(number)
        for actor in self._actors:
            actor.send.remote(number)


def _lost(rank: int, error: Exception) -> Failure:
    return Failure(rank, " ".join(str(error).split()), False, time.time(), lost=True)
