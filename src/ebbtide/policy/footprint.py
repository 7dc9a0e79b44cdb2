"""The bytes that a plan sends to the host, known before anything is loaded: the model is built without memory for its weights and counted."""

from __future__ import annotations

from collections import Counter

import torch
from transformers import AutoModelForCausalLM

from ebbtide.config.tree import Config
from ebbtide.memory.plan import Plan
from ebbtide.optim.adamw import state_bytes
from ebbtide.policy.model import model_config, pick_dtype


def host_needs(config: Config, plan: Plan) -> dict[str, int]:
    """Holding -> bytes. Gradients that the plan sends away are not among them: between steps there are none."""
    if not plan.moves and config.optimizer.place == "device" and not config.optimizer.on_cpu:
        return {}
    dtype = pick_dtype(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(config), dtype=dtype)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    moving, resident = state_bytes(config.optimizer, parameters, dtype)
    if config.loss.kl is not None:
        moving["reference"] = dtype.itemsize * parameters
    needs: Counter[str] = Counter(resident)
    needs.update({name: size for name, size in moving.items() if plan.ever_away(name)})
    return dict(needs)
