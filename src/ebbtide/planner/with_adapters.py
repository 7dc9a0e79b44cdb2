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
    model = config.model
    if chosen.fits or model.base_embeddings or shape.is_traced:  # Adapters would need another trace.
        return []
    lora = model.lora or LoraConfig()
    bases: list[tuple[BaseKind | None, bool]] = [(None, False)] if model.lora is None else []
    if not shape.experts and config.parallel is None and config.rollout.engine != "vllm":
        smaller: list[BaseKind] = ["float8", "int4"]
        bases += [(kind, False) for kind in smaller[0 if model.base is None else smaller.index(model.base) + 1 :]]
        bases.append(("int4", True))
    for base, embeddings in bases:
        changes = {"lora": lora, "base": base, "base_embeddings": embeddings}
        found = plan(config.model_copy(update={"model": model.model_copy(update=changes)}))
        if found.fits:
            peak, seconds = gib(found.candidate.prediction.peak), found.candidate.prediction.seconds
            whats = [f"model.lora.rank={lora.rank}"] * (model.lora is None)
            whats += [f"model.base={base}"] * (base not in (None, model.base))
            whats += ["model.base_embeddings=true"] * embeddings
            instead = "adapters in place of all weights" if model.lora is None else "a smaller base"
            return [
                f"with {instead} it fits ({' and '.join(f'`{what}`' for what in whats)}): the peak is"
                f" {format_number(peak)} GiB, about {format_number(seconds)} s per step"
            ]
    return []
