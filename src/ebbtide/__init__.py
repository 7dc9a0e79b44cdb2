"""Ebbtide: post-training of language models in which GPU memory is a planned resource.

The library is `Worker`, `Datum`, `load`, `LossInputs` and the losses (docs/api.md). They are imported when they are
first used, so that `import ebbtide` takes no time and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbtide.config import load
    from ebbtide.policy.datum import Datum, weigh_by_token
    from ebbtide.policy.losses import LossInputs, Ratio, build_loss
    from ebbtide.policy.losses.cross_entropy import cross_entropy
    from ebbtide.policy.losses.distillation import VocabularyDivergence, sampled_divergence
    from ebbtide.policy.losses.preference import preference_loss
    from ebbtide.rollout.engine import Completion, Request, SamplingParams
    from ebbtide.worker import Worker

__version__ = "0.1.0"

_HOMES = {
    "Completion": "ebbtide.rollout.engine",
    "Datum": "ebbtide.policy.datum",
    "LossInputs": "ebbtide.policy.losses",
    "Ratio": "ebbtide.policy.losses",
    "Request": "ebbtide.rollout.engine",
    "SamplingParams": "ebbtide.rollout.engine",
    "VocabularyDivergence": "ebbtide.policy.losses.distillation",
    "Worker": "ebbtide.worker",
    "build_loss": "ebbtide.policy.losses",
    "cross_entropy": "ebbtide.policy.losses.cross_entropy",
    "load": "ebbtide.config",
    "preference_loss": "ebbtide.policy.losses.preference",
    "sampled_divergence": "ebbtide.policy.losses.distillation",
    "weigh_by_token": "ebbtide.policy.datum",
}
"""Name -> the module that has it."""

__all__ = [
    "Completion",
    "Datum",
    "LossInputs",
    "Ratio",
    "Request",
    "SamplingParams",
    "VocabularyDivergence",
    "Worker",
    "build_loss",
    "cross_entropy",
    "load",
    "preference_loss",
    "sampled_divergence",
    "weigh_by_token",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
