"""Builds the rollout engine that the config names."""

from __future__ import annotations

from collections.abc import Callable

from ebbtide.config.root import Config
from ebbtide.model.load import LoadedModel
from ebbtide.rollout.engine import Engine


def build_engine(loaded: LoadedModel, config: Config, make_room: Callable[[int], None]) -> Engine:
    """`make_room` is called with the bytes of a KV cache before it is allocated."""
    rollout = config.rollout
    if rollout.engine == "vllm":
        from ebbtide.rollout.vllm_engine import VllmEngine

        return VllmEngine(loaded, config, make_room)
    if rollout.engine == "paged":
        from ebbtide.rollout.paged.verify import build_verified_engine

        longest = rollout.max_prompt_tokens, rollout.max_new_tokens
        return build_verified_engine(
            loaded,
            rollout.max_num_seqs,
            longest=longest,
            samples=rollout.group_size,
            make_room=make_room,
        )
    from ebbtide.rollout.huggingface_check import build_checked_engine

    return build_checked_engine(loaded, rollout.max_num_seqs, rollout.max_prompt_tokens + rollout.max_new_tokens)
