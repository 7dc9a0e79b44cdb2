"""The gated delta rule of gated_delta_rule.py as Triton kernels, for inputs of 16 bits, with the names used there.

Nothing is computed that plain torch does not compute, but V' = T b (V - exp(G) K S) is not taken apart into U - W S: so
no large numbers cancel, and the backward needs neither U nor W. With B = b (V - exp(G) K S), V' = T B and its gradients

    dB = T.T dV'      dA = -dB V'.T below the diagonal      dV = b dB      and K and S have theirs by b exp(G) dB

The forward is two kernels: `_prepare` for each chunk, and `_scan` over the chunks of a head and a slice of V. The
backward runs them again, for the states before all chunks, then `_scan_back` for those after them, and `_gradients` for
each chunk.

What is multiplied on tensor cores has 16 bits. Queries, keys, values and the gradient of the outputs are as given: what
multiplies their rows (norms, decays) is applied to the other operand or to the product. The state is float32: a factor
that changes it is split into two numbers of 16 bits, or multiplied in three products of TF32. A program computes one
sequence alone, and no program adds to what another wrote.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ebbtide.model.delta_sizes import CHUNK, EPSILON

_CHUNK, _EPSILON = tl.constexpr(CHUNK), tl.constexpr(EPSILON)


@triton.jit
def _place(chunks, slices: tl.constexpr):
    """(row of B x heads, chunk, slice) of this program."""
    program = tl.program_id(0).to(tl.int64)
    return program // slices // chunks, program // slices % chunks, program % slices


@triton.jit
def _load(x, first, real, step: tl.constexpr, start, channels: tl.constexpr):
    """Numbers [CHUNK, channels] of a chunk, zeros where there is no token. A token is `step` numbers from the next."""
    token, channel = first + tl.arange(0, _CHUNK), start + tl.arange(0, channels)
    return tl.load(x + token[:, None] * step + channel[None, :], mask=real[:, None], other=0.0)


@triton.jit
def _store(x, tile, first, real, step: tl.constexpr, start, channels: tl.constexpr):
    token, channel = first + tl.arange(0, _CHUNK), start + tl.arange(0, channels)
    tl.store(x + token[:, None] * step + channel[None, :], tile.to(x.dtype.element_ty), mask=real[:, None])


@triton.jit
def _load_state(x, place, start, k_size: tl.constexpr, v_size: tl.constexpr, channels: tl.constexpr):
    """Columns [K, channels] of a state."""
    key, channel = tl.arange(0, k_size), start + tl.arange(0, channels)
    return tl.load(x + place * (k_size * v_size) + key[:, None] * v_size + channel[None, :])


@triton.jit
def _store_state(x, tile, place, start, k_size: tl.constexpr, v_size: tl.constexpr, channels: tl.constexpr):
    key, channel = tl.arange(0, k_size), start + tl.arange(0, channels)
    tl.store(x + place * (k_size * v_size) + key[:, None] * v_size + channel[None, :], tile.to(x.dtype.element_ty))


@triton.jit
def _split(x, like):
    """x, which is float32, as the sum of two tensors of the 16 bits of `like`."""
    high = x.to(like.dtype)
    return high, (x - high.to(tl.float32)).to(like.dtype)


@triton.jit
def _times_wide(a, b):
    """a @ b, where `a` has 16 bits, and b is float32."""
    high, low = _split(b, a)
    return tl.dot(a, high, tl.dot(a, low))


@triton.jit
def _wide_times(a, b):
    """a @ b, where `a` is float32, and b has 16 bits."""
    high, low = _split(a, b)
    return tl.dot(high, b, tl.dot(low, b))


@triton.jit
def _wide(a, b, like):
    """a @ b, where both are float32, in products of the 16 bits of `like`."""
    high, low = _split(a, like)
    return tl.dot(low, b.to(like.dtype)) + _times_wide(high, b)


@triton.jit(do_not_specialize=["tokens", "chunks"])
def _prepare(
    query,  # [B, T, heads, K], a token every `query_step` numbers
    key,
    g,  # [B, T, heads]
    beta,
    decay,  # [B x heads, chunks x CHUNK]: G
    query_factor,  # the same: what normalizes and scales queries
    key_factor,
    solution,  # [B x heads, chunks, CHUNK, CHUNK]: T
    scores,  # the same: Q K.T * D
    tokens,
    chunks,
    heads: tl.constexpr,
    k_size: tl.constexpr,
    query_step: tl.constexpr,
    key_step: tl.constexpr,
    normalizes: tl.constexpr,
):
    row, number, _ = _place(chunks, 1)
    head, at = row % heads, tl.arange(0, _CHUNK)
    first, real = row // heads * tokens + number * _CHUNK, at + number * _CHUNK < tokens
    place = (row * chunks + number) * _CHUNK
    total = tl.cumsum(tl.load(g + (first + at) * heads + head, mask=real, other=0.0).to(tl.float32), 0)
    b = tl.load(beta + (first + at) * heads + head, mask=real, other=0.0).to(tl.float32)
    q = _load(query, first, real, query_step, head * k_size, k_size)
    k = _load(key, first, real, key_step, head * k_size, k_size)
    wide_q, wide_k = q.to(tl.float32), k.to(tl.float32)
    scale: tl.constexpr = k_size**-0.5
    of_q, of_k = tl.full([_CHUNK], scale, tl.float32), tl.full([_CHUNK], 1.0, tl.float32)
    if normalizes:
        of_q = tl.rsqrt(tl.sum(wide_q * wide_q, 1) + _EPSILON) * scale
        of_k = tl.rsqrt(tl.sum(wide_k * wide_k, 1) + _EPSILON)
    tl.store(decay + place + at, total)
    tl.store(query_factor + place + at, of_q)
    tl.store(key_factor + place + at, of_k)
    within = tl.exp(tl.where(at[:, None] >= at[None, :], total[:, None] - total[None, :], -float("inf")))
    within *= of_k[None, :]
    square = place * _CHUNK + at[:, None] * _CHUNK + at[None, :]
    tl.store(scores + square, tl.dot(q, tl.trans(k)) * of_q[:, None] * within)
    system = tl.dot(k, tl.trans(k)) * (of_k * b)[:, None] * within
    below = tl.where(at[:, None] > at[None, :], system, 0.0)
    inverse = tl.where(at[:, None] == at[None, :], 1.0, 0.0)
    for column in range(_CHUNK):  # forward substitution, of all right sides at once
        factors = tl.sum(tl.where(at[None, :] == column, below, 0.0), 1)
        found = tl.sum(tl.where(at[:, None] == column, inverse, 0.0), 0)
        inverse -= factors[:, None] * found[None, :]
    tl.store(solution + square, inverse)


@triton.jit(do_not_specialize=["tokens", "chunks"])
def _scan(
    query,
    key,
    value,  # [B, T, heads, V], a token every `value_step` numbers
    beta,
    decay,
    query_factor,
    key_factor,
    solution,
    scores,
    initial,  # [B x heads, K, V] float32, if `continues`
    output,  # [B, T, heads, V], if `reads`
    written,  # [B x heads, chunks x CHUNK, V]: V', if not `reads`
    states,  # [B x heads, chunks, K, V]: before each chunk, if not `reads`
    last,  # [B x heads, K, V] float32, if `reads`
    tokens,
    chunks,
    heads: tl.constexpr,
    k_size: tl.constexpr,
    v_size: tl.constexpr,
    width: tl.constexpr,
    query_step: tl.constexpr,
    key_step: tl.constexpr,
    value_step: tl.constexpr,
    continues: tl.constexpr,
    reads: tl.constexpr,
):
    row, _, part = _place(1, v_size // width)
    head, at, start = row % heads, tl.arange(0, _CHUNK), part * width
    state = tl.zeros([k_size, width], tl.float32)
    if continues:
        state = _load_state(initial, row, start, k_size, v_size, width)
    for number in range(chunks):
        first, real = row // heads * tokens + number * _CHUNK, at + number * _CHUNK < tokens
        place = (row * chunks + number) * _CHUNK
        k = _load(key, first, real, key_step, head * k_size, k_size)
        v = _load(value, first, real, value_step, head * v_size + start, width)
        b = tl.load(beta + (first + at) * heads + head, mask=real, other=0.0).to(tl.float32)
        total, end = tl.load(decay + place + at), tl.load(decay + place + _CHUNK - 1)
        of_k = tl.load(key_factor + place + at)
        square = place * _CHUNK + at[:, None] * _CHUNK + at[None, :]
        inverse = tl.load(solution + square)
        known = (of_k * tl.exp(total))[:, None] * _times_wide(k, state)
        right = b[:, None] * (v.to(tl.float32) - known)
        new = tl.dot(inverse, right, input_precision="tf32x3")
        if reads:
            q = _load(query, first, real, query_step, head * k_size, k_size)
            of_q = tl.load(query_factor + place + at)
            found = (of_q * tl.exp(total))[:, None] * _times_wide(q, state)
            found = tl.dot(tl.load(scores + square), new, found, input_precision="tf32x3")
            _store(output, found, first, real, heads * v_size, head * v_size + start, width)
        else:
            _store_state(states, state, row * chunks + number, start, k_size, v_size, width)
            _store(written, new, place, at < _CHUNK, v_size, start, width)
        state = state * tl.exp(end) + _times_wide(tl.trans(k), new * (of_k * tl.exp(end - total))[:, None])
    if reads:
        _store_state(last, state, row, start, k_size, v_size, width)


@triton.jit(do_not_specialize=["tokens", "chunks"])
def _scan_back(
    query,
    key,
    grad,  # [B, T, heads, V]: of the outputs
    beta,
    decay,
    query_factor,
    key_factor,
    solution,
    scores,
    dright,  # [B x heads, chunks x CHUNK, V]: dB
    dstates,  # [B x heads, chunks, K, V]: of the states after each chunk
    tokens,
    chunks,
    heads: tl.constexpr,
    k_size: tl.constexpr,
    v_size: tl.constexpr,
    width: tl.constexpr,
    query_step: tl.constexpr,
    key_step: tl.constexpr,
    grad_step: tl.constexpr,
):
    row, _, part = _place(1, v_size // width)
    head, at, start = row % heads, tl.arange(0, _CHUNK), part * width
    dstate = tl.zeros([k_size, width], tl.float32)
    for step in range(chunks):
        number = chunks - 1 - step
        first, real = row // heads * tokens + number * _CHUNK, at + number * _CHUNK < tokens
        place = (row * chunks + number) * _CHUNK
        q = _load(query, first, real, query_step, head * k_size, k_size)
        k = _load(key, first, real, key_step, head * k_size, k_size)
        do = _load(grad, first, real, grad_step, head * v_size + start, width)
        b = tl.load(beta + (first + at) * heads + head, mask=real, other=0.0).to(tl.float32)
        total, end = tl.load(decay + place + at), tl.load(decay + place + _CHUNK - 1)
        of_q, of_k = tl.load(query_factor + place + at), tl.load(key_factor + place + at)
        transposed = place * _CHUNK + at[None, :] * _CHUNK + at[:, None]
        inverse, by_score = tl.load(solution + transposed), tl.load(scores + transposed)
        rate = tl.exp(total)
        _store_state(dstates, dstate, row * chunks + number, start, k_size, v_size, width)
        dnew = _times_wide(k, dstate) * (of_k * tl.exp(end - total))[:, None] + _wide_times(by_score, do)
        found = tl.dot(inverse, dnew, input_precision="tf32x3")
        _store(dright, found, place, at < _CHUNK, v_size, start, width)
        dstate = dstate * tl.exp(end) + _times_wide(tl.trans(q), do.to(tl.float32) * (of_q * rate)[:, None])
        dstate -= _times_wide(tl.trans(k), found * (b * of_k * rate)[:, None])


@triton.jit
def _unnormalized(grad, x, factor, scale: tl.constexpr, normalizes: tl.constexpr):
    """The gradient of x, for that of x * factor, where `factor` is what normalizes it, times `scale`."""
    if normalizes:
        unit = x * (factor / scale)[:, None]
        grad -= unit * tl.sum(grad * unit, 1)[:, None]
    return grad * factor[:, None]


@triton.jit(do_not_specialize=["tokens", "chunks"])
def _gradients(
    query,
    key,
    value,
    grad,
    beta,
    decay,
    query_factor,
    key_factor,
    scores,
    written,
    states,
    dright,
    dstates,
    dquery,  # [B, T, heads, K]
    dkey,
    dvalue,  # [B, T, heads, V]
    dg,  # [B, T, heads]
    dbeta,
    tokens,
    chunks,
    heads: tl.constexpr,
    k_size: tl.constexpr,
    v_size: tl.constexpr,
    width: tl.constexpr,
    query_step: tl.constexpr,
    key_step: tl.constexpr,
    value_step: tl.constexpr,
    grad_step: tl.constexpr,
    normalizes: tl.constexpr,
):
    row, number, _ = _place(chunks, 1)
    head, at = row % heads, tl.arange(0, _CHUNK)
    first, real = row // heads * tokens + number * _CHUNK, at + number * _CHUNK < tokens
    place = (row * chunks + number) * _CHUNK
    b = tl.load(beta + (first + at) * heads + head, mask=real, other=0.0).to(tl.float32)
    total, end = tl.load(decay + place + at), tl.load(decay + place + _CHUNK - 1)
    of_q, of_k = tl.load(query_factor + place + at), tl.load(key_factor + place + at)
    rate, until = tl.exp(total), tl.exp(end - total)
    # Three loops over V, one after the other: their sums do not fit the registers together, and in one loop Triton
    # would share all matmuls among the warps in one way. First dO V'.T and -dA, which are of pairs of tokens.
    dscores, dsystem = tl.zeros([_CHUNK, _CHUNK], tl.float32), tl.zeros([_CHUNK, _CHUNK], tl.float32)
    db = tl.zeros([_CHUNK], tl.float32)
    for start in range(0, v_size, width):
        v = _load(value, first, real, value_step, head * v_size + start, width)
        do = _load(grad, first, real, grad_step, head * v_size + start, width)
        new = _load(written, place, at < _CHUNK, v_size, start, width)
        right = _load(dright, place, at < _CHUNK, v_size, start, width)
        dscores += _times_wide(do, tl.trans(new))
        dsystem += _wide(right, tl.trans(new), do)
        db += tl.sum(right * v.to(tl.float32), 1)
        _store(dvalue, right * b[:, None], first, real, heads * v_size, head * v_size + start, width)
    k = _load(key, first, real, key_step, head * k_size, k_size)
    below, above = at[:, None] > at[None, :], at[:, None] < at[None, :]
    within = tl.exp(tl.where(above, -float("inf"), total[:, None] - total[None, :]))
    by_pair = dscores * tl.load(scores + place * _CHUNK + at[:, None] * _CHUNK + at[None, :])
    dscores *= within
    dsystem = tl.where(below, -dsystem * within, 0.0)
    by_system = dsystem * tl.dot(k, tl.trans(k)) * of_k[:, None] * of_k[None, :]
    by_pair += by_system * b[:, None]
    dsystem *= b[:, None]
    db += tl.sum(by_system, 1)
    ddecay, ddecay_of_keys = tl.sum(by_pair, 1), tl.sum(by_pair, 0)
    # Then dO S.T, for queries.
    by_output = tl.zeros([_CHUNK, k_size], tl.float32)
    for start in range(0, v_size, width):
        do = _load(grad, first, real, grad_step, head * v_size + start, width)
        by_output += _times_wide(do, tl.trans(_load_state(states, row * chunks + number, start, k_size, v_size, width)))
    wide_q = _load(query, first, real, query_step, head * k_size, k_size).to(tl.float32)
    by_output *= rate[:, None]
    ddecay += tl.sum(by_output * wide_q, 1) * of_q
    dq = by_output + _wide_times(dscores * of_k[None, :], k)
    _store(
        dquery,
        _unnormalized(dq, wide_q, of_q, k_size**-0.5, normalizes),
        first,
        real,
        heads * k_size,
        head * k_size,
        k_size,
    )
    # Then dB S.T and V' dS.T, for keys.
    by_right, by_new = tl.zeros([_CHUNK, k_size], tl.float32), tl.zeros([_CHUNK, k_size], tl.float32)
    by_state = tl.zeros([k_size], tl.float32)
    for start in range(0, v_size, width):
        new = _load(written, place, at < _CHUNK, v_size, start, width)
        right = _load(dright, place, at < _CHUNK, v_size, start, width)
        before = _load_state(states, row * chunks + number, start, k_size, v_size, width)
        after = _load_state(dstates, row * chunks + number, start, k_size, v_size, width)
        by_right += _wide(right, tl.trans(before), k)
        by_new += _wide(new, tl.trans(after), k)
        by_state += tl.sum(before * after, 1)
    wide_k = k.to(tl.float32)
    known, writing = tl.sum(by_right * wide_k, 1) * of_k * rate, tl.sum(by_new * wide_k, 1) * of_k * until
    ddecay -= known * b + writing
    at_end = tl.sum(writing, 0) + tl.exp(end) * tl.sum(by_state, 0)
    # g counts for its token and all after it.
    of_g = tl.sum(tl.where(below, 0.0, ddecay_of_keys[None, :]), 1)
    of_g = tl.sum(tl.where(above, 0.0, ddecay[:, None]), 0) - of_g + at_end
    tl.store(dg + (first + at) * heads + head, of_g.to(dg.dtype.element_ty), mask=real)
    tl.store(dbeta + (first + at) * heads + head, (db - known).to(dbeta.dtype.element_ty), mask=real)
    dk = by_new * until[:, None] - by_right * (b * rate)[:, None]
    dk += _wide_times((dsystem + tl.trans(dsystem)) * of_k[None, :], k)
    q = _load(query, first, real, query_step, head * k_size, k_size)
    dk += _wide_times(tl.trans(dscores) * of_q[None, :], q)
    _store(dkey, _unnormalized(dk, wide_k, of_k, 1.0, normalizes), first, real, heads * k_size, head * k_size, k_size)
