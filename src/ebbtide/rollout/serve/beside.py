"""`rollout.serve_port`: the policy that trains, served between what the loop itself generates.

A request waits until the loop has generated or evaluated, and is answered then with the weights of that moment, in passes of its own: training samples the same bits
with and without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from ebbtide.config.serve import Serve
from ebbtide.config.tree import Config
from ebbtide.policy.model import Loaded
from ebbtide.rollout.engine import Engine
from ebbtide.rollout.paged.engine import PagedEngine
from ebbtide.rollout.serve.ask import Limits, serve_as
from ebbtide.rollout.serve.checks import api_key
from ebbtide.rollout.serve.desk import Desk
from ebbtide.rollout.serve.http import answering, listen, url
from ebbtide.rollout.serve.shift import work_off


@contextmanager
def served(engine: Engine, loaded: Loaded, config: Config, say: Callable[[str], None]) -> Iterator[None]:
    """Where the config says so, the engine serves those who wait whenever its own samples are done."""
    rollout = config.rollout
    if rollout.serve_port is None:
        yield
        return
    assert isinstance(engine, PagedEngine)  # the config sees to it
    usual = Serve()
    desk = Desk(usual.max_queue)
    lengths = rollout.max_prompt_tokens, rollout.max_new_tokens
    model = serve_as(config.run.name, loaded, Limits(*lengths, sum(lengths), usual.max_queue), config.model.chat_template)
    key, body = api_key(None), 1024 * usual.max_body_kib
    with listen(usual.host, rollout.serve_port) as listening, answering(desk, model, listening, key=key, max_body=body):
        say(f"serving {model.name} at {url(listening)} while it trains")
        engine.afterwards = partial(work_off, desk, engine)
        try:
            yield
        finally:
            engine.afterwards = lambda: None
