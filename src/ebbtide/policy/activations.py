"""The hooks that keep on the device, offload to the host, or drop and recompute (activation checkpointing) what blocks
save for their backward, module by module (`memory.activations`).

Three mechanisms carry out a choice, all of them exact:
- offloaded tensors are packed by autograd's saved-tensor hooks, which know the module that runs;
- what can be recomputed inside one module (a norm from its input, a gated activation from its two halves) is
  recomputed there;
- if more is to be recomputed, the whole block is checkpointed, and the results of matmuls and attention that feed a
  module whose tensors are kept or offloaded are stored (selective_checkpoint.py), so that only the rest of the block
  runs twice.
Outside of training steps the model is unchanged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ebbtide.config.memory import ActivationName
from ebbtide.memory.activations import ActivationOffloader, OffloadedTensor
from ebbtide.model.families import family_of
from ebbtide.parallel.dtensor import ShardSpec, is_fsdp_module, local, unsharded
from ebbtide.policy.block_activations import (
    ActivationChoice,
    BlockState,
    activation_names,
    gated_mlp_of,
    have_named_modules,
    norms_of,
    residual_width,
    scopes_of,
)
from ebbtide.policy.recompute import GatedCall, GatedMLP, NormCall, Recomputed, is_norm_recomputable
from ebbtide.policy.selective_checkpoint import ReuseResults, StoreResults
from ebbtide.policy.whole_blocks import WHOLE
from ebbtide.system.torch_internals import StorageWeakRef, tree_leaves


class ActivationHooks:
    """Carries out a choice inside `with activations:`, around the forwards and backwards of a training step."""

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        choice: ActivationChoice,
        offloader: ActivationOffloader | None,
        *,
        keep_last: int = 1,
        minimum: int = 2**16,
    ) -> None:
        self._offloader, self._minimum = offloader, minimum
        named = have_named_modules(blocks)
        self._parameters = {
            local(parameter).untyped_storage().data_ptr() for block in blocks for parameter in block.parameters()
        }
        with unsharded(blocks[0]):
            recomputes_norms = named and all(
                is_norm_recomputable(norm, (weight := norm.get_parameter("weight")).dtype, weight.device)
                for norm in norms_of(blocks[0]).values()
            )
        keeps_only_input = not named or choice.recompute >= set(activation_names(blocks[0])) - {"block_input"}
        self._blocks = [
            BlockState(
                number,
                block,
                # The backward starts with the last blocks: what they offload would be needed again at once.
                choice.of_block(number, offloads=number < len(blocks) - keep_last),
                scopes_of(block) if named else {},
                residual_width(block) if named else 0,
                keeps_only_input,
                None if named else WHOLE,
                recomputes_norms,
            )
            for number, block in enumerate(blocks)
        ]
        self.counted: Counter[ActivationName] | None = None
        """If set, the bytes of each name are counted and nothing is offloaded."""
        self._seen: set[StorageWeakRef] = set()
        self._undo = ExitStack()

    def __enter__(self) -> ActivationHooks:
        for block in self._blocks:
            block.wrapped = False
            if block.choice.offload or block.choice.recompute or self.counted is not None:
                self._replace(block.module, partial(self._forward, block, block.module.forward))
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()
        if self._offloader is not None:
            self._offloader.reset()

    # Wrapping the model's forwards, and undoing it

    def _wrap(self, block: BlockState) -> None:
        """Wraps the submodules of a block. It happens at the start of the block's first forward, so that the device
        has work meanwhile, except for the first block."""
        block.wrapped = True
        inside, family, gated = dict(block.module.named_modules()), family_of(block.module), gated_mlp_of(block.module)
        norms, by_module = family.norms, not block.choice.recomputes_whole_block
        for path, name in block.scopes.items():
            if (module := inside.get(path)) is not None:
                forward = module.forward
                if by_module and norms.get(path) in block.choice.recompute:
                    forward = (
                        partial(self._norm, block, norms[path], forward)
                        if block.recomputes_norms
                        else partial(_checkpointed, forward)
                    )
                elif by_module and path == family.mlp and gated is not None and "mlp_fc2" in block.choice.recompute:
                    forward = partial(self._mlp, block, gated)
                self._replace(module, partial(_scoped, block, name, forward))

    def _replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        before = module.__dict__.get("forward")
        module.forward = forward
        if before is None:
            self._undo.callback(module.__dict__.pop, "forward")
        else:
            self._undo.callback(setattr, module, "forward", before)

    # A block's forward

    def _forward(self, block: BlockState, forward: Callable[..., Any], *given: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*given, **kwargs)
        hidden, *args = given if given else (kwargs.pop("hidden_states"),)
        if not block.wrapped:
            self._wrap(block)
        block.stack.clear()
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if is_fsdp_module(block.module):  # FSDP gathers the weights for this forward, at another address each time.
            tensors += [local(parameter) for parameter in block.module.parameters()]
        block.outside = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        if self._offloader is not None and self.counted is None:
            self._offloader.enter(block.number)
        if not block.choice.recomputes_whole_block:
            with saved_tensors_hooks(partial(self._pack, block), self._unpack):
                return forward(hidden, *args, **kwargs)
        stored: list[Any] = []
        modes = (
            (nullcontext, nullcontext)
            if block.keeps_only_input
            else (
                partial(StoreResults, block, stored, partial(self._place, block)),
                partial(ReuseResults, block, stored, self._unpack),
            )
        )
        with saved_tensors_hooks(lambda tensor: self._place(block, "block_input", local(tensor)), self._unpack):
            return checkpoint(
                partial(_fresh, block, forward),
                hidden,
                *args,
                use_reentrant=False,
                preserve_rng_state=False,
                context_fn=lambda: (modes[0](), modes[1]()),
                **kwargs,
            )

    def _norm(self, block: BlockState, name: ActivationName, forward: Callable[[Tensor], Any], x: Tensor) -> Any:
        if not torch.is_grad_enabled():
            return forward(x)
        block.call = NormCall(
            local(x), partial(self._place, block, "block_input" if name == "attn_norm" else name), self._unpack
        )
        try:
            return forward(x)
        finally:
            block.end_call()

    def _mlp(self, block: BlockState, mlp: GatedMLP, x: Tensor) -> Any:
        def begin(gate: Tensor, up: Tensor) -> GatedCall | None:
            if not torch.is_grad_enabled():
                return None
            call = GatedCall(mlp.activate, gate, up, partial(self._place, block, "mlp_act"), self._unpack)
            block.call = call
            return call

        try:
            return mlp(x, begin)
        finally:
            block.end_call()

    def _pack(
        self, block: BlockState, tensor: Tensor
    ) -> Tensor | OffloadedTensor | Recomputed | ShardSpec[Tensor | OffloadedTensor | Recomputed]:
        # The local tensor has no autograd history. With it, an operation that saves its own result would keep itself
        # alive for ever.
        shard = local(tensor)
        saved: Tensor | OffloadedTensor | Recomputed | None = block.call.pack(shard) if block.call is not None else None
        return ShardSpec.strip(tensor, self._place(block, block.name(tensor), shard) if saved is None else saved)

    def _place(self, block: BlockState, name: ActivationName | None, tensor: Tensor) -> Tensor | OffloadedTensor:
        """What is saved for a tensor: the tensor itself, or its offloaded copy."""
        offloader = self._offloader
        if self.counted is None and (
            offloader is None or (name not in block.choice.offload and not offloader.tracks(tensor))
        ):
            return tensor
        storage = tensor.untyped_storage()
        if name is None or storage.nbytes() < self._minimum:
            return tensor
        if storage.data_ptr() in self._parameters or storage.data_ptr() in block.outside:
            return tensor
        if self.counted is not None:
            if (known := StorageWeakRef(storage)) not in self._seen:
                self._seen.add(known)
                self.counted[name] += storage.nbytes()
        elif offloader is not None:
            return offloader.offload(tensor) or tensor
        return tensor

    def _unpack(self, saved: Tensor | OffloadedTensor | Recomputed | ShardSpec[Any]) -> Tensor:
        if isinstance(saved, ShardSpec):
            return saved.wrap(self._unpack(saved.part))
        if isinstance(saved, Tensor):
            return saved
        if isinstance(saved, Recomputed):
            return saved.make()
        assert self._offloader is not None
        return self._offloader.fetch(saved)


def _scoped(block: BlockState, name: ActivationName, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A submodule's forward, in the scope of its name."""
    block.stack.append(name)
    try:
        return forward(*args, **kwargs)
    finally:
        block.stack.pop()


def _fresh(block: BlockState, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A block's forward that starts outside of every scope, even if the previous one was aborted."""
    block.stack.clear()
    return forward(*args, **kwargs)


def _checkpointed(forward: Callable[..., Any], *args: Any) -> Any:
    return (
        checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False)
        if torch.is_grad_enabled()
        else forward(*args)
    )
