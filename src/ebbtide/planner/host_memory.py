"""The host memory that a plan needs, known before anything is loaded: the model is built on the meta device and its
parameters are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM

from ebbtide.checkpoint.costs import copied_bytes
from ebbtide.config.root import Config
from ebbtide.errors import UserError
from ebbtide.memory.arena import check_host_budget
from ebbtide.memory.host import free_host_bytes
from ebbtide.memory.plan import Plan
from ebbtide.model.load import NO_CODE, model_config, pick_device, pick_dtype, refuse_broken_files
from ebbtide.model.shape import find_shape
from ebbtide.optim.costs import state_bytes
from ebbtide.rollout.paged.attention import model_cache_costs
from ebbtide.rollout.paged.cache_costs import BLOCK_SIZES
from ebbtide.rollout.paged.scheduler import max_blocks
from ebbtide.system.units import ceil_div, gib

COPIES = "copies for checkpoints"


def check_weights_fit(config: Config, device: torch.device) -> None:
    """On a CPU, refuses a model that does not fit into memory before minutes are spent on loading it. A GPU fails at
    once by itself."""
    if device.type != "cpu":
        return
    try:
        parameters = find_shape(config.model).parameters
    except UserError:  # The shape of this family is not known beforehand.
        return
    needed, free = parameters * pick_dtype(config.model.dtype, device).itemsize, free_host_bytes()
    if needed > free:
        raise UserError(
            f"the model's {parameters:,} parameters need {gib(needed):,.1f} GiB, but this machine has {gib(free):.1f}"
            " GiB free: choose a smaller `model`, or a machine with more memory"
        )


def fit_to_host(
    config: Config,
    plan: Plan,
    note: Callable[[str], None],
    *,
    optimizer: bool = True,
    share: int = 1,
    processes: int = 1,
) -> tuple[Config, dict[str, int]]:
    """(the config, host memory by holding). If only the copies for checkpoints do not fit into host memory, the config
    is changed to synchronous saves, with a note.

    Each of the `processes` on this machine has 1 / `share` of the model.
    """
    needs = host_bytes(config, plan, optimizer=optimizer, share=share)

    def check() -> None:
        check_host_budget({name: size * processes for name, size in needs.items()}, config.memory.host_budget_gib)

    try:
        check()
    except UserError:
        if config.checkpoint is None or (copies := needs.pop(COPIES, 0)) == 0:
            raise
        check()
        synchronous = config.checkpoint.model_copy(update={"async_save": False})
        note(
            "checkpoints are written synchronously, while the loop waits: asynchronous saves need"
            f" {gib(copies):.1f} GiB of host memory for copies, more than is available"
        )
        return config.model_copy(update={"checkpoint": synchronous}), needs
    return config, needs


def host_bytes(config: Config, plan: Plan, *, optimizer: bool = True, share: int = 1) -> dict[str, int]:
    """Holding -> bytes of host memory, with or without an optimizer, for a process that has 1 / `share` of the model.
    Gradients that the plan offloads do not count: between steps there are none."""
    saved = config.checkpoint is not None and config.checkpoint.async_save
    if not plan.moves_anything and not saved and config.optimizer.place == "device" and not config.optimizer.cpu_share:
        return {}
    dtype = pick_dtype(config.model.dtype, pick_device(config.device))
    with refuse_broken_files(config.model), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(config), dtype=dtype, **NO_CODE)
    parameters = ceil_div(sum(parameter.numel() for parameter in model.parameters()), share)
    moving, resident = state_bytes(config.optimizer, parameters, dtype.itemsize) if optimizer else ({}, {})
    if config.has_reference:
        moving["reference"] = dtype.itemsize * parameters
    needs: Counter[str] = Counter(resident)
    needs.update({name: size for name, size in moving.items() if plan.is_ever_offloaded(name)})
    if config.rollout.partial.kv_cache == "keep" and plan.is_ever_offloaded("kv_cache"):
        rollout, block = config.rollout, BLOCK_SIZES[pick_device(config.device).type]
        blocks = max_blocks(
            rollout.partial.extra_prompts, rollout.max_prompt_tokens, rollout.group_size, rollout.max_new_tokens, block
        )
        needs["kv_cache"] = blocks * block * model_cache_costs(model.config).bytes_per_token(dtype.itemsize)
    if saved:
        staying = sum(
            size for name, size in moving.items() if name != "reference" and plan.place("save", name) != "away"
        )
        needs[COPIES] = copied_bytes(
            dtype.itemsize * parameters, staying, max(parameter.numel() for parameter in model.parameters())
        )
    return dict(needs)
