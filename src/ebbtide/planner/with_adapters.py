"""Finds out whether a run that does not fit would fit with adapters (LoRA), and a base in 8 or 4 bits beside them."""

from __future__ import annotations

from collections.abc import Callable

from ebbtide.config.model import BaseKind, LoraConfig
from ebbtide.config.root import Config
from ebbtide.model.shape import Shape
from ebbtide.planner.render import format_number
from ebbtide.planner.search import PlanResult
from ebbtide.system.units import gib


def note_adapters(config: Config, shape: Shape, chosen: PlanResult, plan: Callable[[Config], PlanResult]) -> list[str]:
    """A note, if a run that does not fit would with adapters, or with a smaller base beside them: the first that fits.
    `plan` plans a config."""
    if chosen.fits or config.model.base == "int4" or shape.is_traced:  # Adapters would need another trace.
        return []
    lora = config.model.lora or LoraConfig()
    bases: list[BaseKind | None] = [None] if config.model.lora is None else []
    if not shape.experts and config.parallel is None and config.rollout.engine != "vllm":
        bases += ["int4"] if config.model.base == "float8" else ["float8", "int4"]
    for base in bases:
        found = plan(config.model_copy(update={"model": config.model.model_copy(update={"lora": lora, "base": base})}))
        if found.fits:
            peak, seconds = gib(found.candidate.prediction.peak), found.candidate.prediction.seconds
            whats = [f"model.lora.rank={lora.rank}"] * (config.model.lora is None) + [f"model.base={base}"] * bool(base)
            instead = "adapters in place of all weights" if config.model.lora is None else "a smaller base"
            return [
                f"with {instead} it fits ({' and '.join(f'`{what}`' for what in whats)}): the peak is"
                f" {format_number(peak)} GiB, about {format_number(seconds)} s per step"
            ]
    return []
