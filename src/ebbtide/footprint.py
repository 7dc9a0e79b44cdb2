"""The bytes that a plan sends to the host, known before anything is loaded: the model is built without memory for its weights and counted."""

from __future__ import annotations

from collections import Counter

import torch
from transformers import AutoModelForCausalLM

from ebbtide.checkpoint.sizes import copied_bytes
from ebbtide.config.tree import Config
from ebbtide.errors import UserError
from ebbtide.memory.arena import GIB, check_host_budget
from ebbtide.memory.host import free_host_bytes
from ebbtide.memory.plan import Plan
from ebbtide.optim.sizes import state_bytes
from ebbtide.planner.shape import find_shape
from ebbtide.policy.model import NO_CODE, model_config, pick_device, pick_dtype, refusing
from ebbtide.rollout.paged.attention import room_of
from ebbtide.rollout.paged.room import BLOCKS
from ebbtide.rollout.paged.schedule import most_blocks

COPIES = "copies for checkpoints"


def check_room_for_weights(config: Config, device: torch.device) -> None:
    """On a CPU: before minutes are spent on a model that its memory cannot hold. A GPU says so itself, at once."""
    if device.type != "cpu":
        return
    try:
        parameters = find_shape(config.model).parameters
    except UserError:  # of a family whose shape is not known beforehand
        return
    needed, free = parameters * pick_dtype(config.model.dtype, device).itemsize, free_host_bytes()
    if needed > free:
        raise UserError(
            f"the model's {parameters:,} parameters take {needed / GIB:,.1f} GiB, and this machine has {free / GIB:.1f} GiB free: "
            "choose a smaller `model`, or a machine with more memory"
        )


def fit_to_host(
    config: Config, plan: Plan, *, optimizer: bool = True, share: int = 1, processes: int = 1
) -> tuple[Config, dict[str, int], list[str]]:
    """(the config, host memory by holding, what a person should know): where only the copies for checkpoints are too much, saves are not asynchronous.

    Each of the `processes` on this machine has one part in `share` of the model.
    """
    needs = host_needs(config, plan, optimizer=optimizer, share=share)

    def check() -> None:
        check_host_budget({name: size * processes for name, size in needs.items()}, config.memory.host_budget_gib)

    try:
        check()
    except UserError:
        if config.checkpoint is None or (copies := needs.pop(COPIES, 0)) == 0:
            raise
        check()
        waiting = config.checkpoint.model_copy(update={"async_save": False})
        told = f"checkpoints are written while the loop waits: copies of what is on the device would take {copies / GIB:.1f} GiB of host memory, more than there is"
        return config.model_copy(update={"checkpoint": waiting}), needs, [told]
    return config, needs, []


def host_needs(config: Config, plan: Plan, *, optimizer: bool = True, share: int = 1) -> dict[str, int]:
    """Holding -> bytes, with an optimizer or without, for a process that has one part in `share` of the model. Gradients that the plan sends away are not among them: between steps there are none."""
    saved = config.checkpoint is not None and config.checkpoint.async_save
    if not plan.moves and not saved and config.optimizer.place == "device" and not config.optimizer.on_cpu:
        return {}
    dtype = pick_dtype(config.model.dtype, pick_device(config.device))
    with refusing(config.model), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(config), dtype=dtype, **NO_CODE)
    parameters = -(-sum(parameter.numel() for parameter in model.parameters()) // share)
    moving, resident = state_bytes(config.optimizer, parameters, dtype.itemsize) if optimizer else ({}, {})
    if config.loss.kl is not None:
        moving["reference"] = dtype.itemsize * parameters
    needs: Counter[str] = Counter(resident)
    needs.update({name: size for name, size in moving.items() if plan.ever_away(name)})
    if config.rollout.cache == "kept" and plan.ever_away("kv_cache"):
        rollout, block = config.rollout, BLOCKS[pick_device(config.device).type]
        blocks = most_blocks(rollout.ahead, rollout.max_prompt_tokens, rollout.samples, rollout.max_new_tokens, block)
        needs["kv_cache"] = blocks * block * room_of(model.config).bytes(dtype.itemsize)
    if saved:
        staying = sum(size for name, size in moving.items() if name != "reference" and plan.place("save", name) != "away")
        needs[COPIES] = copied_bytes(dtype.itemsize * parameters, staying, max(parameter.numel() for parameter in model.parameters()))
    return dict(needs)
