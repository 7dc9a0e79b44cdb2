"""Ranks placed by Ray over the nodes of its cluster: an actor keeps each, and when one is lost all start again from the last checkpoint. Imports no torch."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from ebbtide.checkpoint.resume import FOLDER
from ebbtide.checkpoint.store import listed, newest_sound
from ebbtide.cluster.launch import GRACE, STOPPED, free_port, killed_by, show, start_rank
from ebbtide.cluster.leash import Failure, Job
from ebbtide.config.tree import Config
from ebbtide.errors import UserError
from ebbtide.report.folder import make_folder

Ended = tuple[int, Failure | None]
"""Exit code of a rank, and what ended it if that was an error."""


class RankActor:
    """Keeps one rank, a process on its node: that ends with the actor, however the actor ends. What the first rank says, Ray streams to the driver."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def where(self) -> tuple[str, str, int]:
        """(node, its address, a free port there)."""
        import ray

        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), free_port()

    def run(self, job: Job, environment: dict[str, str], cwd: str) -> Ended:
        rank = int(environment["RANK"])
        leash, end = os.pipe()
        with tempfile.TemporaryDirectory(prefix="ebbtide-") as name:
            folder = Path(name)
            job.write(folder)
            self._process = start_rank(folder, environment, leash, cwd)
            os.close(leash)
            code = self._process.wait()
            os.close(end)
            return (code, Failure.first(folder)) if code >= 0 else (1, killed_by(folder, rank, -code, time.time()))

    def send(self, number: int) -> None:
        """Passes a signal on to the rank."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


def launch_on_ray(job: Job, count: int, say: Callable[[str], None]) -> int:
    """The exit code of a run of so many ranks; what a user can mend is raised."""
    cluster = job.config.cluster
    assert cluster is not None  # the config has the section
    ray = _connected(cluster.ray or "auto", count, job.config)
    folder = job.resumed.path.parent.parent if job.resumed is not None else make_folder(job.config)[0]
    job = replace(job, config=job.config.model_copy(update={"run": job.config.run.model_copy(update={"folder": str(folder.absolute())})}))
    try:
        for left in range(cluster.tries, -1, -1):
            code, failure = _Group(ray, job, count).wait()
            if failure is None or not failure.lost or left == 0:
                if failure is not None:
                    show(failure, count, say)
                return code
            saved = newest_sound(listed(folder / FOLDER), say)
            begin = "anew" if saved is None else f"after step {saved.step}"
            say(f"rank {failure.rank} of {count} was lost ({failure.text.splitlines()[0]}): starting again {begin}, {left} tries left")
            fresh = job.config.run.model_copy(update={"overwrite": True})
            job = replace(job, resumed=saved, config=job.config if saved else job.config.model_copy(update={"run": fresh}))
        raise AssertionError("the last try returns")
    finally:
        ray.shutdown()


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


class _Group:
    """The ranks of one try."""

    def __init__(self, ray: Any, job: Job, count: int) -> None:
        self._ray = ray
        resources = self._resources(job.config, count)
        self._placed = ray.util.placement_group([resources] * count, strategy="PACK")
        minutes = job.config.run.distributed_timeout_minutes
        if not ray.wait([self._placed.ready()], timeout=60 * minutes)[0]:
            raise UserError(
                f"`cluster.ray`: no room for {count} ranks of {resources} within {minutes:g} minutes: start fewer, or add nodes"
            )
        made = [self._actor(resources, place) for place in range(count)]
        places = ray.get([actor.where.remote() for actor in made])
        order = sorted(range(count), key=lambda place: places[place][0])  # ranks of a node are neighbours
        self._actors = [made[place] for place in order]
        nodes = [places[place][0] for place in order]
        _, address, port = places[order[0]]
        shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
        self._running = {}
        for rank, (actor, node) in enumerate(zip(self._actors, nodes, strict=True)):
            # Ray shows each actor its own GPU only: that is number 0 there.
            mine = {"RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(nodes.count(node))}
            self._running[actor.run.remote(job, {**shared, **mine}, os.getcwd())] = rank

    def _resources(self, config: Config, count: int) -> dict[str, float]:
        there = self._ray.cluster_resources()
        wanted = {"CPU": 1.0} if config.device == "cpu" or not there.get("GPU") else {"CPU": 1.0, "GPU": 1.0}
        for kind, each in wanted.items():
            if there.get(kind, 0) < each * count:
                raise UserError(
                    f"`cluster.ray`: {count} ranks need {each * count:g} {kind}s, and the Ray cluster has {there.get(kind, 0):g}: start fewer, or add nodes"
                )
        return wanted

    def _actor(self, resources: dict[str, float], place: int) -> Any:
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._placed, placement_group_bundle_index=place)
        # Two at once: a signal must reach an actor that waits for its rank.
        made = self._ray.remote(RankActor).options(
            num_cpus=resources["CPU"], num_gpus=resources.get("GPU", 0), scheduling_strategy=strategy, max_concurrency=2
        )
        return made.remote()

    def wait(self) -> Ended:
        """How the run ended: with the first failure, and a rank that was lost before any error that followed from it."""
        before = {number: signal.signal(number, self._forward) for number in (signal.SIGINT, signal.SIGTERM)}
        codes: list[int] = []
        failures: list[Failure] = []
        going = dict(self._running)
        try:
            while going:
                done, _ = self._ray.wait(list(going), timeout=GRACE if failures else 1.0)
                if not done and failures:
                    break
                for one in done:
                    code, failure = self._ended(one, going.pop(one))
                    codes.append(code)
                    failures += [failure] if failure is not None else []
        finally:
            for actor in self._actors:
                self._ray.kill(actor)
            self._ray.util.remove_placement_group(self._placed)
            for number, handler in before.items():
                signal.signal(number, handler)
        first = min(failures, key=lambda one: (not one.lost, one.when), default=None)
        return next((code for code in codes if code), 0), first

    def _ended(self, one: Any, rank: int) -> Ended:
        try:
            code, failure = self._ray.get(one)
            return code, failure if code not in (0, STOPPED) else None
        except self._ray.exceptions.RayActorError as error:
            return 1, Failure(rank, " ".join(str(error).split()), False, time.time(), lost=True)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-C and SIGTERM are the ranks' to handle: the step under way ends and is saved."""
        for actor in self._actors:
            actor.send.remote(number)
