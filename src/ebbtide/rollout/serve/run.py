"""`ebbtide serve`: a model or a run's newest checkpoint, alone on its device."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ebbtide.checkpoint.export import read_newest
from ebbtide.checkpoint.resume import FOLDER
from ebbtide.config.serve import Serve
from ebbtide.config.tree import Model
from ebbtide.errors import UserError
from ebbtide.hosts import OWN
from ebbtide.policy.model import Loaded, load_pretrained, pick_device, pick_dtype, ready
from ebbtide.rollout.paged.verify import verified_engine
from ebbtide.rollout.serve.ask import Limits, serve_as
from ebbtide.rollout.serve.checks import KEY
from ebbtide.rollout.serve.desk import Desk
from ebbtide.rollout.serve.http import answering, listen, url
from ebbtide.rollout.serve.shift import work


def serve(source: str, config: Serve, key: str | None, say: Callable[[str], None]) -> None:
    """Until it is stopped."""
    with listen(config.host, config.port) as listening:
        if config.host not in OWN and key is None:
            say(f"warning: whoever reaches {config.host} can use this server: set an API key ({KEY} or --api-key-file)")
        loaded, templated = load(source, config, say)
        longest = _longest(loaded, config)
        engine = verified_engine(loaded, config.batch, longest=(longest - 1, 1))
        desk = Desk(config.max_queue, config.stop_seconds)
        limits = Limits(longest - 1, longest - 1, longest, config.max_queue)
        served = serve_as(config.name or _name(source), loaded, limits, templated)
        server = answering(desk, served, listening, key=key, max_body=1024 * config.max_body_kib)
        with _stopped_by_signals(desk), engine.standing_session(longest) as session, server:
            say(
                f"serving {served.name} at {url(listening)}: {longest:,} tokens at most, {config.batch} samples at once, "
                f"a cache of {session.blocks * engine.block:,} tokens. Ctrl-C stops it"
            )
            work(desk, session)
        say("stopped")


def load(source: str, config: Serve, say: Callable[[str], None]) -> tuple[Loaded, bool]:
    """(a model or the newest sound checkpoint of a run, whether its chat template is used)."""
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    run = Path(source).expanduser()
    if not (run / FOLDER).is_dir():
        return load_pretrained(Model(path=source), device, dtype), True
    saved, model, tokenizer, trained = read_newest(run, None, say)
    say(f"the weights are those of step {saved.step}")
    for parameter in model.parameters():  # not the buffers: rotary frequencies and routers' biases are float32 whatever the weights are
        parameter.data = parameter.data.to(dtype)
    return ready(model.to(device), tokenizer, trained.model), trained.model.chat_template


def _longest(loaded: Loaded, config: Serve) -> int:
    context = getattr(loaded.model.config, "max_position_embeddings", None)
    if config.max_length is None:
        if context is None:
            raise UserError("the model does not say how long its context is: set `max_length`")
        return int(context)
    if context is not None and config.max_length > context:
        raise UserError(f"`max_length` = {config.max_length} exceeds the model's context of {context}: lower it")
    return config.max_length


def _name(source: str) -> str:
    """A hub id as it is; of a path its last part."""
    path = Path(source).expanduser()
    return path.resolve().name if path.exists() else source


@contextmanager
def _stopped_by_signals(desk: Desk) -> Iterator[None]:
    before = {number: signal.signal(number, lambda *_: desk.stop()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
