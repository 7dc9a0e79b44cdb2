"""A rollout worker: a rank that only generates (`parallel.rollout_gpus`), for the training ranks that send requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from ebbtide.config.root import Config
from ebbtide.memory.host import frozen_gc
from ebbtide.parallel.partition import balance
from ebbtide.progress import WorkAbandoned
from ebbtide.rollout.engine import PreemptingEngine, request_sizes
from ebbtide.rollout.weights.channel import GenerateRequest, RolloutChannel, sent_weights
from ebbtide.rollout.weights.remote import Answer
from ebbtide.system.signals import install_handlers, restore_handlers
from ebbtide.worker import Worker


def generation_worker(config: Config, channel: RolloutChannel) -> None:
    """Runs a rollout worker: it loads the model and serves requests until the training ranks end."""
    with _first_signal_ignored(config) as signalled, Worker(config, trains=False) as worker, frozen_gc():
        engine = worker.engine
        while (request := _next_request(channel, signalled)) is not None:
            if request.sends_weights:
                channel.receive(sent_weights(worker.loaded.model, request))
            share = balance(request_sizes(request.requests, request.sampling), channel.generating)[channel.worker_index]
            answer: Answer = [], 0
            if share:
                try:
                    done = worker.sample(
                        [request.requests[index] for index in share], request.sampling, channel.progress_reporter()
                    )
                    answer = done, engine.preempted if isinstance(engine, PreemptingEngine) else 0
                except WorkAbandoned:
                    answer = None
            channel.report_progress(1, 1)
            channel.gather_completions(answer)


def _next_request(channel: RolloutChannel, signalled: Callable[[], bool]) -> GenerateRequest | None:
    try:
        return channel.broadcast_request()
    except RuntimeError:  # the training ranks have exited
        if signalled():
            raise KeyboardInterrupt from None
        raise


@contextmanager
def _first_signal_ignored(config: Config) -> Iterator[Callable[[], bool]]:
    """Ignores the first Ctrl-C or SIGTERM: the training ranks get it too, and still finish and save their step. The
    second ends this rank. Yields a function that tells whether there was one."""
    signalled = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal signalled
        if signalled:
            raise KeyboardInterrupt
        signalled = True

    # without checkpoints there is nothing to save
    before = install_handlers(handle) if config.checkpoint is not None else {}
    try:
        yield lambda: signalled
    finally:
        restore_handlers(before)
