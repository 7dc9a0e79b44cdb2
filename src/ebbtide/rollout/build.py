"""From the config to an engine."""

from __future__ import annotations

from collections.abc import Callable

from ebbtide.config.tree import Config
from ebbtide.policy.model import Loaded
from ebbtide.rollout.engine import Engine


def build_engine(loaded: Loaded, config: Config, make_room: Callable[[int], None]) -> Engine:
    """`make_room` is told of the bytes of a cache before it is made."""
    rollout = config.rollout
    if rollout.engine == "vllm":
        from ebbtide.rollout.vllm_engine import VllmEngine

        return VllmEngine(loaded, config)
    if rollout.engine == "paged":
        from ebbtide.rollout.paged.verify import verified_engine

        longest = rollout.max_prompt_tokens, rollout.max_new_tokens
        engine = verified_engine(loaded, rollout.batch, longest=longest, samples=rollout.samples)
        engine.beforehand = make_room
        return engine
    from ebbtide.rollout.huggingface import HuggingFaceEngine

    return HuggingFaceEngine(loaded, rollout.batch)
