"""From the config to an engine."""

from __future__ import annotations

from ebbtide.config.tree import Config
from ebbtide.policy.model import Loaded
from ebbtide.rollout.engine import Engine
from ebbtide.rollout.huggingface import HuggingFaceEngine
from ebbtide.rollout.paged.engine import PagedEngine


def build_engine(loaded: Loaded, config: Config) -> Engine:
    rollout = config.rollout
    if rollout.engine == "vllm":
        from ebbtide.rollout.vllm_engine import VllmEngine

        return VllmEngine(loaded, config)
    if rollout.engine == "paged":
        return PagedEngine(loaded, rollout.batch, longest=(rollout.max_prompt_tokens, rollout.max_new_tokens))
    return HuggingFaceEngine(loaded, rollout.batch)
