"""`ebbtide serve`: serves a model, or the newest checkpoint of a run, on a device of its own."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from ebbtide.checkpoint.export import read_newest
from ebbtide.checkpoint.initial import NamedAdapter, find_adapters
from ebbtide.checkpoint.resume import FOLDER
from ebbtide.checkpoint.served_adapters import load_adapters
from ebbtide.config.model import ModelConfig
from ebbtide.config.rollout import RolloutConfig
from ebbtide.config.serve import SamplerConfig, ServeConfig
from ebbtide.config.train import TrainConfig
from ebbtide.errors import UserError
from ebbtide.model.chat_template import unused_arguments_warning
from ebbtide.model.joined_weights import join
from ebbtide.model.load import LoadedModel, layers_of, load_pretrained, pick_device, pick_dtype, prepare_model
from ebbtide.model.lora import adapted_layers
from ebbtide.model.quantized_layers import SCALE, quantize_model, quantized_of
from ebbtide.policy.fuse import build_blocks, why_not_computed
from ebbtide.rollout.serve.engine_loop import run_engine_loop
from ebbtide.rollout.serve.http import listen, run_http_server, server_url
from ebbtide.rollout.serve.preflight import API_KEY_VARIABLE
from ebbtide.rollout.serve.queue import RequestQueue
from ebbtide.rollout.serve.to_request import RequestLimits, describe_served_model
from ebbtide.system.hosts import LOOPBACK
from ebbtide.system.units import gib
from ebbtide.worker import Worker


def serve(source: str, config: ServeConfig, key: str | None, say: Callable[[str], None]) -> None:
    """Serves until a signal stops it."""
    name, adapters = config.name or _model_name(source), find_adapters(config.lora, say)
    if name in config.lora:
        raise UserError(f"`lora.{name}` has the name of the model itself: choose another, or set `name`")
    with listen(config.host, config.port) as listening:
        if config.host not in LOOPBACK and key is None:
            say(
                f"warning: anyone who reaches {config.host} can use this server: set an API key ({API_KEY_VARIABLE} or"
                " --api-key-file)"
            )
        loaded, settings = load_served(source, config, say)
        arguments = {**settings.chat_template_kwargs, **config.chat_template_kwargs}
        if doubt := unused_arguments_warning(loaded.tokenizer, arguments, "chat_template_kwargs"):
            say(f"warning: {doubt}")
        if adapters:
            _add_adapters(loaded.model, adapters, say)
        _join(loaded.model)
        longest = _max_length(loaded, config)
        queue = RequestQueue(config.max_queue, config.stop_seconds)
        limits = RequestLimits(longest - 1, longest - 1, longest, config.max_queue)
        served = describe_served_model(name, loaded, limits, settings.chat_template, arguments, config.reasoning_parser)
        models = [served]
        for number, one in enumerate(adapters, 1):
            own = {**one.template_arguments, **config.chat_template_kwargs}
            models.append(served.with_adapter(one.name, number, one.is_templated, own))
        server = run_http_server(queue, models, listening, key=key, max_body=1024 * config.max_body_kib)
        with (
            Worker(_sampler_config(config, longest), trains=False, loaded=loaded) as worker,
            _stopped_by_signals(queue),
            worker.session(longest) as session,
            server,
        ):
            names = ", ".join(one.name for one in models)
            say(
                f"serving {names} at {server_url(listening)}: context {longest:,} tokens, up to {config.batch}"
                f" samples at a time, KV cache of {session.max_tokens:,} tokens. Ctrl-C stops it"
            )
            run_engine_loop(queue, session)
        say("stopped")


def _sampler_config(config: ServeConfig, longest: int) -> SamplerConfig:
    """The settings of a worker for sequences of at most `longest` tokens. Its model is given to it."""
    return SamplerConfig(
        device=config.device,
        model=ModelConfig(path="served", dtype=config.dtype),
        rollout=RolloutConfig(max_prompt_tokens=longest - 1, max_new_tokens=1, group_size=1, max_num_seqs=config.batch),
        train=TrainConfig(microbatch_tokens=longest),
        checkpoint=None,
    )


def load_served(source: str, config: ServeConfig, say: Callable[[str], None]) -> tuple[LoadedModel, ModelConfig]:
    """Loads a model or the newest undamaged checkpoint of a run; returns it and its settings, which say how chats are
    rendered."""
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    run = Path(source).expanduser()
    if not (run / FOLDER).is_dir():
        settings = ModelConfig(path=source)
        if config.base is None:
            return load_pretrained(settings, device, dtype), settings
        loaded = load_pretrained(settings, torch.device("cpu"), dtype)
        quantize_model(loaded.model, config.base, device, embeddings=config.base_embeddings)
        return loaded, settings
    saved, model, tokenizer, trained = read_newest(run, None, say, device)
    if config.base is not None and trained.model.lora is not None:
        given = "`base` and `base_embeddings`" if config.base_embeddings else "`base`"
        raise UserError(f"{source} is a run with adapters, whose own `model.base` counts: remove {given}")
    say(f"the weights are those of step {saved.step}")
    # Buffers are not cast: rotary frequencies and router biases are float32 whatever the weights are.
    blocks = layers_of(model) or nn.ModuleList()
    fixed = {id(scale) for name, scale in blocks.named_parameters() if name.endswith(SCALE)}
    for parameter in model.parameters():
        is_number = parameter.dtype in (torch.float32, torch.bfloat16) and id(parameter) not in fixed
        if is_number:  # and no part of a block's quantized matrix
            parameter.data = parameter.data.to(dtype)
    if config.base is not None:
        quantize_model(model, config.base, device, embeddings=config.base_embeddings)
    return prepare_model(model.to(device), tokenizer, trained.model), trained.model


def _add_adapters(model: PreTrainedModel, adapters: Sequence[NamedAdapter], say: Callable[[str], None]) -> None:
    """Gives the model the adapters that are served beside it."""
    size = load_adapters(model, adapters)
    ranks = ", ".join(f"{one.name} (rank {one.lora.rank})" for one in adapters)
    say(f"adapters: {ranks}; {gib(size):.3f} GiB")


def _join(model: PreTrainedModel) -> None:
    """Lets adapters, and codes of a quantized base, that are multiplied with the same input follow each other in
    memory: fused blocks then multiply with them at once. Other weights need not: they are multiplied one by one."""
    if why_not_computed(model):
        return
    adapted = adapted_layers(model).values()
    joined = {id(layer.lora_A) for layer in adapted}
    for layer in model.modules():
        if (matrix := quantized_of(layer)) is not None:
            joined |= {id(one) for one in matrix}
    for block in build_blocks(model) if joined else ():
        for parameters in block.joinable:
            if id(parameters[0]) in joined:
                join(parameters)


def _max_length(loaded: LoadedModel, config: ServeConfig) -> int:
    context = getattr(loaded.model.config, "max_position_embeddings", None)
    if config.max_length is None:
        if context is None:
            raise UserError("the model's config has no context length: set `max_length`")
        return int(context)
    if context is not None and config.max_length > context:
        raise UserError(f"`max_length` = {config.max_length} exceeds the model's context of {context}: lower it")
    return config.max_length


def _model_name(source: str) -> str:
    """The name of the model: a hub id as it is, the last part of a path."""
    path = Path(source).expanduser()
    return path.resolve().name if path.exists() else source


@contextmanager
def _stopped_by_signals(queue: RequestQueue) -> Iterator[None]:
    before = {number: signal.signal(number, lambda *_: queue.stop()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
