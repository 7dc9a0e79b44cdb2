"""Between the ranks that train and those that only generate: orders one way, completions the other, and the weights in buckets. Each kind is a world of its own, as torch sees it; this is all that joins them."""

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

from ebbtide.memory.shards import local, shared_out
from ebbtide.planner.ranks import SENT
from ebbtide.progress import GivenUp, Progress
from ebbtide.rollout.engine import Request, Sampling

TICK = 0.005  # seconds between looks at what has come: signals are heard in between
TOLD = 0.5  # seconds between words on how far a rank is
GIVEN_UP = "given up"  # the number of the order that is
FOREVER = timedelta(days=365)  # one side waits for as long as the other works; one that ends or gets no further ends the wait


@dataclass(frozen=True)
class Order:
    """What is to be generated next."""

    requests: list[Request]
    sampling: Sampling
    fresh: bool
    """Weights come first: they are not those of the last order."""


class Link:
    """Ranks 0 to `training - 1` train, `generating` more generate. All calls are made by all ranks, in the same order, but for those that say otherwise."""

    def __init__(self, store: Store, rank: int, training: int, generating: int, device: torch.device, timeout: timedelta) -> None:
        self.rank, self.training, self.generating = rank, training, generating
        self._store, self._timeout = PrefixStore("done", store), timeout
        self._calls = self._words = 0
        # On the host, as all that is said in words.
        self._talk: Any = dist.ProcessGroupGloo(PrefixStore("talk", store), rank, training + generating, FOREVER)
        self._weights: Any = None
        if rank == 0 or self.generates:
            place, count = (0 if rank == 0 else 1 + rank - training), 1 + generating
            self._weights = _group(PrefixStore("weights", store), place, count, device, timeout)

    @property
    def generates(self) -> bool:
        """This rank is one of those that only generate."""
        return self.rank >= self.training

    @property
    def place(self) -> int:
        """Of this rank among those that generate."""
        return self.rank - self.training

    def ordered(self, order: Order | None = None) -> Order | None:
        """The first rank's order, on all of them; None is the end."""
        self._calls += 1
        start = time.monotonic()

        def look() -> None:
            # Those that generate wait for the others' work; and the first time, the others for them to load their model.
            if not self.generates and self._calls > 1 and time.monotonic() - start > self._timeout.total_seconds():
                raise self._late("another rank did not come for the next prompts")

        found: Order | None = self._said(order, 0, look)
        return found

    def answered(self, mine: Any = None, meanwhile: Callable[[], None] = lambda: None) -> list[Any]:
        """What each rank that generates has, on all of them."""
        return [self._said(mine, source, meanwhile) for source in range(self.training, self.training + self.generating)]

    def end(self, *, stopped: bool) -> None:
        """No more orders: where nothing went wrong, or the run was `stopped`."""
        if not self.generates:
            with suppress(RuntimeError) if stopped else nullcontext():  # those that were told twice to stop may be gone already
                self.ordered(None)
        if self._weights is not None:
            self._weights.shutdown()

    # Weights

    @torch.no_grad()
    def send(self, weights: Iterable[nn.Parameter], bucket: int = SENT) -> None:
        """Called by those that train: of each bucket they put the parts together, and the first rank sends it."""
        for some in buckets(weights, bucket):
            whole = [weight.full_tensor() if shared_out(weight) else weight.detach() for weight in some]
            if self._weights is not None:
                flat = whole[0].reshape(-1) if len(whole) == 1 else torch.cat([tensor.reshape(-1) for tensor in whole])
                self._weights.broadcast(flat, 0).wait()

    @torch.no_grad()
    def receive(self, weights: Iterable[nn.Parameter], bucket: int = SENT) -> None:
        """Called by those that generate: into these very tensors, which keep their addresses."""
        for some in buckets(weights, bucket):
            targets = [local(weight).view(-1) for weight in some]
            flat = targets[0] if len(targets) == 1 else targets[0].new_empty(sum(target.numel() for target in targets))
            self._weights.broadcast(flat, 0).wait()
            if len(targets) > 1:
                for target, part in zip(targets, flat.split([target.numel() for target in targets]), strict=True):
                    target.copy_(part)

    # How far the ranks are that generate: the first rank shows it, and sees to it that they get further

    def tell(self, done: int, of: int) -> None:
        """Of a rank that generates: so much of this order."""
        self._words += 1  # so that one who is slow is not taken for one who hangs
        self._store.set(str(self.place), f"{self._calls} {self._words} {done} {of}")

    def teller(self) -> Progress:
        """The same, now and then; and raises where the first rank has given this order up."""
        last = time.monotonic()

        def tell(done: int, of: int) -> None:
            nonlocal last
            if time.monotonic() - last > TOLD:
                last = time.monotonic()
                self.tell(done, of)
                if self._store.check([GIVEN_UP]) and int(self._store.get(GIVEN_UP)) == self._calls:
                    raise GivenUp

        return tell

    def shown(self, of: int, progress: Progress) -> Callable[[], None]:
        """For the first rank, which waits: passes on how many of so many samples are done. Raises when no rank has got any further for as long as ranks wait for each other."""
        last = moved = time.monotonic()
        before: list[list[int]] = []

        def look() -> None:
            nonlocal last, moved, before
            if self.rank != 0 or time.monotonic() - last <= TOLD:
                return
            last = time.monotonic()
            places = [str(place) for place in range(self.generating)]
            words = [[int(word) for word in self._store.get(place).split()] if self._store.check([place]) else [0] for place in places]
            if words != before:
                before, moved = words, last
            # Each in units of its own engine; all have about as much.
            parts = [word[2] / word[3] if word[0] == self._calls else 0.0 for word in words]
            try:
                progress(int(of * sum(parts) / self.generating), of)
            except GivenUp:  # all are to give it up: they answer as soon as they see it
                self._store.set(GIVEN_UP, str(self._calls))
            if last - moved > self._timeout.total_seconds():
                late = " and ".join(f"rank {self.training + place}" for place, part in enumerate(parts) if part < 1)
                raise self._late(f"{late or 'another rank'} got no further")

        return look

    def _late(self, what: str) -> RuntimeError:
        return RuntimeError(f"{what} for {self._timeout.total_seconds() / 60:g} minutes (`run.distributed_timeout_minutes`)")

    def _said(self, value: Any, source: int, meanwhile: Callable[[], None] = lambda: None) -> Any:
        """What a rank says, on all of them."""
        said = pickle.dumps(value) if self.rank == source else b"\0"
        data = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        size = torch.tensor([data.numel()])
        self._wait(self._talk.broadcast(size, source), meanwhile)
        if self.rank != source:
            data = torch.empty(int(size), dtype=torch.uint8)
        self._wait(self._talk.broadcast(data, source), meanwhile)
        return pickle.loads(data.numpy().tobytes())  # noqa: S301 (a rank of this run's own)

    def _wait(self, work: dist.Work, meanwhile: Callable[[], None]) -> None:
        while not work.is_completed():
            meanwhile()
            time.sleep(TICK)
        work.wait()


def _group(store: Store, rank: int, count: int, device: torch.device, timeout: timedelta) -> Any:
    """On the device. Not one of torch's registered groups: those are of one world, and here two meet."""
    if device.type != "cuda":
        return dist.ProcessGroupGloo(store, rank, count, timeout)
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout, options.group_name = timeout, "ebbtide weights"
    return dist.ProcessGroupNCCL(store, rank, count, options)


def buckets(weights: Iterable[nn.Parameter], bucket: int) -> Iterator[list[nn.Parameter]]:
    """Neighbours of one type, together of at most so many bytes; one that is larger goes alone."""
    held: list[nn.Parameter] = []
    for weight in weights:
        if held and (weight.dtype != held[0].dtype or (sum(one.numel() for one in held) + weight.numel()) * weight.dtype.itemsize > bucket):
            yield held
            held = []
        held.append(weight)
    if held:
        yield held
