"""Decides whether a pass of a model can be captured as a CUDA graph, and keeps captures safe."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from ebbtide.model.load import layers_of, rope_limit
from ebbtide.system.torch_internals import forward_pre_hooks
from ebbtide.system.transformers_internals import experts_implementation


def needs_host_sync(model: PreTrainedModel, *, known: bool) -> bool:
    """Tells whether a pass needs the host in between, so that it cannot be captured: because routing to experts or a
    dynamic RoPE waits for the device, or because a forward hook gathers a block's weights from other ranks. `known`:
    the model's blocks run fused, whose capture is tested."""
    if any(forward_pre_hooks(block) for block in layers_of(model) or ()):
        return True
    sparse = any("experts" in name for name, _ in model.named_parameters())
    return (sparse and not (known and _groups_experts(model))) or rope_limit(model.config) is not None


def _groups_experts(model: PreTrainedModel) -> bool:
    """Tells whether all experts are one grouped matmul whose sizes are read on the device: torch has that for bfloat16
    on these GPUs, and loops over experts on the host elsewhere."""
    kind = experts_implementation(model.config.get_text_config())
    grouped = kind == "grouped_mm" and model.dtype == torch.bfloat16
    return grouped and torch.cuda.get_device_capability(model.device)[0] in (9, 10)


@contextmanager
def garbage_collection_off() -> Iterator[None]:
    """Disables garbage collection: freeing something then, such as another engine's graphs, would break a capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
