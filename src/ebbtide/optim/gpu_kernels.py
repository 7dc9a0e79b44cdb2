"""The AdamW step of rule.py as one Triton kernel for all segments of a chunk: each number is read once and written
once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from ebbtide.optim.layout import ALIGNMENT
from ebbtide.optim.rule import AdamWState, Rule, StepArgs

BLOCK = 1024  # elements per program
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


@triton.jit(do_not_specialize=["places", "numbers", "rows"])
def _update(
    places,
    numbers,
    rows,
    low,
    first,
    second,
    gain1,
    beta2,
    gain2,
    eps,
    weight_type: tl.constexpr,
    grad_type: tl.constexpr,
    aligned: tl.constexpr,
    narrow: tl.constexpr,
    stochastic: tl.constexpr,
    most: tl.constexpr,
    alignment: tl.constexpr,
    block: tl.constexpr,
):
    # This program's segment is the last one that begins at this program or before it. `_places` names the columns.
    program, every = tl.program_id(0), tl.arange(0, most)
    begins = tl.load(places + 7 * every, mask=every < rows, other=0x7FFFFFFF)
    row = tl.sum((begins <= program).to(tl.int32), 0) - 1
    places, numbers = places + 7 * row, numbers + 4 * row
    begin, size, start, key = tl.load(places), tl.load(places + 1), tl.load(places + 2), tl.load(places + 3)
    offset = tl.multiple_of(tl.load(places + 4), alignment)
    weight, grad = (
        tl.load(places + 5).to(tl.pointer_type(weight_type)),
        tl.load(places + 6).to(tl.pointer_type(grad_type)),
    )
    if aligned:
        size, weight, grad = tl.multiple_of(size, 16), tl.multiple_of(weight, 16), tl.multiple_of(grad, 16)
    scale, shrink, step_size, root = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2), tl.load(numbers + 3)

    place = (program - begin) * block + tl.arange(0, block)
    inside, kept = place < size, offset + place
    g = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32) * scale
    m = tl.load(first + kept, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(second + kept, mask=inside, other=0.0).to(tl.float32)
    p = tl.load(weight + place, mask=inside, other=0.0)
    if narrow:  # joins the master from its two halves
        lower = tl.load(low + kept, mask=inside, other=0).to(tl.int32) & 0xFFFF
        signed = v.to(tl.int32, bitcast=True) < 0
        up = (lower > 0x8000) | ((lower == 0x8000) & signed)
        upper = p.to(tl.int16, bitcast=True).to(tl.int32) - up.to(tl.int32)
        p = ((upper << 16) | lower).to(tl.float32, bitcast=True)
        v = tl.abs(v)

    p = p * shrink
    m = m + (g - m) * gain1
    v = v * beta2 + g * g * gain2
    p = p - step_size * libdevice.div_rn(m, libdevice.div_rn(libdevice.sqrt_rn(v), root) + eps)

    if stochastic:
        x = ((start + place) * 0x9E3779B1 + key).to(tl.uint32)
        x = ((x ^ (x >> 16)).to(tl.int64) * 0x7FEB352D).to(tl.uint32)
        x = ((x ^ (x >> 15)).to(tl.int64) * 0x846CA68B).to(tl.uint32)
        x = x ^ (x >> 16)
        m = ((m.to(tl.uint32, bitcast=True) + (x & 0xFFFF)) & 0xFFFF0000).to(tl.uint32).to(tl.float32, bitcast=True)
        v = ((v.to(tl.uint32, bitcast=True) + (x >> 16)) & 0xFFFF0000).to(tl.uint32).to(tl.float32, bitcast=True)
    if narrow:
        bits = p.to(tl.int32, bitcast=True)
        lower = bits & 0xFFFF
        up = (lower == 0x8000) & (((bits >> 16) & 1) == 1)
        v = (v.to(tl.int32, bitcast=True) | (up.to(tl.int32) << 31)).to(tl.float32, bitcast=True)
        tl.store(low + kept, lower.to(tl.int16), mask=inside)
    tl.store(weight + place, p.to(weight_type), mask=inside)
    tl.store(first + kept, m.to(first.dtype.element_ty), mask=inside)
    tl.store(second + kept, v.to(second.dtype.element_ty), mask=inside)


def build_chunk_steps(work: Sequence[Sequence[StepArgs]]) -> list[Callable[[AdamWState], None]]:
    """Builds, for each chunk's segments, the function that steps them with the chunk's state. The kernel's tables for
    all chunks go to the device in one transfer each."""
    places = [list(_places(stretches)) for stretches in work]
    numbers = list(_numbers(rule for stretches in work for *_, rule in stretches))
    device = next(stretch.weight.device for stretches in work for stretch in stretches)
    rows = [len(stretches) for stretches in work]
    chunks = zip(
        work,
        places,
        _to_device([place for chunk in places for place in chunk], torch.int64, device).split(rows),
        _to_device(numbers, torch.float32, device).split(rows),
        strict=True,
    )
    most = triton.next_power_of_2(max(rows))
    return [partial(_step, stretches, at, tables, most) for stretches, at, *tables in chunks]


def _numbers(rules: Iterable[Rule]) -> Iterator[tuple[float, ...]]:
    """The columns of numbers; nearly all parameters have the same."""
    known: dict[tuple[float, ...], tuple[float, ...]] = {}
    for rule in rules:
        kind = rule.lr, rule.decay, rule.step, rule.scale
        if kind not in known:
            known[kind] = rule.numbers
        yield known[kind]


def _places(stretches: Sequence[StepArgs]) -> Iterator[tuple[int, ...]]:
    """The integer columns that `_update` reads for each segment; the first is its first program."""
    begin = 0
    for segment, weight, grad, first, rule in stretches:
        start, size = segment.start, segment.size
        yield (
            begin,
            size,
            first + start,
            rule.key if rule.stochastic else 0,
            segment.offset,
            weight.data_ptr() + start * weight.itemsize,
            grad.data_ptr() + start * grad.itemsize,
        )
        begin += -(-size // BLOCK)  # triton.cdiv is slow, and a step needs it hundreds of times


def _to_device(rows: Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def _step(
    stretches: Sequence[StepArgs],
    places: Sequence[tuple[int, ...]],
    tables: Sequence[Tensor],
    most: int,
    state: AdamWState,
) -> None:
    """Runs `rule.update` on a GPU. Multiplications are not fused with additions, so that every variant of the kernel
    computes the same bits."""
    if not stretches:
        return
    _, weight, grad, _, rule = stretches[0]
    assert all(stretch.grad.dtype == grad.dtype for stretch in stretches)
    beta1, beta2 = rule.config.betas
    begin, size, *_ = places[-1]
    with torch.cuda.device(weight.device):
        _update[(begin + triton.cdiv(size, BLOCK),)](
            *tables,
            len(stretches),
            weight if state.low is None else state.low,
            state.first,
            state.second,
            1 - beta1,
            beta2,
            1 - beta2,
            rule.config.eps,
            weight_type=TYPES[weight.dtype],
            grad_type=TYPES[grad.dtype],
            aligned=all(number % 16 == 0 for _, size, _, _, _, *at in places for number in (size, *at)),
            narrow=state.low is not None,
            stochastic=rule.stochastic,
            most=most,
            alignment=ALIGNMENT,
            block=BLOCK,
            enable_fp_fusion=False,
        )
