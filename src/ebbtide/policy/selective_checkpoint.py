"""Selective activation checkpointing: of a block that is recomputed in the backward, the results of matmuls and
attention that feed a module whose tensors are kept or offloaded are stored in the forward, and not computed twice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ebbtide.config.memory import ActivationName
from ebbtide.memory.activations import OffloadedTensor
from ebbtide.parallel.dtensor import ShardSpec, local
from ebbtide.policy.block_activations import BlockState
from ebbtide.policy.recompute import Load
from ebbtide.system.torch_internals import (
    TorchDispatchMode,
    is_attention_op,
    is_matmul_op,
    op_mutates,
    storage_id,
    tree_leaves,
    tree_map,
)


class StoreResults(TorchDispatchMode):
    """Stores results that need not be recomputed, in the forward of a block that runs twice."""

    def __init__(
        self,
        block: BlockState,
        stored: list[Any],
        place: Callable[[ActivationName, Tensor], Tensor | OffloadedTensor],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._block, self._stored, self._place = block, stored, place

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = _stored_name(self._block, func, args)
        if name is not None:
            given = {storage_id(local(leaf)) for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}
            tensors = [local(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            if any(storage_id(tensor) in given for tensor in tensors):
                self._stored.append(None)  # The result is a view: nothing was computed.
            else:
                place = partial(self._place, name)
                self._stored.append(
                    tree_map(
                        lambda leaf: ShardSpec.strip(leaf, place(local(leaf))) if isinstance(leaf, Tensor) else leaf,
                        result,
                    )
                )
        return result


class ReuseResults(TorchDispatchMode):
    """Returns the stored results instead of computing them, when that block is recomputed in the backward."""

    def __init__(self, block: BlockState, stored: list[Any], load: Load) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._block, self._stored, self._load = block, stored, load

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _stored_name(self._block, func, args) is not None:
            stored = self._stored.pop(0)
            if stored is not None:
                return tree_map(
                    lambda leaf: (
                        self._load(leaf).detach() if isinstance(leaf, Tensor | OffloadedTensor | ShardSpec) else leaf
                    ),
                    stored,
                )
        return func(*args, **(kwargs or {}))


def _stored_name(block: BlockState, func: Any, args: Any) -> ActivationName | None:
    """The name whose tensors an operation computes, if that name is kept or offloaded; None for what is cheap to
    recompute."""
    scope = block.scope
    if op_mutates(func) or scope is None:
        return None
    name: ActivationName | None = None
    if is_attention_op(func):
        name = "core_attn" if block.choice.retains("core_attn") else "attn_proj"
    elif is_matmul_op(func):
        wide = next(leaf for leaf in reversed(args) if isinstance(leaf, Tensor) and leaf.ndim >= 2).shape[-1]
        consumers: dict[ActivationName, ActivationName] = {
            "qkv_linear": "core_attn",
            "attn_proj": "attn_proj",
            "mlp_fc1": "mlp_act",
            "moe_router": "moe_router",
        }
        name = ("moe_act" if wide != block.hidden else None) if scope == "moe_act" else consumers.get(scope)
    elif scope == "mlp_act" and func is torch.ops.aten.mul.Tensor:
        name = "mlp_fc2"
    return name if name is not None and block.choice.retains(name) else None
