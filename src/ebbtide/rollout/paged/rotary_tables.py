"""The angles of rotary embeddings: computed by the model's own module once for all positions that a pass may have, and
read from these tables in each pass, with the same bits. Computing them takes eight small kernels in every pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from ebbtide.model.load import rope_limit
from ebbtide.policy.fused_block import FusedBlock

MOST_BYTES = 16 * 2**20
"""Of all tables together; longer ones are not made. Plans do not count them."""
PIECE = 4096  # positions that are computed at once, in float32
Kind = tuple[tuple[str, ...], bool]
"""The blocks that share angles: what the model's module is told, and whether they rotate at all."""


class RotaryTables:
    """The angles (cos, sin) that the fused blocks of a model rotate with."""

    def __init__(self, rotary: nn.Module, blocks: Sequence[FusedBlock], config: PretrainedConfig) -> None:
        self._rotary, self._blocks = rotary, {kind_of(block): block for block in blocks}
        # A dynamic RoPE depends on the longest sequence of a pass.
        self._by_position = rope_limit(config) is None
        self._tables: dict[Kind, Tensor] = {}  # [2, positions, channels]

    def fill(self, positions: int, like: Tensor) -> None:
        """Makes tables for so many positions, for a model with hidden states like these."""
        self._tables = {}
        if not self._by_position:
            return
        places = torch.arange(positions, device=like.device)
        each = sum(one.nbytes for angles in self._compute(places[:1], like).values() for one in angles)
        if positions * each > MOST_BYTES:
            return
        for piece in places.split(PIECE):
            for kind, angles in self._compute(piece, like).items():
                if kind not in self._tables:
                    self._tables[kind] = like.new_empty((2, positions, angles[0].shape[1]), dtype=angles[0].dtype)
                self._tables[kind][:, piece] = torch.stack(angles)

    def at(self, positions: Tensor, like: Tensor) -> dict[Kind, tuple[Tensor, Tensor]]:
        """Returns (cos, sin) [T, channels] of positions [T], for hidden states like these. Once tables are filled, they
        have all of the positions."""
        if not self._tables:
            return self._compute(positions, like)
        from ebbtide.rollout.paged.input_kernels import read_angles  # It needs triton.

        return {kind: read_angles(table, positions) for kind, table in self._tables.items()}

    def _compute(self, positions: Tensor, like: Tensor) -> dict[Kind, tuple[Tensor, Tensor]]:
        found = {}
        for kind, block in self._blocks.items():
            cos, sin = self._rotary(like[None], positions[None], *block.rotary_kind)
            found[kind] = block.rotary_input.angles(cos[0], sin[0], rotates=block.rotates)
        return found


def kind_of(block: FusedBlock) -> Kind:
    """Returns what decides the angles of a block."""
    return block.rotary_kind, block.rotates
