"""One pass through the model on a device: where its tokens' keys and values go, and what they attend to, all of it in device memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from ebbtide.rollout.paged import attention_kernels


@dataclass(frozen=True)
class DevicePass(ABC):
    addresses: Tensor  # [layers, 2] int64: of the cache's keys and values
    kv_heads: int
    block: int
    slots: Tensor  # [T] int32: where new keys and values go; -1 for none

    @abstractmethod
    def look_up(self, layer: int, query: Tensor, scale: float, window: int | None) -> Tensor:
        """What queries [T, heads, channels] find in the cache, the new tokens' keys and values being there."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        attention_kernels.place(key, value, self.addresses, layer, self.slots, self.block)
        return self.look_up(layer, query, scale, window)


@dataclass(frozen=True)
class Decoding(DevicePass):
    """One new token a sample; samples of a group lie together."""

    firsts: Tensor  # [B + 1] int32
    prompt_tables: Tensor  # [B, blocks] int32
    prompt_lengths: Tensor  # [B] int32
    own_tables: Tensor  # [B, blocks] int32
    own_lengths: Tensor  # [B] int32
    own_starts: Tensor  # [B] int32
    samples: int

    def look_up(self, layer: int, query: Tensor, scale: float, window: int | None) -> Tensor:
        return attention_kernels.decode(
            query,
            self.addresses,
            layer,
            self.kv_heads,
            self.block,
            self.firsts,
            self.prompt_tables,
            self.prompt_lengths,
            self.own_tables,
            self.own_lengths,
            self.own_starts,
            self.samples,
            scale,
            window,
        )


@dataclass(frozen=True)
class Reading(DevicePass):
    """Many new tokens of each of some sequences, end to end."""

    tiles: Tensor  # [tiles, 2] int32
    sequences: Tensor  # [S, 4] int32
    prompt_tables: Tensor  # [S, blocks] int32
    own_tables: Tensor  # [S, blocks] int32

    def look_up(self, layer: int, query: Tensor, scale: float, window: int | None) -> Tensor:
        return attention_kernels.read(
            query,
            self.addresses,
            layer,
            self.kv_heads,
            self.block,
            self.tiles,
            self.sequences,
            self.prompt_tables,
            self.own_tables,
            scale,
            window,
        )
