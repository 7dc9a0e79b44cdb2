"""The host memory that a plan needs, known before anything is loaded: the model is built on the meta device and its
parameters are counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ebbtide.checkpoint.costs import SAVE, describe_synchronous, save_copies
from ebbtide.config.model import BaseKind
from ebbtide.config.root import Config
from ebbtide.errors import UserError
from ebbtide.memory.arena import check_host_budget
from ebbtide.memory.costs import HoldingBytes
from ebbtide.memory.host import free_host_bytes
from ebbtide.memory.move_costs import host_bytes_of
from ebbtide.memory.plan import Plan
from ebbtide.model.files import NO_CODE, refuse_broken_files
from ebbtide.model.known import known_config
from ebbtide.model.load import layers_of, model_config, pick_device, pick_dtype
from ebbtide.model.lora import add_adapters
from ebbtide.model.output_head import head_size
from ebbtide.model.quantized_layers import quantized_layers
from ebbtide.model.quantized_sizes import quantized_bytes
from ebbtide.model.shape import find_shape
from ebbtide.optim.costs import state_bytes
from ebbtide.planner.reward_models import reward_model_sizes
from ebbtide.planner.traced_kernels import traced_kernels
from ebbtide.policy.model_costs import frozen_bytes, frozen_size
from ebbtide.policy.stream_costs import BLOCKS
from ebbtide.rollout.paged.attention import model_cache_costs
from ebbtide.rollout.paged.cache_costs import BLOCK_SIZES
from ebbtide.rollout.paged.state_memory import StateMemory
from ebbtide.rollout.reward_costs import REWARD_MODEL
from ebbtide.system.units import ceil_div, gib

if TYPE_CHECKING:
    from transformers import PreTrainedModel

COPIES = "copies for checkpoints"


def check_weights_fit(config: Config, device: torch.device) -> None:
    """On a CPU, refuses a model that does not fit into memory before minutes are spent on loading it. A GPU fails at
    once by itself."""
    if device.type != "cpu":
        return
    models = {"model": config.model, **config.frozen_models}
    try:
        shapes = {name: find_shape(model) for name, model in models.items()}
        counts = {name: shape.parameters + shape.adapter_parameters for name, shape in shapes.items()}
    except UserError:  # The shape of this family is not known beforehand.
        return
    needed, free = sum(counts[name] * model.itemsize(device.type) for name, model in models.items()), free_host_bytes()
    for number, one in enumerate(reward_model_sizes(config, device.type), start=1):
        counts[f"reward model {number}"] = one.parameters
        needed += one.bytes
    if needed > free:
        whose = " and the ".join(f"{name}'s {count:,}" for name, count in counts.items())
        raise UserError(
            f"the {whose} parameters need {gib(needed):,.1f} GiB, but this machine has {gib(free):.1f}"
            f" GiB free: choose a smaller {' or '.join(f'`{name}`' for name in models)}, or a machine with more memory"
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
        note(describe_synchronous(f"{gib(copies):.1f}"))
        return config.model_copy(update={"checkpoint": synchronous}), needs
    return config, needs


def host_bytes(config: Config, plan: Plan, *, optimizer: bool = True, share: int = 1) -> dict[str, int]:
    """Holding -> bytes of host memory, with or without an optimizer, for a process that has 1 / `share` of the model.
    Gradients that the plan offloads do not count: between steps there are none."""
    saved = config.checkpoint is not None and config.checkpoint.async_save
    if not plan.moves_anything and not saved and config.optimizer.place == "device" and not config.optimizer.cpu_share:
        return {}
    dtype = pick_dtype(config.model.dtype, pick_device(config.device))
    model = meta_model(config, dtype)
    trained = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    updated = ceil_div(sum(trained), share)
    device, host = state_bytes(config.optimizer, updated, dtype.itemsize) if optimizer else ({}, {})
    if config.memory.stream_base:
        device[BLOCKS] = _block_bytes(model, config.model.base)
    others = {}
    for name, frozen in config.frozen_models.items():
        other = meta_model(config.model_copy(update={"model": frozen}), dtype)
        count = sum(parameter.numel() for parameter in other.parameters())
        itemsize = frozen.itemsize(pick_device(config.device).type)
        others[name] = frozen_size(count, head_size(other), share, itemsize)
    device |= frozen_bytes(config, updated, dtype.itemsize, others)
    if rewards := reward_model_sizes(config, pick_device(config.device).type):
        device[REWARD_MODEL] = sum(one.bytes for one in rewards)
    if config.generates and config.rollout.partial.kv_cache == "keep":
        block = BLOCK_SIZES[pick_device(config.device).type]
        with traced_kernels(model, pick_device(config.device).type):
            costs = replace(model_cache_costs(model.config), state_bytes=StateMemory(model).slot_bytes)
        device |= costs.kept_bytes(config.rollout, dtype.itemsize, block)
    needs: dict[str, int] = host_bytes_of(plan, HoldingBytes(device, host))
    if saved:
        staying = {name: size for name, size in device.items() if plan.place(SAVE, name) != "away"}
        staying["weights"] = dtype.itemsize * updated
        largest = max(trained) if config.model.has_lasting_base else max(one.numel() for one in model.parameters())
        needs[COPIES] = save_copies(staying, largest)
    return needs


def _block_bytes(model: PreTrainedModel, base: BaseKind | None) -> int:
    """The bytes of the frozen weights in blocks, whose linear layers may be quantized."""
    blocks = layers_of(model) or torch.nn.ModuleList()
    size = sum(one.nbytes for one in blocks.parameters() if not one.requires_grad)
    for layer, kind in quantized_layers(model, base) if base is not None else ():
        size += quantized_bytes(layer.out_features, layer.in_features, kind) - layer.weight.nbytes
    return size


def meta_model(config: Config, dtype: torch.dtype) -> PreTrainedModel:
    """The configured model without memory for its weights."""
    from transformers import AutoModelForCausalLM  # with all that models need, which a start does not wait for

    with refuse_broken_files(config.model), torch.device("meta"):
        described = known_config(config.model.path) or model_config(config)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(described, dtype=dtype, **NO_CODE)
        if config.model.lora is not None:
            add_adapters(model, config.model.lora, config.seed)
    return model
