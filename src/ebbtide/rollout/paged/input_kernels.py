"""What a pass reads before its first layer: the tokens and positions of a decode pass, in one kernel, and the angles of
rotary embeddings out of tables by position."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ebbtide.model.dependent_launch import wait_for_results
from ebbtide.model.launch import Launcher
from ebbtide.system.units import ceil_div

ROWS = 128  # of a program


@triton.jit(do_not_specialize=["count"])
def _begin_decode(
    given, rows, own_starts, own_lengths, last, tokens, positions, count, block: tl.constexpr, early: tl.constexpr
):
    place = tl.program_id(0) * block + tl.arange(0, block)
    there = place < count
    token = tl.load(given + place, mask=there, other=0).to(tl.int64)
    row = tl.load(rows + place, mask=there, other=0)
    end = tl.load(own_starts + place, mask=there, other=0) + tl.load(own_lengths + place, mask=there, other=0)
    wait_for_results(early)
    newest = tl.load(last + row, mask=there & (token < 0), other=0)
    tl.store(tokens + place, tl.where(token < 0, newest, token), mask=there)
    tl.store(positions + place, tl.maximum(end - 1, 0).to(tl.int64), mask=there)


_launch_begin = Launcher(_begin_decode, dependent=True)


def begin_decode(
    given: Tensor,  # [B] int32: the newest token of each sample; -1: that of its row
    rows: Tensor,  # [B] int32
    own_starts: Tensor,  # [B] int32: the prompt's length
    own_lengths: Tensor,  # [B] int32: own tokens, the new one among them; 0 for padding
    last: Tensor,  # [rows] int64: the newest token of the sample in each row
    tokens: Tensor,  # [B] int64
    positions: Tensor,  # [B] int64
) -> None:
    """Writes the tokens of a decode pass and their positions. What it reads is copied, but for `last`."""
    count = len(given)
    tensors = given, rows, own_starts, own_lengths, last, tokens, positions
    _launch_begin(ceil_div(count, ROWS), tensors, (count,), ROWS, warps=4)


@triton.jit(do_not_specialize=["length"])
def _read_angles(table, positions, cos, sin, length, channels: tl.constexpr, padded: tl.constexpr, early: tl.constexpr):
    place, channel = tl.program_id(0).to(tl.int64), tl.arange(0, padded)
    real = channel < channels
    wait_for_results(early)
    source = table + tl.load(positions + place) * channels + channel
    target = place * channels + channel
    tl.store(cos + target, tl.load(source, mask=real), mask=real)
    tl.store(sin + target, tl.load(source + length.to(tl.int64) * channels, mask=real), mask=real)


_launch_read = Launcher(_read_angles, dependent=True)


def read_angles(
    table: Tensor,  # [2, length, channels]: cos and sin of each position
    positions: Tensor,  # [T] int64
) -> tuple[Tensor, Tensor]:
    """Returns cos and sin of tokens, [T, channels] each."""
    _, length, channels = table.shape
    cos, sin = (table.new_empty((len(positions), channels)) for _ in range(2))
    sizes = channels, triton.next_power_of_2(channels)
    _launch_read(len(positions), (table, positions, cos, sin), (length,), *sizes, warps=1)
    return cos, sin
