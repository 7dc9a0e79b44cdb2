"""The shape of any model that can be planned: by the description of its family, or by a trace of it. What
`model/families.py` describes needs no torch; for any other family it is imported here."""

from __future__ import annotations

from ebbtide.config.model import ModelConfig
from ebbtide.config.model_path import locate
from ebbtide.config.root import Config
from ebbtide.memory.plan import HoldingName
from ebbtide.model.families import UnknownFamilyError
from ebbtide.model.known import known_models
from ebbtide.model.shape import Shape, find_shape
from ebbtide.policy.model_costs import FrozenShape


def plannable_shape(config: Config, device_type: str, model: ModelConfig | None = None) -> Shape:
    """The shape of the configured model, or of another that the run has."""
    model = model or config.model
    try:
        return find_shape(model)
    except UnknownFamilyError:
        if model.path is None or (model.path not in known_models() and locate(model.path).gguf is not None):
            raise
    from ebbtide.planner.traced_model import trace_shape

    return trace_shape(config.model_copy(update={"model": model}), device_type)


def frozen_shapes(config: Config, device_type: str) -> dict[HoldingName, FrozenShape]:
    """The shapes of `frozen_models`, from their files."""
    return {
        name: FrozenShape(plannable_shape(config, device_type, model), model.itemsize(device_type))
        for name, model in config.frozen_models.items()
    }
