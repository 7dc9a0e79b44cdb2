"""The short causal convolution of layers with states, with its activation, as Triton kernels: the forward reads its
input once and writes once, and the backward computes again what the activation got. It is two kernels: in one, that
would have to be computed for each tap (2.4 ms for 16k tokens of 6,144 channels on an H200).

A channel of an output is a sum over the last inputs of this channel: act(bias + the sum of w[j] x[t - W + 1 + j]).
Neighbouring tokens read the same inputs, which the first of them leaves in the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ebbtide.model.launch import Launcher

TOKENS, CHANNELS = 32, 128  # that a program has at once: 32 numbers a thread
SEVERAL = 4  # times as many tokens are those of a program that adds up the gradients of weights


@triton.jit
def _taps(weight, channel, is_channel, tap: tl.constexpr, width: tl.constexpr):
    return tl.load(weight + channel * width + tap, mask=is_channel, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _inputs(x, token, channel, is_channel, tokens, token_stride):
    """[tokens, channels] at places of a sequence, with zeros before and after it."""
    real = ((token >= 0) & (token < tokens))[:, None] & is_channel[None, :]
    where = token.to(tl.int64)[:, None] * token_stride + channel[None, :]
    return tl.load(x + where, mask=real, other=0.0).to(tl.float32)


@triton.jit
def _summed(
    x,
    weight,
    bias,
    token,
    channel,
    is_channel,
    tokens,
    token_stride,
    kind: tl.constexpr,
    width: tl.constexpr,
    has_bias: tl.constexpr,
):
    """What the activation gets, rounded as transformers rounds it."""
    total = _inputs(x, token - (width - 1), channel, is_channel, tokens, token_stride) * _taps(
        weight, channel, is_channel, 0, width
    )
    for tap in tl.static_range(1, width):
        some = _inputs(x, token - (width - 1) + tap, channel, is_channel, tokens, token_stride)
        total += some * _taps(weight, channel, is_channel, tap, width)
    if has_bias:
        total += tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    return total.to(kind).to(tl.float32)


@triton.jit(do_not_specialize=["tokens", "tiles", "x_row", "x_token"])
def _convolve(
    x,  # [B, tokens, channels], with strides
    weight,  # [channels, width]
    bias,  # [channels]
    out,  # [B, tokens, channels]
    tokens,
    tiles,  # of tokens
    x_row,
    x_token,
    channels: tl.constexpr,
    width: tl.constexpr,
    has_bias: tl.constexpr,
    silu: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    blocks: tl.constexpr = (channels + columns - 1) // columns
    program = tl.program_id(0)
    row = (program // (blocks * tiles)).to(tl.int64)
    token = program // blocks % tiles * rows + tl.arange(0, rows)
    channel = program % blocks * columns + tl.arange(0, columns)
    is_channel = channel < channels
    kind: tl.constexpr = out.dtype.element_ty
    given = token, channel, is_channel, tokens
    found = _summed(x + row * x_row, weight, bias, *given, x_token, kind, width, has_bias)
    if silu:
        found = found / (1.0 + tl.exp(-found))
    where = (row * tokens + token[:, None]) * channels + channel[None, :]
    tl.store(out + where, found.to(kind), mask=(token < tokens)[:, None] & is_channel[None, :])


@triton.jit(do_not_specialize=["tokens", "tiles", "x_row", "x_token", "grad_row", "grad_token"])
def _before_activation(
    x,  # [B, tokens, channels], with strides
    weight,  # [channels, width]
    bias,  # [channels]
    grad,  # [B, tokens, channels], with strides
    below,  # [B, tokens, channels]: the gradient of what the activation gets
    partials,  # [B x tiles, width + 1, channels]: of the weight, and of the bias
    tokens,
    tiles,  # of tokens
    x_row,
    x_token,
    grad_row,
    grad_token,
    channels: tl.constexpr,
    width: tl.constexpr,
    has_bias: tl.constexpr,
    silu: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    several: tl.constexpr,  # times `rows`: the tokens of a program
    padded: tl.constexpr,  # a power of 2 from width + 1 on
):
    blocks: tl.constexpr = (channels + columns - 1) // columns
    program = tl.program_id(0)
    part = (program // blocks).to(tl.int64)
    row, number = part // tiles, tl.arange(0, padded)[:, None]
    channel = program % blocks * columns + tl.arange(0, columns)
    is_channel = channel < channels
    kind: tl.constexpr = below.dtype.element_ty
    x += row * x_row
    grad += row * grad_row
    first, total = program // blocks % tiles * several * rows, tl.zeros([padded, columns], tl.float32)
    for start in range(first, tl.minimum(first + several * rows, tokens), rows):
        token = start + tl.arange(0, rows)
        above = _inputs(grad, token, channel, is_channel, tokens, grad_token)
        if silu:
            summed = _summed(x, weight, bias, token, channel, is_channel, tokens, x_token, kind, width, has_bias)
            share = 1.0 / (1.0 + tl.exp(-summed))
            above *= share + summed * share * (1.0 - share)
        where = (row * tokens + token[:, None]) * channels + channel[None, :]
        tl.store(below + where, above.to(kind), mask=(token < tokens)[:, None] & is_channel[None, :])
        for tap in tl.static_range(width):
            some = _inputs(x, token - (width - 1) + tap, channel, is_channel, tokens, x_token)
            total += tl.where(number == tap, tl.sum(above * some, 0)[None, :], 0.0)
        if has_bias:
            total += tl.where(number == width, tl.sum(above, 0)[None, :], 0.0)
    target = partials + (part * (width + 1) + number) * channels + channel[None, :]
    tl.store(target, total, mask=(number <= width) & is_channel[None, :])


@triton.jit(do_not_specialize=["tokens", "tiles"])
def _of_inputs(
    below,  # [B, tokens, channels]
    weight,  # [channels, width]
    dx,  # [B, tokens, channels]
    tokens,
    tiles,
    channels: tl.constexpr,
    width: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    """An input counts for its own token and those after it."""
    blocks: tl.constexpr = (channels + columns - 1) // columns
    program = tl.program_id(0)
    row = (program // (blocks * tiles)).to(tl.int64)
    token = program // blocks % tiles * rows + tl.arange(0, rows)
    channel = program % blocks * columns + tl.arange(0, columns)
    is_channel = channel < channels
    below += row * tokens * channels
    total = tl.zeros([rows, columns], tl.float32)
    for tap in tl.static_range(width):
        some = _inputs(below, token + (width - 1 - tap), channel, is_channel, tokens, channels)
        total += some * _taps(weight, channel, is_channel, tap, width)
    where = (row * tokens + token[:, None]) * channels + channel[None, :]
    tl.store(dx + where, total.to(dx.dtype.element_ty), mask=(token < tokens)[:, None] & is_channel[None, :])


_launch = Launcher(_convolve)
_launch_before_activation, _launch_of_inputs = Launcher(_before_activation), Launcher(_of_inputs)


def _by_token(x: Tensor) -> Tensor:
    """[B, T, C] of [B, C, T], where the channels of a token lie side by side."""
    x = x.transpose(1, 2)
    return x if x.stride(2) == 1 else x.contiguous()


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool) -> Tensor:
    """The outputs [B, C, T] for inputs [B, C, T] and weights [C, W]."""
    x, weight = _by_token(x), weight.contiguous()
    batch, tokens, channels = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tiles, blocks = triton.cdiv(tokens, TOKENS), triton.cdiv(channels, CHANNELS)
    tensors, numbers = (x, weight, weight if bias is None else bias, out), (tokens, tiles, *x.stride()[:2])
    constants = channels, weight.shape[1], bias is not None, silu, TOKENS, CHANNELS
    if out.numel():
        _launch(batch * tiles * blocks, tensors, numbers, *constants, warps=4)
    return out.transpose(1, 2)


def convolve_backward(
    x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor, *, silu: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of the inputs [B, C, T], the weights and the biases; `grad` is that of the outputs."""
    x, grad, weight = _by_token(x), _by_token(grad), weight.contiguous()
    (batch, tokens, channels), width = x.shape, weight.shape[1]
    below, dx = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    tiles, parts, blocks = (
        triton.cdiv(*sizes) for sizes in ((tokens, TOKENS), (tokens, SEVERAL * TOKENS), (channels, CHANNELS))
    )
    partials = torch.empty((batch * parts, width + 1, channels), dtype=torch.float32, device=x.device)
    if dx.numel():
        _launch_before_activation(
            batch * parts * blocks,
            (x, weight, weight if bias is None else bias, grad, below, partials),
            (tokens, parts, *x.stride()[:2], *grad.stride()[:2]),
            *(channels, width, bias is not None, silu, TOKENS, CHANNELS, SEVERAL, triton.next_power_of_2(width + 1)),
            warps=4,
        )
        sizes = channels, width, TOKENS, CHANNELS
        _launch_of_inputs(batch * tiles * blocks, (below, weight, dx), (tokens, tiles), *sizes, warps=4)
    summed = partials.sum(0)
    dweight = summed[:width].t().to(weight.dtype)
    return dx.transpose(1, 2), dweight, None if bias is None else summed[width].to(bias.dtype)
