"""What a block of the model saves for its backward: kept on the device, parked on the host, or dropped and made again, module by module.

A name stands for the tensors that its module saves. Three things carry it out, all of them exact:
- what is offloaded is packed by autograd's own hooks, which know the module that runs;
- what can be made again inside one module (a norm from its input, a gated activation from its two halves) is made again there;
- where more is to be made again, the whole block is checkpointed, and the results of products (matrices, attention) that feed a module
  whose tensors are kept or offloaded are stored, so that only the rest of the block runs twice.
Outside of training steps the model is as it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from ebbtide.config.tree import Activation
from ebbtide.memory.activations import Parking, View
from ebbtide.memory.shards import Laid, by_fsdp, local, unsharded
from ebbtide.policy.again import Again, Call, GatedCall, NormCall, gated, norm_follows

NAMES: tuple[Activation, ...] = get_args(Activation)

# Submodule of a block -> the name of what it saves. A submodule's own arithmetic, outside of those below it, has its name too.
_DENSE: dict[str, Activation] = {
    "input_layernorm": "attn_norm",
    "self_attn": "core_attn",
    "self_attn.q_proj": "qkv_linear",
    "self_attn.k_proj": "qkv_linear",
    "self_attn.v_proj": "qkv_linear",
    "self_attn.q_norm": "qkv_linear",
    "self_attn.k_norm": "qkv_linear",
    "self_attn.o_proj": "attn_proj",
    "post_attention_layernorm": "mlp_norm",
    "mlp": "mlp_act",
    "mlp.gate_proj": "mlp_fc1",
    "mlp.up_proj": "mlp_fc1",
    "mlp.act_fn": "mlp_act",
    "mlp.down_proj": "mlp_fc2",
}
_SPARSE: dict[str, Activation] = {
    **{path: name for path, name in _DENSE.items() if not path.startswith("mlp")},
    "mlp": "moe_router",
    "mlp.gate": "moe_router",
    "mlp.experts": "moe_act",
    "mlp.experts.act_fn": "moe_act",
}

# Norms, and the names under which each can be made again by itself.
NORMS: dict[str, Activation] = {
    "input_layernorm": "attn_norm",
    "self_attn.q_norm": "qkv_linear",
    "self_attn.k_norm": "qkv_linear",
    "post_attention_layernorm": "mlp_norm",
}

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten._grouped_mm.default}


def names_of(block: nn.Module) -> list[Activation]:
    """The names that a block has."""
    inside = {path for path, _ in block.named_modules()}
    found = {name for path, name in _scopes(block).items() if path in inside}
    if "mlp.experts" in inside:
        found.add("expert_fc1")
    return [name for name in NAMES if name in found or name == "block_input"]


def local_names(block: nn.Module) -> frozenset[Activation]:
    """The names that can be made again inside one module of this block, from little more than is saved anyway: norms (also of queries and keys), and the product that a gated MLP ends with."""
    mlp: Any = block.get_submodule("mlp")
    found = {NORMS[path] for path in _norms(block)}
    if all(hasattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
        weight = mlp.gate_proj.weight
        probe = torch.linspace(-1, 1, 4 * weight.shape[1], dtype=weight.dtype, device=weight.device).view(1, 4, -1)
        with torch.no_grad(), unsharded(block):
            if torch.equal(gated(mlp, probe), mlp(probe)):
                found.add("mlp_fc2")
    return frozenset(found)


def _norms(block: nn.Module) -> dict[str, nn.Module]:
    return {path: module for path, module in block.named_modules() if path in NORMS}


def _scopes(block: nn.Module) -> dict[str, Activation]:
    return _SPARSE if hasattr(block.get_submodule("mlp"), "experts") else _DENSE


@dataclass(frozen=True)
class Choice:
    """What is done with each name; what is not named is kept."""

    offload: frozenset[Activation] = frozenset()
    recompute: frozenset[Activation] = frozenset()
    local: frozenset[Activation] = frozenset()
    """Those that can be made again inside one module."""

    @property
    def whole_block(self) -> bool:
        """More is to be made again than single modules can."""
        return bool(self.recompute - self.local)

    def retains(self, name: Activation) -> bool:
        return name not in self.recompute


@dataclass
class _Block:
    """One block, and the scope in which its forward is at the moment."""

    number: int
    module: nn.Module
    choice: Choice
    scopes: dict[str, Activation]
    hidden: int
    everything: bool
    """All of it is made again from its input."""
    follow: bool = False
    """Its norms are of the usual kind."""
    wrapped: bool = False
    call: Call | None = None
    """Of the module that is running, if it makes again what it saves."""
    stack: list[Activation] = field(default_factory=list)
    shared: set[int] = field(default_factory=set)
    """Storages that come from outside: positions, masks, gathered weights."""

    def end_call(self) -> None:
        if self.call is not None:
            self.call.over()
            self.call = None

    @property
    def scope(self) -> Activation | None:
        return self.stack[-1] if self.stack else None

    def name(self, tensor: Tensor) -> Activation | None:
        """What a tensor that is saved now is called."""
        if self.scope == "moe_act" and tensor.shape[-1:] == (self.hidden,):
            return "expert_fc1"
        if self.scope == "attn_norm" and "attn_norm" in self.choice.recompute:
            return "block_input"  # all that a norm saves which is made again
        return self.scope


class Activations:
    """`with activations:` around the forwards and backwards of a training step."""

    def __init__(
        self, blocks: Sequence[nn.Module], choice: Choice, parking: Parking | None, *, keep_last: int = 1, minimum: int = 2**16
    ) -> None:
        self._parking, self._minimum = parking, minimum
        self._parameters = {local(parameter).untyped_storage().data_ptr() for block in blocks for parameter in block.parameters()}
        # The backward begins with the last blocks: what they park would be wanted back at once.
        weight = next(blocks[0].parameters())
        with unsharded(blocks[0]):
            follow = all(norm_follows(norm, weight.dtype, weight.device) for norm in _norms(blocks[0]).values())
        everything = choice.recompute >= set(names_of(blocks[0])) - {"block_input"}
        kept = Choice(recompute=choice.recompute, local=choice.local)
        self._blocks = [
            _Block(number, block, choice if number < len(blocks) - keep_last else kept, _scopes(block), _width(block), everything, follow)
            for number, block in enumerate(blocks)
        ]
        self.counted: Counter[Activation] | None = None
        """While it is there: the bytes of each name are counted, and nothing is parked."""
        self._seen: set[StorageWeakRef] = set()
        self._undo = ExitStack()

    def __enter__(self) -> Activations:
        for block in self._blocks:
            block.wrapped = False
            if block.choice.offload or block.choice.recompute or self.counted is not None:
                self._replace(block.module, partial(self._forward, block, block.module.forward))
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()
        if self._parking is not None:
            self._parking.reset()

    # Into the model and out of it again

    def _wrap(self, block: _Block) -> None:
        """What is inside a block; as its first forward begins, so that for all but the first the device has work meanwhile."""
        block.wrapped = True
        inside = dict(block.module.named_modules())
        for path, name in block.scopes.items():
            if (module := inside.get(path)) is not None:
                forward = module.forward
                if not block.choice.whole_block and NORMS.get(path) in block.choice.recompute:
                    forward = partial(self._norm, block, NORMS[path], forward) if block.follow else partial(_checkpointed, forward)
                elif not block.choice.whole_block and path == "mlp" and "mlp_fc2" in block.choice.recompute:
                    forward = partial(self._mlp, block, module)
                self._replace(module, partial(_scoped, block, name, forward))

    def _replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        before = module.__dict__.get("forward")
        module.forward = forward
        if before is None:
            self._undo.callback(module.__dict__.pop, "forward")
        else:
            self._undo.callback(setattr, module, "forward", before)

    # A block's forward

    def _forward(self, block: _Block, forward: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(hidden, *args, **kwargs)
        if not block.wrapped:
            self._wrap(block)
        block.stack.clear()
        outside = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if by_fsdp(block.module):  # gathered for this forward, elsewhere each time
            outside += [local(parameter) for parameter in block.module.parameters()]
        block.shared = {leaf.untyped_storage().data_ptr() for leaf in outside}
        if self._parking is not None and self.counted is None:
            self._parking.enter(block.number)
        if not block.choice.whole_block:
            with saved_tensors_hooks(partial(self._pack, block), self._unpack):
                return forward(hidden, *args, **kwargs)
        stored: list[Any] = []
        modes = (
            (nullcontext, nullcontext) if block.everything else (partial(_Store, self, block, stored), partial(_Reuse, self, block, stored))
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

    def _norm(self, block: _Block, name: Activation, forward: Callable[[Tensor], Any], x: Tensor) -> Any:
        if not torch.is_grad_enabled():
            return forward(x)
        block.call = NormCall(local(x), partial(self._place, block, "block_input" if name == "attn_norm" else name), self._unpack)
        try:
            return forward(x)
        finally:
            block.end_call()

    def _mlp(self, block: _Block, mlp: Any, x: Tensor) -> Any:
        def begin(gate: Tensor, up: Tensor) -> GatedCall | None:
            if not torch.is_grad_enabled():
                return None
            call = GatedCall(mlp.act_fn, gate, up, partial(self._place, block, "mlp_act"), self._unpack)
            block.call = call
            return call

        try:
            return gated(mlp, x, begin)
        finally:
            block.end_call()

    def _pack(self, block: _Block, tensor: Tensor) -> Tensor | View | Again | Laid[Tensor | View | Again]:
        here = local(tensor)  # with its history, what an operation saves of its own result would hold the operation for ever
        saved: Tensor | View | Again | None = block.call.pack(here) if block.call is not None else None
        return Laid.out(tensor, self._place(block, block.name(tensor), here) if saved is None else saved)

    def _place(self, block: _Block, name: Activation | None, tensor: Tensor) -> Tensor | View:
        """A tensor that is saved: itself, or where it is parked."""
        parking = self._parking
        if self.counted is None and (parking is None or (name not in block.choice.offload and not parking.knows(tensor))):
            return tensor
        storage = tensor.untyped_storage()
        if name is None or storage.nbytes() < self._minimum:
            return tensor
        if storage.data_ptr() in self._parameters or storage.data_ptr() in block.shared:
            return tensor
        if self.counted is not None:
            if (known := StorageWeakRef(storage)) not in self._seen:
                self._seen.add(known)
                self.counted[name] += storage.nbytes()
        elif parking is not None:
            return parking.park(tensor) or tensor
        return tensor

    def _unpack(self, saved: Tensor | View | Again | Laid[Any]) -> Tensor:
        if isinstance(saved, Laid):
            return saved.around(self._unpack(saved.part))
        if isinstance(saved, Tensor):
            return saved
        if isinstance(saved, Again):
            return saved.make()
        assert self._parking is not None
        return self._parking.fetch(saved)


class _Store(TorchDispatchMode):
    """In the forward of a block that runs twice: keeps the results that need not be computed again."""

    def __init__(self, owner: Activations, block: _Block, stored: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner, self._block, self._stored = owner, block, stored

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = _feeds(self._block, func, args)
        if name is not None:
            given = {local(leaf).untyped_storage()._cdata for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}
            tensors = [local(leaf) for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
            if any(tensor.untyped_storage()._cdata in given for tensor in tensors):
                self._stored.append(None)  # a view: nothing was computed
            else:
                place = partial(self._owner._place, self._block, name)
                self._stored.append(tree_map(lambda leaf: Laid.out(leaf, place(local(leaf))) if isinstance(leaf, Tensor) else leaf, made))
        return made


class _Reuse(TorchDispatchMode):
    """When that block runs again in the backward: gives what was kept in place of computing it."""

    def __init__(self, owner: Activations, block: _Block, stored: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner, self._block, self._stored = owner, block, stored

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _feeds(self._block, func, args) is not None:
            kept = self._stored.pop(0)
            if kept is not None:
                return tree_map(lambda leaf: self._owner._unpack(leaf).detach() if isinstance(leaf, Tensor | View | Laid) else leaf, kept)
        return func(*args, **(kwargs or {}))


def _feeds(block: _Block, func: Any, args: Any) -> Activation | None:
    """The name whose tensors an operation makes, where that name is kept or offloaded; None for what is cheap to make again."""
    schema, scope = func._schema, block.scope
    if schema.is_mutable or scope is None:
        return None
    name: Activation | None = None
    if "attention" in schema.name or "varlen_attn" in schema.name:
        name = "core_attn" if block.choice.retains("core_attn") else "attn_proj"
    elif func in _PRODUCTS:
        wide = next(leaf for leaf in reversed(args) if isinstance(leaf, Tensor) and leaf.ndim >= 2).shape[-1]
        consumers: dict[Activation, Activation] = {
            "qkv_linear": "core_attn",
            "attn_proj": "attn_proj",
            "mlp_fc1": "mlp_act",
            "moe_router": "moe_router",
        }
        name = ("moe_act" if wide != block.hidden else None) if scope == "moe_act" else consumers.get(scope)
    elif scope == "mlp_act" and func is _aten.mul.Tensor:
        name = "mlp_fc2"
    return name if name is not None and block.choice.retains(name) else None


def _scoped(block: _Block, name: Activation, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    block.stack.append(name)
    try:
        return forward(*args, **kwargs)
    finally:
        block.stack.pop()


def _fresh(block: _Block, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A forward that begins outside of every scope, also where the one before it was left in the middle."""
    block.stack.clear()
    return forward(*args, **kwargs)


def _checkpointed(forward: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False) if torch.is_grad_enabled() else forward(*args)


def _width(block: nn.Module) -> int:
    """Channels of the residual stream."""
    weight = block.get_submodule("input_layernorm").weight
    assert isinstance(weight, Tensor)
    return len(weight)
