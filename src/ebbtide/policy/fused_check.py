"""Fuses a model's blocks, and compares them with transformers' own on a few tokens, outputs and gradients, before they
are used: kernels are compiled for the GPU that is there, and a model may compute more than its modules' names show."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ebbtide.model.families import family_of, part_of
from ebbtide.model.load import decoder
from ebbtide.policy import fuse
from ebbtide.policy.attention import PACKED, use_attention
from ebbtide.policy.fuse import FusedBlocks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

LENGTHS = (24, 5)  # Tokens of the two packed sequences.
# Largest difference, as a fraction of what is compared: many times the rounding of 16 bits. With experts, rounding may
# send a token to another one, which changes the gradients of both.
TOLERANCE, SPARSE_TOLERANCE = 0.1, 0.7


def fuse_blocks(
    model: PreTrainedModel,
    device: torch.device,
    mesh: DeviceMesh | None,
    note: Callable[[str], None],
    *,
    joins: bool,
) -> FusedBlocks | None:
    """Fuses the blocks of a model on a GPU; None if it cannot, which is noted. `mesh`: the ranks among which it is
    sharded; `joins`: whether its weights may move to lie side by side."""
    if device.type not in fuse.DEVICES:
        return None
    why = fuse.why_not_fused(model, next(model.parameters()))
    if mesh is not None and mesh["tensor"].size() > 1:
        why = "tensor parallelism adds up results in the middle of a block"
    fused = None if why else FusedBlocks(model)
    if fused is not None:
        if joins:
            fused.join_weights()
        # The weights of sharded blocks are not here; their kernels are those of any other model.
        why = "" if mesh is not None else fused_problem(model, fused)
    if not why:
        return fused
    note(f"blocks: transformers' own, not fused: {why}")
    if fused is not None:
        fused.close()
    return None


def fused_problem(model: PreTrainedModel, fused: FusedBlocks) -> str:
    """What is wrong with a model's fused blocks; empty if nothing is."""
    try:
        with use_attention(model, PACKED):
            found = _results(model, fused)
            with fused.own_forwards():
                wanted = _results(model, fused)
    except torch.OutOfMemoryError:  # The machine is at fault.
        raise
    except Exception as error:  # noqa: BLE001 - compilers raise errors of their own
        return f"they fail on this machine ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    allowed = SPARSE_TOLERANCE if family_of(model).sparse else TOLERANCE
    for name, right in wanted.items():
        off = (found[name].float() - right.float()).norm() / right.float().norm().clamp(min=1e-20)
        if not off <= allowed:
            return f"{name} of a block differs from its own by {off:.0%}"
    return ""


def _results(model: PreTrainedModel, fused: FusedBlocks) -> dict[str, Tensor]:
    """The output of the first block on random input, and the gradients of its input and its weights."""
    block, inner = fused.blocks[0].module, decoder(model)
    weights = {name: weight for name, weight in block.named_parameters() if weight.requires_grad}
    kind: dict[str, Any] = {"device": model.device, "dtype": next(block.parameters()).dtype}
    generator = torch.Generator(model.device).manual_seed(0)
    width = block.get_parameter(f"{family_of(model).attn_norm}.weight").shape[0]
    hidden, grad = (torch.randn(1, sum(LENGTHS), width, generator=generator, **kind) for _ in range(2))
    positions = torch.cat([torch.arange(length, device=model.device) for length in LENGTHS])[None]
    starts = torch.tensor([0, *LENGTHS], device=model.device).cumsum(0, dtype=torch.int32)
    with torch.enable_grad():
        hidden.requires_grad_()
        output = block(
            hidden,
            attention_mask=None,
            position_ids=positions,
            past_key_values=None,
            position_embeddings=part_of(inner, family_of(model).rotary)(hidden, positions),
            cu_seq_lens_q=starts,
            cu_seq_lens_k=starts,
            max_length_q=max(LENGTHS),
            max_length_k=max(LENGTHS),
        )
        grads = torch.autograd.grad(output, [hidden, *weights.values()], grad, allow_unused=True)
    named = {f"the gradient of {name}": one for name, one in zip(["the input", *weights], grads, strict=True)}
    return {"the output": output.detach(), **{name: one for name, one in named.items() if one is not None}}
