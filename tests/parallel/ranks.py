"""Runs of several ranks on this machine: processes forked from one that has imported everything and computed
nothing."""

import faulthandler
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import socket
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from patience import PATIENCE

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "ranks",
        "ebbtide.algorithms.grpo",
        "ebbtide.report.null_report",
        "ebbtide.parallel.comm",
        "ebbtide.launch.run_rank",
    ]
)
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
PORTS_EACH, PORTS = 2_000, itertools.count()


def together(count: int, work: Any, *args: Any) -> list[Any]:
    """What `work(rank, *args)` gives on each of so many ranks; what goes wrong on one is raised here."""
    ports = free_ports(20)
    ends: dict[Any, tuple[int, Any]] = {}
    for rank in range(count):
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=_rank, args=(theirs, rank, count, ports, work, args))
        process.start()
        theirs.close()
        ends[ours] = rank, process
    results: dict[int, Any] = {}
    try:
        while len(results) < count:
            spoke = multiprocessing.connection.wait(
                [end for end, (rank, _) in ends.items() if rank not in results], PATIENCE
            )
            assert spoke, f"only ranks {sorted(results)} ended"
            for end in spoke:
                rank, process = ends[end]
                try:
                    problem, results[rank] = end.recv()  # type: ignore[union-attr]
                except EOFError:
                    process.join()
                    raise AssertionError(
                        f"rank {rank} ended with code {process.exitcode}, and had said nothing"
                    ) from None
                assert problem is None, f"rank {rank}: {problem}"
        return [results[rank] for rank in range(count)]
    finally:
        for _, process in ends.values():
            process.kill()
            process.join()


def free_ports(count: int) -> list[int]:
    """One for each process group that ranks make: what is left of an earlier one is never met.

    They are below those that the system gives to connections, and each test process has a range of its own: a port
    that was free a moment ago is free still.
    """
    found: list[int] = []
    while len(found) < count:
        port = 20_000 + PORTS_EACH * WORKER + next(PORTS) % PORTS_EACH
        with suppress(OSError), socket.socket() as one:
            one.bind(("127.0.0.1", port))
            found.append(port)
    return found


def _rank(end: Any, rank: int, count: int, ports: list[int], work: Any, args: Any) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "PORTS": json.dumps(ports),
    }
    torch.set_num_threads(1)
    faulthandler.enable()
    try:
        end.send((None, work(rank, *args)))
    except BaseException:
        end.send((traceback.format_exc(), None))


def next_port() -> None:
    """Before each process group that a rank makes."""
    port, *rest = json.loads(os.environ["PORTS"])
    os.environ |= {"MASTER_PORT": str(port), "PORTS": json.dumps(rest)}


def runs(rank: int, configs: list[Any]) -> list[dict[str, Any]]:
    """One run after the other."""
    return [run(rank, config) for config in configs]


def run(rank: int, config: Any, resume: str | None = None) -> dict[str, Any]:
    """One run: its metrics, its whole weights, and the shapes of what this rank has of them."""
    from ebbtide.algorithms.loop import train
    from ebbtide.checkpoint.store import list_checkpoints
    from ebbtide.launch.generation_worker import generation_worker
    from ebbtide.launch.join import join
    from ebbtide.parallel.dtensor import local
    from ebbtide.report.null_report import NullReport
    from ebbtide.report.report import Report

    next_port()
    folder = Path(config.run.folder)
    resumed = list_checkpoints(Path(resume) / "checkpoints")[-1] if resume else None
    with join(config) as (comm, channel):
        if channel is not None and channel.is_rollout_worker:
            generation_worker(config, channel)
            return {}
        with Report(config, "test", resumed=resumed) if comm.is_main else NullReport(folder, resumed) as report:
            policy = train(config, report, comm=comm, channel=channel)
        weights = {}
        for name, parameter in policy.model.named_parameters():
            whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            weights[name] = whole.detach().float().clone().numpy()
        shapes = {name: tuple(local(parameter).shape) for name, parameter in policy.model.named_parameters()}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    sampled = folder / "rollouts.jsonl"
    rollouts = sampled.read_text() if sampled.exists() else ""
    return {"metrics": lines, "weights": weights, "shapes": shapes, "rollouts": rollouts}
