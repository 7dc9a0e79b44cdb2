"""Decides whether a pass of a model can be captured as a CUDA graph, and keeps captures safe."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from ebbtide.model.load import layers_of, rope_limit
from ebbtide.system.torch_internals import forward_pre_hooks
from ebbtide.system.transformers_internals import experts_implementation


def needs_host_sync(model: PreTrainedModel) -> bool:
    """Tells whether a pass is known to need the host in between, so that it cannot be captured: because routing to
    experts or a dynamic RoPE waits for the device, or because a forward hook gathers a block's weights from other
    ranks."""
    if any(forward_pre_hooks(block) for block in layers_of(model) or ()):
        return True
    sparse = any("experts" in name for name, _ in model.named_parameters())
    return (sparse and not _groups_experts(model)) or rope_limit(model.config) is not None


def _groups_experts(model: PreTrainedModel) -> bool:
    """Tells whether all experts are one grouped matmul whose sizes are read on the device: torch has that for bfloat16
    on these GPUs, and loops over experts on the host elsewhere."""
    kind = experts_implementation(model.config.get_text_config())
    grouped = kind == "grouped_mm" and model.dtype == torch.bfloat16
    return grouped and torch.cuda.get_device_capability(model.device)[0] in (9, 10)


def waits_for_device(run: Callable[[], None]) -> bool:
    """Tells whether a function lets the host wait for the device, as some routers do. Another thread that does so
    meanwhile counts as well."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return any("synchronizing CUDA operation" in str(one.message) for one in found)


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
