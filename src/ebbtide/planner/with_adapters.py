"""Finds out whether a run that does not fit would fit with adapters (LoRA)."""

from __future__ import annotations

from collections.abc import Callable

from ebbtide.config.model import LoraConfig
from ebbtide.config.root import Config
from ebbtide.planner.render import format_number
from ebbtide.planner.search import PlanResult
from ebbtide.system.units import gib


def note_adapters(config: Config, chosen: PlanResult, plan: Callable[[Config], PlanResult]) -> list[str]:
    """A note, if a run that does not fit would with adapters. `plan` plans a config."""
    alone = config.parallel is None and config.rollout.engine != "vllm"
    if chosen.fits or config.model.lora is not None or not alone:
        return []
    lora = LoraConfig()
    found = plan(config.model_copy(update={"model": config.model.model_copy(update={"lora": lora})}))
    if not found.fits:
        return []
    prediction = found.candidate.prediction
    return [
        f"with adapters in place of all weights it fits (`model.lora.rank={lora.rank}`): the peak is"
        f" {format_number(gib(prediction.peak))} GiB, about {format_number(prediction.seconds)} s per step"
    ]
