"""Decides whether a pass of a model can be captured as a CUDA graph, and keeps captures safe."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ebbtide.model.experts import NAME, groups_on_device
from ebbtide.model.load import layers_of, rope_limit
from ebbtide.system.torch_internals import forward_pre_hooks
from ebbtide.system.transformers_internals import experts_implementation


def needs_host_sync(model: PreTrainedModel) -> bool:
    """Tells whether a pass is known to need the host in between, so that it cannot be captured: because routing to
    experts or a dynamic RoPE waits for the device, or because a forward hook gathers a block's weights from other
    ranks."""
    if any(forward_pre_hooks(block) for block in layers_of(model) or ()):
        return True
    experts = [weight for name, weight in model.named_parameters() if "experts" in name]
    return (bool(experts) and not _groups_experts(model, experts[0])) or rope_limit(model.config) is not None


def _groups_experts(model: PreTrainedModel, weight: Tensor) -> bool:
    """Tells whether all experts are one grouped matmul whose sizes are read on the device."""
    kind = experts_implementation(model.config.get_text_config())
    return kind in ("grouped_mm", NAME) and groups_on_device(weight)


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
