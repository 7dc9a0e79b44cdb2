"""Generation apart from training: an engine for the ranks that train, which asks those that only generate; and what such a rank does, from its model to its last order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from ebbtide.cluster.deal import deal, sizes
from ebbtide.cluster.link import Link, Order
from ebbtide.config.tree import Config
from ebbtide.memory.host import bind_near, pci_address, quiet_collector
from ebbtide.memory.limit import limited
from ebbtide.policy.model import load_model, pick_device
from ebbtide.progress import GivenUp, Progress
from ebbtide.rollout.build import build_engine
from ebbtide.rollout.engine import Completion, Preempting, Request, Sampling
from ebbtide.stop import give_back, handled

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Answer = tuple[list[list[Completion]], int] | None
"""Of a rank that generates: completions of its share of the requests, and how many samples gave way. None: given up."""


class ApartEngine:
    """Of a rank that trains: others generate, with its weights. A sample's randomness is its own, so that it does not matter where it is sampled."""

    def __init__(self, model: PreTrainedModel, link: Link, steps: Callable[[], dict[str, int]]) -> None:
        """`steps` of the optimizer: where they are as they were, so are the weights."""
        self._model, self._link, self._steps = model, link, steps
        self._sent: dict[str, int] | None = None
        self.preempted = 0
        """Samples that gave way in the last call, on all ranks."""

    def generate(self, requests: Sequence[Request], sampling: Sampling, progress: Progress) -> list[list[Completion]]:
        now = self._steps()
        order = self._link.ordered(Order(list(requests), sampling, fresh=now != self._sent))
        assert order is not None  # the first rank's, which is such a call too
        if order.fresh:
            self._link.send(self._model.parameters())
            self._sent = now
        shown = self._link.shown(sum(len(request.seeds) for request in requests), progress)
        answers: list[Answer] = self._link.answered(meanwhile=shown)
        done: dict[int, list[Completion]] = {}
        self.preempted = 0
        for hand, answer in zip(deal(sizes(requests, sampling), self._link.generating), answers, strict=True):
            if answer is None:
                raise GivenUp
            done |= zip(hand, answer[0], strict=True)
            self.preempted += answer[1]
        return [done[index] for index in range(len(requests))]


def serve(config: Config, link: Link) -> None:
    """What a rank does that only generates: it carries out orders until there are no more."""
    device = pick_device(config.device)
    if device.type == "cuda":
        bind_near(pci_address(device))
    with _patient(config) as asked, limited(device, config.memory.budget_gib):
        loaded = load_model(config, device)
        engine = build_engine(loaded, config, make_room=lambda size: None)
        with quiet_collector():
            while (order := _next(link, asked)) is not None:
                if order.fresh:
                    link.receive(loaded.model.parameters())
                hand = deal(sizes(order.requests, order.sampling), link.generating)[link.place]
                answer: Answer = [], 0
                if hand:
                    try:
                        done = engine.generate([order.requests[index] for index in hand], order.sampling, link.teller())
                        answer = done, engine.preempted if isinstance(engine, Preempting) else 0
                    except GivenUp:
                        answer = None
                link.tell(1, 1)
                link.answered(answer)


def _next(link: Link, asked: Callable[[], bool]) -> Order | None:
    try:
        return link.ordered()
    except RuntimeError:  # those that train are gone
        if asked():
            raise KeyboardInterrupt from None
        raise


@contextmanager
def _patient(config: Config) -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C or SIGTERM is heard by those that train as well, which still want to end their step and save it; the second ends this rank too. Gives whether there was one."""
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    before = handled(ask) if config.checkpoint is not None else {}  # without one nobody waits
    try:
        yield lambda: asked
    finally:
        give_back(before)
