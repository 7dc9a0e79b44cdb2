"""The attention metadata of one pass on a GPU: where its tokens' keys and values are written (the slot mapping), and
what they attend to (block tables and lengths), all of it in device memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from torch import Tensor

from ebbtide.model.attention_kernels import attend_to_cache
from ebbtide.model.attention_kind import AttentionKind
from ebbtide.model.block_reference import Rotary
from ebbtide.model.state_layers import StatePass
from ebbtide.rollout.paged.attention import CacheLayout
from ebbtide.rollout.paged.cache_kernels import rope_and_write_cache, write_cache
from ebbtide.rollout.paged.decode_kernels import decode


@dataclass(frozen=True)
class PassMetadata(ABC):
    """The slot mapping of a pass; subclasses add what its tokens attend to."""

    addresses: Tensor  # [layers, 2] int64: the addresses of the cache's keys and values
    layout: CacheLayout
    block: int
    slots: Tensor  # [T] int32: where new keys and values are written; -1 for padding
    adapters: Tensor  # [T] int32: the adapter of each token, where the model has several by name; 0 is none
    token_positions: Tensor  # [T] int64: the position of each token in its sequence
    states: StatePass | None = field(default=None, kw_only=True)

    def positions(self) -> Tensor:
        """Returns the position of each token in its sequence, [T]."""
        return self.token_positions

    @abstractmethod
    def attend_to_cache(self, layer: int, query: Tensor, scale: float, kind: AttentionKind) -> Tensor:
        """Computes attention of queries [T, heads, channels] to the cache, where the new keys and values already
        are."""

    def rope_and_write_cache(self, layer: int, qkv: Tensor, rotary: Rotary) -> Tensor:
        """Returns the queries [T, heads, channels] of `qkv` [T, (heads + 2 kv heads) * channels] after norm and RoPE,
        and writes keys and values to the cache."""
        return rope_and_write_cache(qkv, rotary, self.addresses, layer, self.slots, self.block)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, kind: AttentionKind
    ) -> Tensor:
        if layer in self.layout.own:
            write_cache(key, value, self.addresses, layer, self.slots, self.block)
        return self.attend_to_cache(layer, query, scale, kind)


@dataclass(frozen=True)
class DecodeMetadata(PassMetadata):
    """A decode pass: one new token for each sample, where the samples of a group lie next to each other.
    The fields are the arguments of `decode`, which describes them."""

    firsts: Tensor  # [B + 1] int32
    groups: Tensor  # [B] int32
    prompt_tables: Tensor  # [B, blocks] int32
    prompt_lengths: Tensor  # [B] int32
    own_tables: Tensor  # [B, blocks] int32
    own_lengths: Tensor  # [B] int32
    own_starts: Tensor  # [B] int32
    samples: int

    def attend_to_cache(self, layer: int, query: Tensor, scale: float, kind: AttentionKind) -> Tensor:
        sizes = self.layout.read_by(layer)
        cache = query, self.addresses, layer, sizes.kv_heads, self.block
        prompts = self.firsts, self.groups, self.prompt_tables, self.prompt_lengths
        own = self.own_tables, self.own_lengths, self.own_starts
        return decode(*cache, *prompts, *own, self.samples, scale, kind, sizes.value_channels)


@dataclass(frozen=True)
class PrefillMetadata(PassMetadata):
    """A prefill pass: the new tokens of several sequences, one after the other. The fields are the arguments of
    `attend_to_cache`, which describes them."""

    tiles: Tensor  # [tiles, 2] int32
    sequences: Tensor  # [S, 4] int32
    prompt_tables: Tensor  # [S, blocks] int32
    own_tables: Tensor  # [S, blocks] int32

    def attend_to_cache(self, layer: int, query: Tensor, scale: float, kind: AttentionKind) -> Tensor:
        sizes = self.layout.read_by(layer)
        return attend_to_cache(
            query,
            self.addresses,
            layer,
            sizes.kv_heads,
            self.block,
            self.tiles,
            self.sequences,
            self.prompt_tables,
            self.own_tables,
            scale,
            kind,
            sizes.value_channels,
        )
