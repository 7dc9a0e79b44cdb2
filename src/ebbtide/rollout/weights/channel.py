"""The channel between the training ranks and the rollout workers, which only generate: requests go one way,
completions the other, and weights are broadcast in buckets. Either side is a torch.distributed world of its own; this
channel is all that connects them."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore, Store

from ebbtide.errors import RunStopped
from ebbtide.parallel.costs import WEIGHT_SYNC_BUCKET
from ebbtide.parallel.dtensor import is_sharded, local
from ebbtide.progress import Progress, WorkAbandoned
from ebbtide.rollout.engine import Request, SamplingParams
from ebbtide.system.torch_internals import gloo_group, nccl_group

POLL_EVERY = 0.005  # seconds between checks whether a message has come: signals are handled in between
PROGRESS_EVERY = 0.5  # seconds between progress messages of a rank
GIVEN_UP = "given up"  # the store's key for the number of the call that the first rank gave up
# One side waits for as long as the other works. A rank that exits or makes no progress ends the wait by other means.
FOREVER = timedelta(days=365)


@dataclass(frozen=True)
class GenerateRequest:
    """What the rollout workers generate next."""

    requests: list[Request]
    sampling: SamplingParams
    sends_weights: bool
    """Whether weights are sent first, because they changed since the last request."""
    sends_base: bool = False
    """Whether these are all weights, and not the adapters alone."""


class RolloutChannel:
    """Ranks 0 to `training - 1` train, and `generating` more are rollout workers. All ranks make all calls in the same
    order, except for those that say otherwise."""

    def __init__(
        self, store: Store, rank: int, training: int, generating: int, device: torch.device, timeout: timedelta
    ) -> None:
        self.rank, self.training, self.generating = rank, training, generating
        self._store, self._timeout = PrefixStore("done", store), timeout
        self._calls = self._messages = 0
        # Objects are sent between hosts; only weights are sent between devices.
        self._objects: Any = gloo_group(PrefixStore("requests", store), rank, training + generating, FOREVER)
        self._weights: Any = None
        if rank == 0 or self.is_rollout_worker:
            place, count = (0 if rank == 0 else 1 + rank - training), 1 + generating
            self._weights = _group(PrefixStore("weights", store), place, count, device, timeout)

    @property
    def is_rollout_worker(self) -> bool:
        """Whether this rank is a rollout worker."""
        return self.rank >= self.training

    @property
    def worker_index(self) -> int:
        """The index of this rank among the rollout workers."""
        return self.rank - self.training

    def describe(self) -> str:
        """The rollout workers in one sentence, for the user."""
        ranks = f"{self.generating} {'ranks' if self.generating > 1 else 'rank'}"
        return f"{ranks} more, only to generate, each with the whole model"

    def broadcast_request(self, request: GenerateRequest | None = None) -> GenerateRequest | None:
        """Broadcasts the first rank's request to all ranks; None ends the rollout workers."""
        self._calls += 1
        start = time.monotonic()

        def check() -> None:
            # Rollout workers wait for as long as the others train. At the first call, the others wait for as long as
            # the workers load their model.
            if (
                not self.is_rollout_worker
                and self._calls > 1
                and time.monotonic() - start > self._timeout.total_seconds()
            ):
                raise self._timeout_error("another rank did not come for the next prompts")

        received: GenerateRequest | None = self._broadcast(request, 0, check)
        return received

    def gather_completions(self, mine: Any = None, meanwhile: Callable[[], None] = lambda: None) -> list[Any]:
        """All-gathers the answers of the rollout workers: every rank gets those of all of them."""
        return [
            self._broadcast(mine, source, meanwhile) for source in range(self.training, self.training + self.generating)
        ]

    def __enter__(self) -> RolloutChannel:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, RunStopped):
            self.end(stopped=kind is not None)

    def end(self, *, stopped: bool) -> None:
        """Ends the rollout workers, after a run that succeeded or was `stopped`."""
        if not self.is_rollout_worker:
            # Ranks that got a second signal may have exited already.
            with suppress(RuntimeError) if stopped else nullcontext():
                self.broadcast_request(None)
        if self._weights is not None:
            self._weights.shutdown()

    # Weights

    @torch.no_grad()
    def send(self, weights: Iterable[nn.Parameter], bucket: int = WEIGHT_SYNC_BUCKET) -> None:
        """Sends the weights, on the training ranks: they all-gather each bucket, and the first rank broadcasts it."""
        for some in buckets(weights, bucket):
            full = [weight.full_tensor() if is_sharded(weight) else weight.detach() for weight in some]
            if self._weights is not None:
                flat = full[0].reshape(-1) if len(full) == 1 else torch.cat([tensor.reshape(-1) for tensor in full])
                self._weights.broadcast(flat, 0).wait()

    @torch.no_grad()
    def receive(self, weights: Iterable[nn.Parameter], bucket: int = WEIGHT_SYNC_BUCKET) -> None:
        """Receives the weights, on the rollout workers: into these tensors, which keep their addresses."""
        for some in buckets(weights, bucket):
            targets = [local(weight).view(-1) for weight in some]
            flat = targets[0] if len(targets) == 1 else targets[0].new_empty(sum(target.numel() for target in targets))
            self._weights.broadcast(flat, 0).wait()
            if len(targets) > 1:
                for target, part in zip(targets, flat.split([target.numel() for target in targets]), strict=True):
                    target.copy_(part)

    # Progress of the rollout workers: the first rank shows it, and raises if there is none

    def report_progress(self, done: int, of: int) -> None:
        """Reports, on a rollout worker, how much of this request is done."""
        self._messages += 1  # so that a slow rank differs from one that hangs
        self._store.set(str(self.worker_index), f"{self._calls} {self._messages} {done} {of}")

    def progress_reporter(self) -> Progress:
        """Returns a callback that reports progress every `PROGRESS_EVERY` seconds, and raises if the first rank has
        given this request up."""
        last = time.monotonic()

        def tell(done: int, of: int) -> None:
            nonlocal last
            if time.monotonic() - last > PROGRESS_EVERY:
                last = time.monotonic()
                self.report_progress(done, of)
                if self._store.check([GIVEN_UP]) and int(self._store.get(GIVEN_UP)) == self._calls:
                    raise WorkAbandoned

        return tell

    def progress_monitor(self, of: int, progress: Progress) -> Callable[[], None]:
        """Returns a callback for the first rank, which waits: it shows how many of `of` samples are done, and raises if
        no rollout worker has made progress for `run.distributed_timeout_minutes`."""
        last = moved = time.monotonic()
        before: list[list[int]] = []

        def show() -> None:
            nonlocal last, moved, before
            if self.rank != 0 or time.monotonic() - last <= PROGRESS_EVERY:
                return
            last = time.monotonic()
            places = [str(place) for place in range(self.generating)]
            messages = [
                [int(number) for number in self._store.get(place).split()] if self._store.check([place]) else [0]
                for place in places
            ]
            if messages != before:
                before, moved = messages, last
            # Each counts in units of its own engine; all have about equal shares.
            parts = [message[2] / message[3] if message[0] == self._calls else 0.0 for message in messages]
            try:
                progress(int(of * sum(parts) / self.generating), of)
            except WorkAbandoned:  # all workers give up as well: they answer as soon as they see this
                self._store.set(GIVEN_UP, str(self._calls))
            if last - moved > self._timeout.total_seconds():
                late = " and ".join(f"rank {self.training + place}" for place, part in enumerate(parts) if part < 1)
                raise self._timeout_error(f"{late or 'another rank'} got no further")

        return show

    def _timeout_error(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"{what} for {self._timeout.total_seconds() / 60:g} minutes (`run.distributed_timeout_minutes`)"
        )

    def _broadcast(self, value: Any, source: int, meanwhile: Callable[[], None] = lambda: None) -> Any:
        """Broadcasts an object from rank `source` to all ranks."""
        pickled = pickle.dumps(value) if self.rank == source else b"\0"
        data = torch.frombuffer(bytearray(pickled), dtype=torch.uint8)
        size = torch.tensor([data.numel()])
        self._wait(self._objects.broadcast(size, source), meanwhile)
        if self.rank != source:
            data = torch.empty(int(size), dtype=torch.uint8)
        self._wait(self._objects.broadcast(data, source), meanwhile)
        return pickle.loads(data.numpy().tobytes())  # noqa: S301 (from a rank of this run)

    def _wait(self, work: dist.Work, meanwhile: Callable[[], None]) -> None:
        while not work.is_completed():
            meanwhile()
            time.sleep(POLL_EVERY)
        work.wait()


def _group(store: Store, rank: int, count: int, device: torch.device, timeout: timedelta) -> Any:
    """Makes a process group for weights on the device. It is not registered with torch.distributed, whose groups are
    all of one world: this one spans two."""
    if device.type != "cuda":
        return gloo_group(store, rank, count, timeout)
    return nccl_group(store, rank, count, timeout, "ebbtide weights")


def sent_weights(model: nn.Module, request: GenerateRequest) -> list[nn.Parameter]:
    """The weights of a model that are sent with a request, on either side."""
    return [weight for weight in model.parameters() if request.sends_base or weight.requires_grad]


def buckets(weights: Iterable[nn.Parameter], bucket: int) -> Iterator[list[nn.Parameter]]:
    """Yields consecutive weights of one dtype, of at most `bucket` bytes together; a larger one is alone."""
    pending: list[nn.Parameter] = []
    for weight in weights:
        if pending and (
            weight.dtype != pending[0].dtype
            or (sum(one.numel() for one in pending) + weight.numel()) * weight.dtype.itemsize > bucket
        ):
            yield pending
            pending = []
        pending.append(weight)
    if pending:
        yield pending
