"""`rollout.serve_port`: serves the policy during training, between the rollouts of the loop.

A request waits until the loop has generated or evaluated, and is then answered with the current weights in forward
passes of its own, so that training samples the same bits with and without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from ebbtide.config.root import Config
from ebbtide.config.serve import ServeConfig
from ebbtide.model.load import LoadedModel
from ebbtide.rollout.engine import Engine
from ebbtide.rollout.paged.engine import PagedEngine
from ebbtide.rollout.serve.engine_loop import serve_waiting
from ebbtide.rollout.serve.http import listen, run_http_server, server_url
from ebbtide.rollout.serve.preflight import read_api_key
from ebbtide.rollout.serve.queue import RequestQueue
from ebbtide.rollout.serve.to_request import RequestLimits, describe_served_model


@contextmanager
def serve_during_training(
    engine: Engine, loaded: LoadedModel, config: Config, say: Callable[[str], None]
) -> Iterator[None]:
    """With `rollout.serve_port`, the engine serves waiting requests whenever the samples of the loop are done."""
    rollout = config.rollout
    if rollout.serve_port is None:
        yield
        return
    assert isinstance(engine, PagedEngine)  # the config checks that
    defaults = ServeConfig()
    queue = RequestQueue(defaults.max_queue)
    lengths = rollout.max_prompt_tokens, rollout.max_new_tokens
    limits = RequestLimits(*lengths, sum(lengths), defaults.max_queue)
    policy = config.model
    model = describe_served_model(config.run.name, loaded, limits, policy.chat_template, policy.chat_template_kwargs)
    key, body = read_api_key(None), 1024 * defaults.max_body_kib
    with (
        listen(defaults.host, rollout.serve_port) as listening,
        run_http_server(queue, [model], listening, key=key, max_body=body),
    ):
        say(f"serving {model.name} at {server_url(listening)} while it trains")
        with engine.after_generate(partial(serve_waiting, queue, engine)):
            yield
