"""Joins a process to the ranks it was started with: by `torchrun`, by Ebbtide itself, or as a single process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import torch
from torch.distributed.rendezvous import rendezvous

from ebbtide.config.parallel import ParallelConfig
from ebbtide.config.root import Config
from ebbtide.errors import UserError
from ebbtide.model.load import pick_device
from ebbtide.parallel.comm import Comm, DistributedComm
from ebbtide.rollout.weights.channel import RolloutChannel


@contextmanager
def join(config: Config) -> Iterator[tuple[Comm, RolloutChannel | None]]:
    """This process's `Comm`, and the channel between training and generating ranks where some ranks only generate.

    A rank that only generates has a single-process `Comm`.
    """
    comm, channel = _connect(config)
    with comm, channel or nullcontext():
        yield comm, channel


def _connect(config: Config) -> tuple[Comm, RolloutChannel | None]:
    parallel = config.parallel or ParallelConfig()
    count, generating = int(os.environ.get("WORLD_SIZE", "1")), parallel.rollout_gpus
    _check_count(parallel, count)
    if count == 1:
        return Comm(), None
    if config.single_rank_only is not None:
        raise UserError(
            f"{count} ranks were started, but `{config.single_rank_only}` works with one rank only so far:"
            " start one, or remove it"
        )
    if torch.cuda.is_available() and config.device != "cpu":
        local_rank, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local_rank >= gpus:
            raise UserError(
                f"rank {local_rank} of this machine has no GPU of its own: torch sees {gpus}."
                f" Start at most {gpus} ranks here (`parallel.gpus`, `parallel.rollout_gpus`), or set `device: cpu`"
            )
        torch.cuda.set_device(local_rank)
    device, timeout = pick_device(config.device), timedelta(minutes=config.run.distributed_timeout_minutes)
    store, rank, _ = next(rendezvous("env://", timeout=timeout))
    training = count - generating
    comm = Comm()
    if training > 1 and rank < training:
        comm = DistributedComm(parallel, device, store, rank, training, timeout)
    return comm, RolloutChannel(store, rank, training, generating, device, timeout) if generating else None


def _check_count(parallel: ParallelConfig, count: int) -> None:
    """Raises unless the config is for `count` ranks."""
    training, unit = count - parallel.rollout_gpus, parallel.tensor * parallel.replicate
    if training > 0 and parallel.ranks in (None, training) and training % unit == 0:
        return
    beside = f" that train and {parallel.rollout_gpus} that only generate" if parallel.rollout_gpus else ""
    wanted = f"{parallel.ranks or f'a multiple of {unit}'}{beside}"
    raise UserError(f"{count} ranks were started, but `parallel` is for {wanted}: start as many, or change it")
