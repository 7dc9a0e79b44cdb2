"""What lies between the matmuls of a transformer block, forward and backward, in plain torch: the reference for
block_kernels.py, rope_kernels.py, routing_kernels.py and expert_kernels.py, and the implementation on a CPU.

The forwards round where transformers' own operations round. The backwards treat that rounding as the identity, compute
in float32, and round once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

Activation = Literal["silu", "gelu_tanh"]

GELU_SCALE, GELU_CUBIC = 0.7978845608028654, 0.044715
"""GELU's curve is x sigmoid(2 u), with u = sqrt(2 / pi) (x + 0.044715 x^3)."""


@dataclass(frozen=True)
class Norm:
    """How a family of models computes its RMS norms."""

    eps: float
    offset: float = 0.0
    """Is added to the weight: 1 for Gemma."""
    wide: bool = False
    """Multiplies with the weight in float32, as Gemma does; else the normalised input is rounded before."""


@dataclass(frozen=True)
class Rotary:
    """How queries and keys [T, heads, channels] become those that attention compares: norms of their heads, if there
    are some, and rotary position embeddings (RoPE)."""

    heads: int
    """Of queries."""
    kv_heads: int
    channels: int
    norms: tuple[Tensor, Tensor] | None
    """The weights [channels] of the norms of queries and of keys."""
    norm: Norm
    cos: Tensor
    """[T, channels]: of the angles."""
    sin: Tensor


def add_norm(
    x: Tensor,  # [T, W]
    delta: Tensor | None,  # [T, W]
    weight: Tensor,  # [W]
    norm: Norm,
) -> tuple[Tensor, Tensor]:
    """Returns x + delta (x itself without a delta), and its RMS norm: both [T, W]."""
    added = x if delta is None else x + delta
    return added, _normed(added, weight, norm)


def norm_parts(x: Tensor, weights: tuple[Tensor, Tensor], norm: Norm) -> Tensor:
    """Returns x [T, W], in which the first columns are normalised, as many as each weight has for itself."""
    widths = [len(weight) for weight in weights]
    first, second, rest = x.split([*widths, x.shape[1] - sum(widths)], 1)
    return torch.cat([_normed(first, weights[0], norm), _normed(second, weights[1], norm), rest], 1)


def norm_backward(
    x: Tensor,  # [T, W]
    weight: Tensor,  # [W]
    norm: Norm,
    grad: Tensor,  # [T, W]
    residual: Tensor | None,  # [T, W]
    *,
    remakes: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the gradients of x [T, W], with `residual` added, and of the weight [W]; `grad` is that of the output.
    Where it `remakes` the output, returns that, too."""
    dx, dweight = _norm_gradients(x, weight, norm, grad.float())
    if residual is not None:
        dx = dx + residual.float()
    return dx.to(x.dtype), dweight.to(weight.dtype), _normed(x, weight, norm) if remakes else None


def gated_norm(
    x: Tensor,  # [T, W]
    gate: Tensor,  # [T, W]
    weight: Tensor,  # [W]
    norm: Norm,
) -> Tensor:
    """Returns the RMS norm of x times the SiLU of the gate, which is rounded with it [T, W]."""
    return (_normed(x, weight, norm).float() * silu(gate.float())).to(x.dtype)


def gated_norm_backward(
    x: Tensor,  # [T, W]
    gate: Tensor,  # [T, W]
    weight: Tensor,  # [W]
    norm: Norm,
    grad: Tensor,  # [T, W]
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of x and of the gate [T, W], and of the weight [W]; `grad` is that of the output."""
    wide, share, above = gate.float(), gate.float().sigmoid(), grad.float()
    dx, dweight = _norm_gradients(x, weight, norm, above * wide * share)
    dgate = above * _normed(x, weight, norm).float() * (share + wide * share * (1 - share))
    return dx.to(x.dtype), dgate.to(gate.dtype), dweight.to(weight.dtype)


def rotate(
    qkv: Tensor,  # [T, (heads + 2 kv_heads) * channels]
    rotary: Rotary,
) -> tuple[Tensor, Tensor]:
    """Returns the queries [T, heads, channels] and keys [T, kv_heads, channels] after norm and RoPE."""
    query, key, _ = _split(qkv, rotary)
    if rotary.norms is not None:
        query, key = (_normed(one, weight, rotary.norm) for one, weight in zip((query, key), rotary.norms, strict=True))
    return _rotated(query, rotary), _rotated(key, rotary)


def rotate_expanded(
    qkv: Tensor,  # [T, (heads + 2 kv_heads) * channels]
    rotary: Rotary,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same as `rotate`, and the values, with a key and a value for each query head: [T, heads, channels] each."""
    query, key = rotate(qkv, rotary)
    value = _split(qkv, rotary)[2]
    key, value = (one.repeat_interleave(rotary.heads // rotary.kv_heads, 1) for one in (key, value))
    return query, key, value


def rotate_backward(
    qkv: Tensor,  # [T, (heads + 2 kv_heads) * channels]
    rotary: Rotary,
    dquery: Tensor,  # [T, heads, channels]
    dkey: Tensor,  # [T, heads, channels]: of a key for each query head
    dvalue: Tensor,  # [T, heads, channels]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns the gradients of qkv, and of the weights of both norms [channels]."""
    query, key, _ = _split(qkv, rotary)
    dkey, dvalue = (one.float().unflatten(1, (rotary.kv_heads, -1)).sum(2) for one in (dkey, dvalue))
    of_query, of_key = _rotated_back(dquery, rotary), _rotated_back(dkey, rotary)
    of_norms: tuple[Tensor | None, Tensor | None] = None, None
    if rotary.norms is not None:
        of_query, of_query_norm = _norm_gradients(query, rotary.norms[0], rotary.norm, of_query)
        of_key, of_key_norm = _norm_gradients(key, rotary.norms[1], rotary.norm, of_key)
        of_norms = of_query_norm.to(rotary.norms[0].dtype), of_key_norm.to(rotary.norms[1].dtype)
    parts = (part.flatten(1).to(qkv.dtype) for part in (of_query, of_key, dvalue))
    return torch.cat([*parts], 1), *of_norms


def activate(gate_up: Tensor, kind: Activation) -> Tensor:  # [T, 2 M]
    """Returns act(gate) * up [T, M], of rows with the gate in their first half."""
    gate, up = gate_up.chunk(2, -1)
    return _active(gate, kind) * up


def activate_backward(
    gate_up: Tensor,  # [T, 2 M]
    grad: Tensor,  # [T, M]
    kind: Activation,
) -> tuple[Tensor, Tensor]:
    """Writes what `activate` returned over `grad`, and the gradient of `gate_up` over it; returns both."""
    gate, up = gate_up.chunk(2, -1)
    active, wide = _active(gate, kind), grad.float()
    product = active * up
    of_gate = wide * up.float() * _slope(gate.float(), kind)
    of_up = wide * active.float()
    return grad.copy_(product), gate_up.copy_(torch.cat([of_gate, of_up], -1))


def activate_weighted_backward(
    gate_up: Tensor,  # [N, 2 M]
    grad: Tensor,  # [N, M]
    weights: Tensor,  # [N] in float32
    kind: Activation,
) -> tuple[Tensor, Tensor, Tensor]:
    """`activate_backward` where what `activate` returned is multiplied with a weight per row, and `grad` is that of the
    product divided by the weight. Also returns the gradient of the weights [N] in float32, third."""
    product = activate(gate_up, kind).float()
    of_weights = (product * grad.float()).sum(-1)
    _, of_halves = activate_backward(gate_up, grad.float() * weights[:, None], kind)
    return grad.copy_(product * weights[:, None]), of_halves, of_weights


def route(
    logits: Tensor,  # [T, E]
    count: int,
    *,
    normalizes: bool,
) -> tuple[Tensor, Tensor]:
    """Returns the experts [T, count] of the largest logits in int32, of equal ones the first; and their probabilities
    in float32, rounded to the type of the logits: among all experts, or, where it `normalizes`, among those."""
    chosen = torch.sort(logits, descending=True, stable=True).indices[:, :count]
    weights = torch.softmax(logits, -1, dtype=torch.float32).gather(1, chosen)
    if normalizes:
        weights = weights / weights.sum(-1, keepdim=True)
    return chosen.int(), weights.to(logits.dtype).float()


def route_backward(
    logits: Tensor,  # [T, E]
    chosen: Tensor,  # [T, k]
    grad: Tensor,  # [T, k] in float32
    *,
    normalizes: bool,
) -> Tensor:
    """Returns the gradient of the logits [T, E], for that of the weights."""
    probabilities = torch.softmax(logits, -1, dtype=torch.float32)
    index = chosen.long()
    if normalizes:
        top = probabilities.gather(1, index)
        total = top.sum(-1, keepdim=True)
        grad = (grad - (grad * top).sum(-1, keepdim=True) / total) / total
    above = torch.zeros_like(probabilities).scatter_(1, index, grad)
    return (probabilities * (above - (above * probabilities).sum(-1, keepdim=True))).to(logits.dtype)


def group(
    chosen: Tensor,  # [T, k]
    experts: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the visit of each row [T * k], where rows are sorted by expert and then by visit; the row of each visit
    [T, k]; and the row after each expert's last [experts] in int32."""
    visits = chosen.flatten()
    order = torch.sort(visits, stable=True).indices
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    counts = torch.zeros(experts, dtype=torch.int32, device=chosen.device)
    counts.index_add_(0, visits, torch.ones_like(visits, dtype=torch.int32))
    return order, places.view_as(chosen), counts.cumsum(0, dtype=torch.int32)


def combine(
    rows: Tensor,  # [T * k, W]
    inverse: Tensor,  # [T, k]: where the rows of a token lie
    weights: Tensor | None,  # [T, k] in float32
) -> Tensor:
    """Returns the weighted sum of each token's rows [T, W]; without weights, the sum."""
    total = torch.zeros(len(inverse), rows.shape[1], dtype=torch.float32, device=rows.device)
    for place in range(inverse.shape[1]):
        chosen = rows[inverse[:, place]].float()
        total += chosen if weights is None else chosen * weights[:, place, None]
    return total.to(rows.dtype)


def _normed(x: Tensor, weight: Tensor, norm: Norm) -> Tensor:
    return (_normalised(x, norm) * (weight.float() + norm.offset)).to(x.dtype)


def _root(wide: Tensor, norm: Norm) -> Tensor:
    return torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)


def _normalised(x: Tensor, norm: Norm) -> Tensor:
    """What the weight is multiplied with, in float32."""
    scaled = x.float() * _root(x.float(), norm)
    return scaled if norm.wide else scaled.to(x.dtype).float()


def _norm_gradients(x: Tensor, weight: Tensor, norm: Norm, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the weight in float32; `grad`, of the output, is in float32 too."""
    wide = x.float()
    root = _root(wide, norm)
    scaled = wide * root
    of_scaled = grad * (weight.float() + norm.offset)
    dx = root * (of_scaled - scaled * (of_scaled * scaled).mean(-1, keepdim=True))
    return dx, (grad * _normalised(x, norm)).flatten(0, -2).sum(0)


def _split(qkv: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values: [T, heads, channels] each."""
    counts = [rotary.heads, rotary.kv_heads, rotary.kv_heads]
    query, key, value = qkv.unflatten(-1, (-1, rotary.channels)).split(counts, 1)
    return query, key, value


def _rotated(x: Tensor, rotary: Rotary) -> Tensor:
    cos, sin = rotary.cos, rotary.sin
    low, high = x.chunk(2, -1)
    turned = torch.cat([-high, low], -1)
    products = (x.float() * cos[:, None].float()).to(x.dtype), (turned.float() * sin[:, None].float()).to(x.dtype)
    return products[0] + products[1]


def _rotated_back(grad: Tensor, rotary: Rotary) -> Tensor:
    """The gradient, in float32, of what `_rotated` was passed."""
    wide, cos, sin = grad.float(), rotary.cos, rotary.sin
    low, high = (wide * sin[:, None].float()).chunk(2, -1)
    return wide * cos[:, None].float() + torch.cat([high, -low], -1)


def _active(gate: Tensor, kind: Activation) -> Tensor:
    return silu(gate) if kind == "silu" else gelu(gate, approximate="tanh")


def _slope(gate: Tensor, kind: Activation) -> Tensor:
    """The derivative of the activation, of a gate in float32."""
    if kind == "silu":
        share = torch.sigmoid(gate)
        return share + gate * share * (1 - share)
    share = torch.sigmoid(2 * GELU_SCALE * (gate + GELU_CUBIC * gate.pow(3)))
    return share + gate * share * (1 - share) * 2 * GELU_SCALE * (1 + 3 * GELU_CUBIC * gate.pow(2))
