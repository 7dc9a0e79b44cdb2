"""Fuses a model's blocks, and compares them with transformers' own on a few tokens, outputs and gradients, before they
are used: kernels are compiled for the GPU that is there, and a model may compute more than its modules' names show."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ebbtide.model.families import family_of, part_of
from ebbtide.model.load import decoder
from ebbtide.parallel.dtensor import is_sharded
from ebbtide.policy import fuse
from ebbtide.policy.attention import PACKED, use_attention
from ebbtide.policy.fuse import FusedBlocks
from ebbtide.policy.fused_block import FusedBlock

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

LENGTHS = (24, 5)  # Tokens of the two packed sequences.
TOLERANCE = 0.1  # Largest difference, as a fraction of what is compared: many times the rounding of 16 bits.
AGREEING = 0.8  # Fraction of tokens whose outputs have to agree: rounding may send a token to another expert.


def fuse_blocks(
    model: PreTrainedModel,
    device: torch.device,
    mesh: DeviceMesh | None,
    note: Callable[[str], None],
    *,
    joins: bool,
    packs: bool = False,
) -> FusedBlocks | None:
    """Fuses the blocks of a model on a GPU; None if it cannot, which is noted. `mesh`: the ranks among which it is
    sharded; `joins`: whether its weights may move to lie side by side; `packs`: then those of a block that are frozen
    have one storage."""
    if device.type not in fuse.DEVICES:
        return None
    if (before := fuse.fused_blocks_of(model)) is not None:
        before.close()
    # Codes of a quantized embedding are no numbers.
    weight = next(one for one in model.parameters() if one.is_floating_point())
    why = fuse.why_not_fused(model, weight)
    if mesh is not None and mesh["tensor"].size() > 1:
        why = "tensor parallelism adds up results in the middle of a block"
    fused = None if why else FusedBlocks(model)
    if fused is not None:
        if joins:
            fused.join_weights(packs=packs)
        _begin_backwards(device)
        # A sharded block has its weights only inside the whole model's forward, so that it is not checked.
        sharded = any(is_sharded(parameter) for parameter in model.parameters())
        why = "" if sharded else fused_problem(model, fused)
        why += ". Plans are made for fused blocks, which need less memory" if why else ""
    if not why:
        return fused
    note(f"blocks: transformers' own, not fused: {why}")
    if fused is not None:
        fused.close()
    return None


def _begin_backwards(device: torch.device) -> None:
    """Runs a backward without a matmul: if the first work of autograd's thread for a GPU is a matmul, torch warns that
    the thread has no CUDA context yet."""
    torch.ones((), device=device, requires_grad=True).exp().backward()


def fused_problem(model: PreTrainedModel, fused: FusedBlocks) -> str:
    """What is wrong with a model's fused blocks; empty if nothing is. One block of each kind is compared."""
    kinds = {block.kind: block for block in reversed(fused.blocks)}
    try:
        with use_attention(model, PACKED):
            return next((problem for block in kinds.values() if (problem := _compare(model, fused, block))), "")
    except torch.OutOfMemoryError:  # The machine is at fault.
        raise
    except Exception as error:  # Compilers raise errors of their own. The run notes it, and its log has the traceback.
        logging.getLogger(__name__).warning("fused blocks failed in their check", exc_info=True)
        return f"they fail on this machine ({type(error).__name__}: {' '.join(str(error).split())[:200]})"


def _compare(model: PreTrainedModel, fused: FusedBlocks, block: FusedBlock) -> str:
    """What of a fused block differs from the module's own forward and backward; empty if nothing does."""
    call = _block_call(model, block)
    ours = call.changes()
    with fused.own_forwards():
        theirs = call.changes()
    agree = _apart(ours, theirs, dim=-1) <= TOLERANCE  # [T]
    if not agree.float().mean() >= AGREEING:
        return f"the output of a block differs from its own for {1 - agree.float().mean():.0%} of the tokens"
    found = call.gradients(agree)
    with fused.own_forwards():
        wanted = call.gradients(agree)
    for name, right in wanted.items():
        off = _apart(found[name], right)
        if not off <= TOLERANCE:
            return f"the gradient of {name} of a block differs from its own by {off:.0%}"
    return ""


def _apart(ours: Tensor, theirs: Tensor, dim: int | None = None) -> Tensor:
    """The norm of the difference, as a fraction."""
    right = theirs.float()
    difference: Tensor = torch.linalg.vector_norm(ours.float() - right, dim=dim)
    apart: Tensor = difference / torch.linalg.vector_norm(right, dim=dim).clamp(min=1e-20)
    return apart


@dataclass(frozen=True)
class _BlockCall:
    """A call of a block with random input."""

    module: nn.Module
    hidden: Tensor  # [1, T, H]
    grad: Tensor
    named: dict[str, Any]

    @torch.no_grad()
    def changes(self) -> Tensor:
        """What the block adds to its input [T, H]."""
        output: Tensor = self.module(self.hidden, **self.named)
        return (output - self.hidden)[0]

    def gradients(self, counted: Tensor) -> dict[str, Tensor]:
        """The gradients of the input and the weights, of the tokens that are `counted` [T]."""
        weights = {name: weight for name, weight in self.module.named_parameters() if weight.requires_grad}
        with torch.enable_grad():
            hidden = self.hidden.detach().requires_grad_()
            output = self.module(hidden, **self.named)
            grads = torch.autograd.grad(
                output, [hidden, *weights.values()], self.grad * counted[:, None], allow_unused=True
            )
        named = zip(["the input", *weights], grads, strict=True)
        return {name: grad for name, grad in named if grad is not None}


def _block_call(model: PreTrainedModel, block: FusedBlock) -> _BlockCall:
    device, family = model.device, family_of(model)
    weight = block.module.get_parameter(f"{family.stream_norms[0]}.weight")
    generator = torch.Generator(device).manual_seed(0)
    size = 1, sum(LENGTHS), weight.shape[0]
    hidden, grad = (torch.randn(size, generator=generator, device=device, dtype=weight.dtype) for _ in range(2))
    positions = torch.cat([torch.arange(length, device=device) for length in LENGTHS])[None]
    starts = torch.tensor([0, *LENGTHS], device=device).cumsum(0, dtype=torch.int32)
    with torch.no_grad():
        angles = part_of(decoder(model), family.rotary)(hidden, positions, *block.rotary_kind)
    named = {
        "attention_mask": None,
        "position_ids": positions,
        "past_key_values": None,
        "position_embeddings": angles,
        "cu_seq_lens_q": starts,
        "cu_seq_lens_k": starts,
        "max_length_q": max(LENGTHS),
        "max_length_k": max(LENGTHS),
    }
    return _BlockCall(block.module, hidden, grad, named)
