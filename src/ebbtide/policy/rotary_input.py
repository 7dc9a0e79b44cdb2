"""What some families do to queries, keys and values between their projection and the kernel that rotates them: norms
over the channels of all heads, and another order of channels.

The kernel rotates the channels c and c + channels / 2 of a head as a pair. Where a family pairs others, or leaves some
alone, queries and keys are put into that order first. Attention compares them channel by channel, and does not notice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ebbtide.model.block_functions import Norm, norm_backward, norm_parts


class RotaryInput:
    """The queries, keys and values of a block before the kernel that rotates them: `heads` of queries, and `kv_heads`
    each of keys and values."""

    def __init__(self, heads: int, kv_heads: int, channels: int) -> None:
        self._heads = heads, kv_heads, kv_heads
        self._channels = channels
        self._norms: Sequence[str] = ()
        self._norm = Norm(0.0)
        self._order: list[int] | None = None
        self._columns: tuple[Tensor, Tensor] | None = None
        self.rotary_channels = channels
        """Channels of a head that are rotated, the first ones."""

    def normalize(self, norms: Sequence[str], norm: Norm) -> None:
        """Normalizes the queries of all heads together, and the keys, with weights of these names."""
        self._norms, self._norm = norms, norm

    def pair(self, rotary_channels: int, *, interleaved: bool) -> None:
        """Rotates the first channels of a head only; in pairs of neighbours if they are interleaved."""
        self.rotary_channels, channels = rotary_channels, self._channels
        if rotary_channels == channels and not interleaved:
            return
        rotated, alone = list(range(rotary_channels)), list(range(rotary_channels, channels))
        half, rest = rotary_channels // 2, len(alone) // 2
        first, second = (rotated[::2], rotated[1::2]) if interleaved else (rotated[:half], rotated[half:])
        order = [*first, *alone[:rest], *second, *alone[rest:]]
        queries, keys, values = self._heads
        self._order = [head * channels + channel for head in range(queries + keys) for channel in order]
        self._order += range((queries + keys) * channels, (queries + keys + values) * channels)

    def forward(self, qkv: Tensor, weights: dict[str, Tensor]) -> Tensor:
        """Queries, keys and values [T, (heads + 2 kv heads) * channels] as the kernel takes them."""
        if self._norms:
            query, key = (weights[name] for name in self._norms)
            qkv = norm_parts(qkv, (query, key), self._norm)
        return qkv if self._order is None else qkv.index_select(1, self._placed(qkv.device)[0])

    def backward(
        self, qkv: Tensor, grad: Tensor, weights: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor | None]]:
        """The gradients of `qkv`, and of the norms' weights, for that of what `forward` returned."""
        if self._order is not None:
            grad = grad.index_select(1, self._placed(qkv.device)[1])
        if not self._norms:
            return grad, {}
        (*inputs, _), (*of_outputs, of_value) = self._split(qkv), self._split(grad)
        both = zip(inputs, self._norms, of_outputs, strict=True)
        found = {name: norm_backward(x, weights[name], self._norm, dx, None) for x, name, dx in both}
        whole = torch.cat([*(dx for dx, _, _ in found.values()), of_value], 1)
        return whole, {name: dweight for name, (_, dweight, _) in found.items()}

    def angles(self, cos: Tensor, sin: Tensor, *, rotates: bool = True) -> tuple[Tensor, Tensor]:
        """The angles (cos, sin) [T, channels], of those of the model [T, rotary channels]; of no rotation, where it
        does not rotate."""
        if not rotates:
            cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
        if self.rotary_channels == self._channels:
            return cos.contiguous(), sin.contiguous()
        half, rest = self.rotary_channels // 2, (self._channels - self.rotary_channels) // 2
        wide = [torch.cat([one[:, :half], one.new_full((len(one), rest), of)], 1) for one, of in ((cos, 1), (sin, 0))]
        return wide[0].repeat(1, 2), wide[1].repeat(1, 2)

    def _split(self, qkv: Tensor) -> list[Tensor]:
        """Queries, keys and values [T, heads * channels] each."""
        return [part.contiguous() for part in qkv.split([count * self._channels for count in self._heads], 1)]

    def _placed(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The order of columns, and the one that takes it back."""
        if self._columns is None or self._columns[0].device != device:
            order = torch.tensor(self._order, device=device)
            self._columns = order, order.argsort()
        return self._columns
