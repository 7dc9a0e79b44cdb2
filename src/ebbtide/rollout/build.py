"""From `rollout` to an engine."""

from __future__ import annotations

from ebbtide.config.tree import Rollout
from ebbtide.policy.model import Loaded
from ebbtide.rollout.engine import Engine
from ebbtide.rollout.huggingface import HuggingFaceEngine
from ebbtide.rollout.paged.engine import PagedEngine


def build_engine(loaded: Loaded, config: Rollout) -> Engine:
    if config.engine == "paged":
        return PagedEngine(loaded, config.batch)
    return HuggingFaceEngine(loaded, config.batch)
