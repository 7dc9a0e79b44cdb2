"""What the kernels of fused decoding compute, in plain torch, for the tests of fused blocks on a CPU."""

from __future__ import annotations

from types import SimpleNamespace

from torch import Tensor, rsqrt
from torch.nn.functional import scaled_dot_product_attention, silu

from tidal import rotated


class PlainPass:
    """The attention metadata of one pass over one sequence."""

    addresses = slots = None
    block = 4

    def __init__(self) -> None:
        self._cache: dict[int, tuple[Tensor, Tensor]] = {}
        self.kernels = SimpleNamespace(
            add_norm=add_norm,
            rope_and_write_cache=self.rope_and_write_cache,
            silu_and_mul=lambda gate, up: silu(gate) * up,
        )

    def rope_and_write_cache(
        self, query, key, value, norms, eps, cos, sin, addresses, layer, slots, block, channels
    ) -> Tensor:
        q, k, v = (states.view(len(states), -1, channels) for states in (query, key, value))
        if norms is not None:
            q, k = norm(q, norms[0], eps), norm(k, norms[1], eps)
        self._cache[layer] = rotated(k, cos[:, None], sin[:, None]), v
        return rotated(q, cos[:, None], sin[:, None])

    def attend_to_cache(self, layer: int, query: Tensor, scale: float, window: int | None) -> Tensor:
        assert window is None
        states = (each.transpose(0, 1) for each in (query, *self._cache[layer]))  # [heads, T, channels]
        mixed = scaled_dot_product_attention(*states, is_causal=True, scale=scale, enable_gqa=True)
        return mixed.transpose(0, 1)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    added = x if delta is None else x + delta
    return added, norm(added, weight, eps)
