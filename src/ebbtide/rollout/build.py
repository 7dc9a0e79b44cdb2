"""From the config to an engine."""

from __future__ import annotations

from ebbtide.config.tree import Config
from ebbtide.policy.model import Loaded
from ebbtide.rollout.engine import Engine
from ebbtide.rollout.huggingface import HuggingFaceEngine
from ebbtide.rollout.paged.engine import PagedEngine
from ebbtide.rollout.vllm_engine import VllmEngine


def build_engine(loaded: Loaded, config: Config) -> Engine:
    if config.rollout.engine == "vllm":
        return VllmEngine(loaded, config)
    if config.rollout.engine == "paged":
        return PagedEngine(loaded, config.rollout.batch)
    return HuggingFaceEngine(loaded, config.rollout.batch)
