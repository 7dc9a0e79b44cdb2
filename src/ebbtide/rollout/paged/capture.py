"""Whether a pass of a model can be captured as a CUDA graph, and what a capture must not meet."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from ebbtide.policy.model import decoder, rope_limit


def needs_host(model: PreTrainedModel, *, known: bool) -> bool:
    """Whether a pass waits for the device in its middle, as routing to experts may, and a rope that follows the
    longest sequence; or gathers a block's weights from other ranks before it, which is a hook's work. `known`: its
    blocks are of a kind that was tried."""
    blocks: Any = getattr(decoder(model), "layers", ())
    if any(block._forward_pre_hooks for block in blocks):
        return True
    sparse = any("experts" in name for name, _ in model.named_parameters())
    return (sparse and not (known and _groups_experts(model))) or rope_limit(model.config) is not None


def _groups_experts(model: PreTrainedModel) -> bool:
    """Whether all experts are one product whose sizes are read on the device: torch's for bfloat16 on these GPUs, and
    a loop of the host's on others."""
    way = getattr(model.config.get_text_config(), "_experts_implementation", None)
    one_product = way == "grouped_mm" and model.dtype == torch.bfloat16
    return one_product and torch.cuda.get_device_capability(model.device)[0] in (9, 10)


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage is collected: what is freed then, such as another engine's graphs, would break a capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
