"""The bytes that a plan sends to the host, known before anything is loaded: the model is built without memory for its weights and counted."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from ebbtide.config.tree import Config
from ebbtide.memory.plan import Name, Plan
from ebbtide.policy.model import model_config, pick_dtype


def host_needs(config: Config, plan: Plan) -> dict[str, int]:
    """Holding -> bytes. Gradients are not among them: between steps there are none."""
    leaving: list[Name] = [name for name in ("master", "moments", "reference") if plan.ever_away(name)]
    if not leaving:
        return {}
    dtype = pick_dtype(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(config), dtype=dtype)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    sizes: dict[Name, int] = {
        "master": 0 if dtype == torch.float32 else 4 * parameters,
        "moments": 8 * parameters,
        "reference": dtype.itemsize * parameters if config.loss.kl is not None else 0,
    }
    return {name: sizes[name] for name in leaving}
