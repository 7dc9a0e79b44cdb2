"""What lies between the matmuls of a transformer block, forward and backward: Triton kernels for tensors on a GPU, and
plain torch for others. The backwards are written out, and autograd is to record none of it.

The forwards round where transformers' own operations round; the backwards compute in float32 and round once. Nothing
depends on the order in which a GPU's programs run, so that the same input gives the same bits. `T` counts tokens, and
no kernel is compiled anew for another T.
"""

from __future__ import annotations

from torch import Tensor

from ebbtide.model import block_reference
from ebbtide.model.block_reference import Activation, Norm, Rotary

__all__ = [
    "Activation",
    "Norm",
    "Rotary",
    "activate",
    "activate_backward",
    "activate_weighted_backward",
    "add_norm",
    "combine",
    "gated_norm",
    "gated_norm_backward",
    "group",
    "norm_backward",
    "norm_parts",
    "rotate",
    "rotate_backward",
    "rotate_expanded",
    "route",
    "route_backward",
]

# The kernels' modules are imported where they are needed: they need triton, which comes with torch on a GPU.


def add_norm(
    x: Tensor,  # [T, W]
    delta: Tensor | None,  # [T, W]
    weight: Tensor,  # [W]
    norm: Norm,
) -> tuple[Tensor, Tensor]:
    """Returns x + delta (x itself without a delta), and its RMS norm: both [T, W]."""
    if x.is_cuda:
        from ebbtide.model import block_kernels

        return block_kernels.add_norm(x, delta, weight, norm)
    return block_reference.add_norm(x, delta, weight, norm)


def norm_parts(
    x: Tensor,  # [T, W]
    weights: tuple[Tensor, Tensor],
    norm: Norm,
) -> Tensor:
    """Returns x, in which the first columns are normalised, as many as each weight has for itself."""
    if x.is_cuda:
        from ebbtide.model import block_kernels

        return block_kernels.norm_parts(x, weights, norm)
    return block_reference.norm_parts(x, weights, norm)


def norm_backward(
    x: Tensor,  # [T, W]: what was normalised
    weight: Tensor,  # [W]
    norm: Norm,
    grad: Tensor,  # [T, W]: of the norm's output
    residual: Tensor | None,  # [T, W]: a gradient of x from elsewhere
    *,
    remakes: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the gradients of x [T, W], with `residual` added before it is rounded, and of the weight [W]; and the
    norm's output, recomputed, where it `remakes` that."""
    if x.is_cuda:
        from ebbtide.model import block_kernels

        return block_kernels.norm_backward(x, weight, norm, grad, residual, remakes=remakes)
    return block_reference.norm_backward(x, weight, norm, grad, residual, remakes=remakes)


def gated_norm(
    x: Tensor,  # [T, W]
    gate: Tensor,  # [T, W]
    weight: Tensor,  # [W]
    norm: Norm,
) -> Tensor:
    """Returns the RMS norm of x times the SiLU of the gate [T, W]."""
    if x.is_cuda:
        from ebbtide.model import gated_norm_kernels

        return gated_norm_kernels.gated_norm(x, gate, weight, norm)
    return block_reference.gated_norm(x, gate, weight, norm)


def gated_norm_backward(
    x: Tensor,  # [T, W]
    gate: Tensor,  # [T, W]
    weight: Tensor,  # [W]
    norm: Norm,
    grad: Tensor,  # [T, W]
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of x and of the gate [T, W], and of the weight [W]."""
    if x.is_cuda:
        from ebbtide.model import gated_norm_kernels

        return gated_norm_kernels.gated_norm_backward(x, gate, weight, norm, grad)
    return block_reference.gated_norm_backward(x, gate, weight, norm, grad)


def rotate(
    qkv: Tensor,  # [T, (heads + 2 kv_heads) * channels]
    rotary: Rotary,
) -> tuple[Tensor, Tensor]:
    """Returns the queries [T, heads, channels] and keys [T, kv_heads, channels] after norm and RoPE."""
    if qkv.is_cuda:
        from ebbtide.model import rope_kernels

        return rope_kernels.rotate(qkv, rotary)
    return block_reference.rotate(qkv, rotary)


def rotate_expanded(
    qkv: Tensor,  # [T, (heads + 2 kv_heads) * channels]
    rotary: Rotary,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same as `rotate`, and the values, with a key and a value for each query head: [T, heads, channels] each.

    The backward of attention then leaves it to `rotate_backward` to add up what the query heads of a key give, which it
    does in a pass that reads them anyway.
    """
    if qkv.is_cuda:
        from ebbtide.model import rope_kernels

        return rope_kernels.rotate_expanded(qkv, rotary)
    return block_reference.rotate_expanded(qkv, rotary)


def rotate_backward(
    qkv: Tensor,  # [T, (heads + 2 kv_heads) * channels]
    rotary: Rotary,
    dquery: Tensor,  # [T, heads, channels]; tokens may lie apart, here and in the next two
    dkey: Tensor,  # [T, heads, channels]: of what `rotate_expanded` returned
    dvalue: Tensor,  # [T, heads, channels]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns the gradients of qkv, as a new tensor, and of the weights of both norms [channels]."""
    if qkv.is_cuda:
        from ebbtide.model import rope_kernels

        return rope_kernels.rotate_backward(qkv, rotary, dquery, dkey, dvalue)
    return block_reference.rotate_backward(qkv, rotary, dquery, dkey, dvalue)


def activate(gate_up: Tensor, kind: Activation) -> Tensor:  # [T, 2 M]
    """Returns act(gate) * up [T, M], of rows with the gate in their first half."""
    if gate_up.is_cuda:
        from ebbtide.model import block_kernels

        return block_kernels.activate(gate_up, kind)
    return block_reference.activate(gate_up, kind)


def activate_backward(
    gate_up: Tensor,  # [T, 2 M]: is overwritten
    grad: Tensor,  # [T, M]: is overwritten
    kind: Activation,
) -> tuple[Tensor, Tensor]:
    """Returns what `activate` returned, to the bit, and the gradient of `gate_up`.

    Both are written in place: the first over `grad`, the second over `gate_up`. The tensors returned are those two.
    """
    if gate_up.is_cuda:
        from ebbtide.model import block_kernels

        return block_kernels.activate_backward(gate_up, grad, kind)
    return block_reference.activate_backward(gate_up, grad, kind)


def activate_weighted_backward(
    gate_up: Tensor,  # [N, 2 M]: is overwritten
    grad: Tensor,  # [N, M]: is overwritten
    weights: Tensor,  # [N] in float32
    kind: Activation,
) -> tuple[Tensor, Tensor, Tensor]:
    """`activate_backward` for an expert's rows, each of which counts with a weight.

    `grad` is the gradient of what `activate` returned, before it is multiplied with the row's weight. Returns that
    times the weight, written over `grad`; the gradient of `gate_up`, written over it; and that of the weights [N] in
    float32.
    """
    if gate_up.is_cuda:
        from ebbtide.model import expert_kernels

        return expert_kernels.activate_weighted_backward(gate_up, grad, weights, kind)
    return block_reference.activate_weighted_backward(gate_up, grad, weights, kind)


def route(
    logits: Tensor,  # [T, E]
    count: int,
    *,
    normalizes: bool,
) -> tuple[Tensor, Tensor]:
    """Returns the experts [T, count] of the largest logits in int32, of equal ones the first; and their probabilities
    in float32, rounded to the type of the logits: among all experts, or, where it `normalizes`, among those."""
    if logits.is_cuda:
        from ebbtide.model import routing_kernels

        return routing_kernels.route(logits, count, normalizes=normalizes)
    return block_reference.route(logits, count, normalizes=normalizes)


def route_backward(
    logits: Tensor,  # [T, E]
    chosen: Tensor,  # [T, k]: what `route` chose
    grad: Tensor,  # [T, k] in float32: of the weights
    *,
    normalizes: bool,
) -> Tensor:
    """Returns the gradient of the logits [T, E]."""
    if logits.is_cuda:
        from ebbtide.model import routing_kernels

        return routing_kernels.route_backward(logits, chosen, grad, normalizes=normalizes)
    return block_reference.route_backward(logits, chosen, grad, normalizes=normalizes)


def group(
    chosen: Tensor,  # [T, k], of integers: the experts that each token visits
    experts: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the visit of each row [T * k], where rows are sorted by expert and then by visit; the row of each visit
    [T, k]; and the row after each expert's last [experts] in int32."""
    if chosen.is_cuda:
        from ebbtide.model import routing_kernels

        return routing_kernels.group(chosen, experts)
    return block_reference.group(chosen, experts)


def combine(
    rows: Tensor,  # [T * k, W]
    inverse: Tensor,  # [T, k], int64 or int32: where the rows of a token lie
    weights: Tensor | None,  # [T, k] in float32
) -> Tensor:
    """Returns the weighted sum of each token's rows [T, W], added in float32 in the order of k; without weights, the
    sum."""
    if rows.is_cuda:
        from ebbtide.model import expert_kernels

        return expert_kernels.combine(rows, inverse, weights)
    return block_reference.combine(rows, inverse, weights)
