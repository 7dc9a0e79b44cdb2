"""The bytes of each holding, known before anything is loaded: the model is built without memory for its weights and counted."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from ebbtide.config.tree import Config
from ebbtide.memory.plan import Name, Plan
from ebbtide.policy.model import model_config, pick_dtype


def footprint(config: Config) -> dict[Name, int]:
    dtype = pick_dtype(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(config), dtype=dtype)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return {
        "weights": weights,
        "grads": weights,
        "master": 0 if dtype == torch.float32 else 4 * parameters,
        "moments": 8 * parameters,
        "reference": weights if config.loss.kl is not None else 0,
    }


def host_needs(config: Config, plan: Plan) -> dict[str, int]:
    """What the plan ever sends to the host. Gradients are not among it: between steps there are none."""
    leaving: list[Name] = [name for name in ("master", "moments", "reference") if plan.ever_away(name)]
    sizes = footprint(config) if leaving else {}
    return {name: sizes[name] for name in leaving}
