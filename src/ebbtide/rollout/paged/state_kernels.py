"""The states of sequences in their slots: copied from there and to there, or advanced by a token where they are. The
addresses of the slots are read on the device: a captured launch serves every session, whose slots lie elsewhere each
time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ebbtide.model.delta_sizes import EPSILON
from ebbtide.model.state_layers import StateLayer, StateName, States
from ebbtide.model.state_steps import SlotRows

SIZE = 2048  # elements that a program copies
_EPSILON = tl.constexpr(EPSILON)
CHANNELS = 256  # of a convolution, in a program
WIDTH = 32  # of a state [depth, width], in a program: 32 numbers a thread where the depth is 128


@triton.jit(do_not_specialize=["place"])
def _copy_rows(
    rows,  # [S, count]
    addresses,  # int64: where the first slot of each kind of state lies
    slots,  # [S]
    place,  # of the address
    count,
    reads: tl.constexpr,  # from the slots; else to them
    size: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    where = tl.program_id(1) * size + tl.arange(0, size)
    slot = tl.load(slots + row).to(tl.int64)
    state = tl.load(addresses + place).to(tl.pointer_type(rows.dtype.element_ty)) + slot * count + where
    rows += row * count + where
    if reads:
        tl.store(rows, tl.load(state, where < count), where < count)
    else:
        tl.store(state, tl.load(rows, where < count), where < count)


@triton.jit(do_not_specialize=["place"])
def _convolve(
    inputs,  # [S, channels]
    weight,  # [channels, width]
    bias,  # [channels]
    outputs,  # [S, channels]
    addresses,  # int64: where the first slot of each kind of state lies
    read,  # [S]: slots, of [channels, length] each
    write,
    place,  # of the address
    channels,
    length: tl.constexpr,  # of a state: the newest inputs
    width: tl.constexpr,
    span: tl.constexpr,  # a power of 2 from `length` on
    has_bias: tl.constexpr,
    silu: tl.constexpr,
    size: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    channel, at = tl.program_id(1) * size + tl.arange(0, size), tl.arange(0, span)
    first = tl.load(addresses + place).to(tl.pointer_type(inputs.dtype.element_ty))
    here = channel[:, None].to(tl.int64) * length + at[None, :]
    is_channel = channel < channels
    inside = is_channel[:, None] & (at < length)[None, :]
    old = tl.load(first + tl.load(read + row).to(tl.int64) * channels * length + here, mask=inside, other=0.0)
    new = tl.load(inputs + row * channels + channel, mask=is_channel, other=0.0)
    tap = at - (length - width + 1)  # The oldest inputs may be of no use.
    taps = tl.load(weight + channel[:, None] * width + tap[None, :], mask=inside & (tap >= 0)[None, :], other=0.0)
    last = tl.load(weight + channel * width + width - 1, mask=is_channel, other=0.0)
    found = tl.sum(old.to(tl.float32) * taps.to(tl.float32), 1) + new.to(tl.float32) * last.to(tl.float32)
    if has_bias:
        found += tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)
    found = found.to(outputs.dtype.element_ty)  # as transformers rounds
    if silu:
        wide = found.to(tl.float32)
        found = (wide / (1 + tl.exp(-wide))).to(outputs.dtype.element_ty)
    tl.store(outputs + row * channels + channel, found, mask=is_channel)
    target = first + tl.load(write + row).to(tl.int64) * channels * length
    tl.debug_barrier()  # It may be the slot that was read.
    tl.store(target + here - 1, old, mask=inside & (at > 0)[None, :])
    tl.store(target + channel.to(tl.int64) * length + length - 1, new, mask=is_channel)


@triton.jit(do_not_specialize=["place"])
def _delta_rule(
    query,  # [S, heads, depth], with strides
    key,
    value,  # [S, heads, width], with strides
    g,  # [S, heads]
    beta,
    outputs,  # [S, heads, width]
    addresses,  # int64: where the first slot of each kind of state lies
    read,  # [S]: slots, of [heads, depth, width] each
    write,
    place,  # of the address
    scale,
    heads: tl.constexpr,
    depth: tl.constexpr,
    width: tl.constexpr,
    query_row: tl.constexpr,
    query_head: tl.constexpr,
    key_row: tl.constexpr,
    key_head: tl.constexpr,
    value_row: tl.constexpr,
    value_head: tl.constexpr,
    normalizes: tl.constexpr,
    deep: tl.constexpr,  # a power of 2 from `depth` on
    size: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    down, along = tl.arange(0, deep), tl.program_id(2) * size + tl.arange(0, size)
    is_down, is_along = down < depth, along < width
    inside = is_down[:, None] & is_along[None, :]
    q = tl.load(query + row * query_row + head * query_head + down, mask=is_down, other=0.0).to(tl.float32)
    k = tl.load(key + row * key_row + head * key_head + down, mask=is_down, other=0.0).to(tl.float32)
    v = tl.load(value + row * value_row + head * value_head + along, mask=is_along, other=0.0).to(tl.float32)
    if normalizes:
        q *= tl.rsqrt(tl.sum(q * q) + _EPSILON)
        k *= tl.rsqrt(tl.sum(k * k) + _EPSILON)
    decay = tl.exp(tl.load(g + row * heads + head).to(tl.float32))
    rate = tl.load(beta + row * heads + head).to(tl.float32)
    first = tl.load(addresses + place).to(tl.pointer_type(tl.float32))
    here = (head * depth + down[:, None]) * width + along[None, :]
    slot = tl.load(read + row).to(tl.int64) * heads * depth * width
    state = decay * tl.load(first + slot + here, mask=inside, other=0.0)
    written = rate * (v - tl.sum(state * k[:, None], 0))
    state += k[:, None] * written[None, :]
    found = scale * tl.sum(state * q[:, None], 0)
    tl.store(outputs + (row * heads + head) * width + along, found.to(outputs.dtype.element_ty), mask=is_along)
    slot = tl.load(write + row).to(tl.int64) * heads * depth * width
    tl.debug_barrier()  # It may be the slot that was read.
    tl.store(first + slot + here, state, mask=inside)


class AddressedSlots:
    """Slots of whichever tensors were attached last."""

    def __init__(self, layers: Sequence[StateLayer], device: torch.device) -> None:
        self._sizes = [layer.sizes for layer in layers]
        names = [(number, name) for number, states in enumerate(self._sizes) for name in states]
        self._places = {key: place for place, key in enumerate(names)}
        self._addresses = torch.zeros(len(names), dtype=torch.long, device=device)

    def attach(self, slots: Sequence[States]) -> int:
        """Uses these slots from now on. Returns the last of them, which is for padding rows."""
        found = [slots[number][name] for number, name in self._places]
        self._addresses.copy_(torch.tensor([state.data_ptr() for state in found]))
        return len(found[0]) - 1

    def read(self, layer: int, slots: Tensor) -> States:
        states = {}
        for name, size in self._sizes[layer].items():
            states[name] = size.new_empty((len(slots), *size.shape[1:]))
            self._copy(layer, name, states[name], slots, reads=True)
        return states

    def write(self, layer: int, slots: Tensor, states: States) -> None:
        for name, size in self._sizes[layer].items():
            self._copy(layer, name, states[name].to(size.dtype).contiguous(), slots, reads=False)

    def in_place(self, layer: int, read: Tensor, write: Tensor) -> dict[StateName, SlotRows]:
        return {
            name: AddressedRows(self._addresses, self._places[layer, name], size[0], read, write)
            for name, size in self._sizes[layer].items()
        }

    def _copy(self, layer: int, name: StateName, rows: Tensor, slots: Tensor, *, reads: bool) -> None:
        count = rows[0].numel()
        grid = (len(rows), triton.cdiv(count, SIZE))
        _copy_rows[grid](rows, self._addresses, slots, self._places[layer, name], count, reads, SIZE)


@dataclass(frozen=True)
class AddressedRows:
    """One kind of state of some sequences, in their slots (`SlotRows`)."""

    addresses: Tensor
    place: int
    """Of the address of the first slot."""
    one: Tensor
    """A state, for its sizes and type."""
    read: Tensor  # [S]
    write: Tensor  # [S]

    def convolve(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool) -> Tensor:
        channels, length = self.one.shape
        assert self.one.dtype == inputs.dtype
        inputs = inputs.squeeze(-1).contiguous()
        outputs = torch.empty_like(inputs)
        grid = (len(inputs), triton.cdiv(channels, CHANNELS))
        _convolve[grid](
            *(inputs, weight.contiguous(), weight if bias is None else bias, outputs),
            *(self.addresses, self.read, self.write, self.place, channels, length, weight.shape[1]),
            *(triton.next_power_of_2(length), bias is not None, silu, CHANNELS),
        )
        return outputs[..., None]

    def apply_delta_rule(
        self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *, normalizes: bool
    ) -> Tensor:
        heads, depth, width = self.one.shape
        assert self.one.dtype == torch.float32
        query, key, value = (_rows(one) for one in (query, key, value))
        outputs = torch.empty((len(query), heads, width), dtype=query.dtype, device=query.device)
        grid = (len(query), heads, triton.cdiv(width, WIDTH))
        strides = (stride for one in (query, key, value) for stride in one.stride()[:2])
        _delta_rule[grid](
            *(query, key, value, g.contiguous(), beta.contiguous(), outputs),
            *(self.addresses, self.read, self.write, self.place, depth**-0.5, heads, depth, width, *strides),
            *(normalizes, triton.next_power_of_2(depth), WIDTH),
        )
        return outputs[:, None]


def _rows(x: Tensor) -> Tensor:
    """[S, heads, channels] of [S, 1, heads, channels], where a head's channels lie side by side."""
    x = x.squeeze(1)
    return x if x.stride(-1) == 1 else x.contiguous()
