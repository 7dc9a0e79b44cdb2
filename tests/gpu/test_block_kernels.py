"""The Triton kernels between the matmuls of a transformer block, against plain torch and against float64."""

import os

import pytest
import torch
from torch import Tensor

from ebbtide.model import block_reference as reference
from ebbtide.model.block_reference import Activation, Norm, Rotary

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's interpreter runs them on a CPU
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a GPU")]

# The interpreter truncates to bfloat16 where a GPU rounds.
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
SIZES = [(1, 64), (7, 576), (7, 333), (1100, 48)] if INTERPRETED else [(1, 2048), (7, 576), (1100, 333), (1100, 8192)]
HEADS = [(1, 4, 2, 16), (7, 9, 3, 64), (7, 3, 1, 6), (40, 16, 8, 128)]  # tokens, query heads, kv heads, channels
NORMS = [Norm(1e-6), Norm(1e-5, offset=1.0, wide=True)]
CLOSE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # relative, of a whole tensor
if not INTERPRETED:
    HEADS.append((1100, 16, 8, 128))


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=DEVICE) * scale).to(dtype)


def within_an_ulp(ours: Tensor, wanted: Tensor, ulps: int = 1) -> None:
    """Rounded one apart at most; in float32 sums are added in another order, and exp differs in a few bits."""
    assert ours.dtype == wanted.dtype
    floor = {torch.float32: 1e-6, torch.float16: 1.2e-7, torch.bfloat16: 1e-30}[ours.dtype]  # float16's are subnormal
    ulps = 16 if ours.dtype == torch.float32 else ulps
    torch.testing.assert_close(ours, wanted, rtol=ulps * torch.finfo(ours.dtype).eps, atol=floor)


def near(ours: Tensor, wanted: Tensor, dtype: torch.dtype | None = None) -> None:
    assert ours.shape == wanted.shape
    assert ((ours.double() - wanted).norm() / wanted.norm()).item() < CLOSE[dtype or ours.dtype]


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def double_norm(x: Tensor, weight: Tensor, norm: Norm) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + norm.eps).rsqrt() * (weight + norm.offset)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(("rows", "width"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("adds", [False, True])
def test_add_norm(rows: int, width: int, dtype: torch.dtype, norm: Norm, adds: bool) -> None:
    from ebbtide.model import block_kernels

    x, weight = random(rows, width, dtype=dtype, scale=3), random(width, dtype=dtype)
    delta = random(rows, width, dtype=dtype) if adds else None
    added, normed = block_kernels.add_norm(x, delta, weight, norm)
    wanted_added, wanted = reference.add_norm(x, delta, weight, norm)
    assert torch.equal(added, wanted_added)
    assert adds or added is x
    # The rounded input of the product is one apart, and then the product is too.
    within_an_ulp(normed, wanted, ulps=1 if norm.wide else 2)
    assert dtype == torch.float32 or (normed != wanted).float().mean() < 0.01 or normed.numel() < 1000


@pytest.mark.parametrize(("rows", "widths"), [(1, (64, 64, 64)), (7, (576, 192, 192)), (30, (33, 100, 7))])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", NORMS)
def test_norm_parts(rows: int, widths: tuple[int, ...], dtype: torch.dtype, norm: Norm) -> None:
    from ebbtide.model import block_kernels

    x = random(rows, sum(widths), dtype=dtype, scale=3)
    weights = random(widths[0], dtype=dtype), random(widths[1], dtype=dtype)
    found, wanted = block_kernels.norm_parts(x, weights, norm), reference.norm_parts(x, weights, norm)
    within_an_ulp(found, wanted, ulps=1 if norm.wide else 2)
    assert torch.equal(found[:, -widths[2] :], x[:, -widths[2] :])
    many = block_kernels.norm_parts(x.repeat(50, 1), weights, norm)
    assert torch.equal(many[-rows:], found)


@pytest.mark.parametrize(("rows", "width"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("adds", [False, True])
def test_norm_backward(rows: int, width: int, dtype: torch.dtype, norm: Norm, adds: bool) -> None:
    from ebbtide.model import block_kernels

    x, weight = random(rows, width, dtype=dtype, scale=3), random(width, dtype=dtype)
    grad = random(rows, width, dtype=dtype)
    residual = random(rows, width, dtype=dtype) if adds else None
    x_leaf, weight_leaf = leaves(x, weight)
    double_norm(x_leaf, weight_leaf, norm).backward(grad.double())
    wanted = x_leaf.grad if residual is None else x_leaf.grad + residual.double()
    dx, dweight, normed = block_kernels.norm_backward(x, weight, norm, grad, residual, remakes=True)
    within_an_ulp(normed, reference.add_norm(x, None, weight, norm)[1], ulps=1 if norm.wide else 2)
    assert dx.dtype == dweight.dtype == dtype
    near(dx, wanted)
    near(dweight, weight_leaf.grad)
    again = block_kernels.norm_backward(x, weight, norm, grad, residual)
    assert torch.equal(dx, again[0])
    assert torch.equal(dweight, again[1])


@pytest.mark.parametrize(("rows", "width"), [(1, 128), (70, 128), (333, 80), (3, 5000)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", NORMS)
def test_gated_norm(rows: int, width: int, dtype: torch.dtype, norm: Norm) -> None:
    from ebbtide.model import gated_norm_kernels

    x, gate, weight = random(rows, width, dtype=dtype), random(rows, width, dtype=dtype), random(width, dtype=dtype)
    found = gated_norm_kernels.gated_norm(x, gate, weight, norm)
    within_an_ulp(found, reference.gated_norm(x, gate, weight, norm), ulps=2 if norm.wide else 3)
    grad = random(rows, width, dtype=dtype)
    x_leaf, gate_leaf, weight_leaf = leaves(x, gate, weight)
    (double_norm(x_leaf, weight_leaf, norm) * torch.nn.functional.silu(gate_leaf)).backward(grad.double())
    gradients = gated_norm_kernels.gated_norm_backward(x, gate, weight, norm, grad)
    for ours, leaf in zip(gradients, (x_leaf, gate_leaf, weight_leaf), strict=True):
        assert ours.dtype == dtype
        near(ours, leaf.grad)
    again = gated_norm_kernels.gated_norm_backward(x, gate, weight, norm, grad)
    assert all(torch.equal(*pair) for pair in zip(gradients, again, strict=True))


@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "channels"), HEADS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [None, *NORMS])
def test_rotate(tokens: int, heads: int, kv_heads: int, channels: int, dtype: torch.dtype, norm: Norm | None) -> None:
    from ebbtide.model import rope_kernels

    qkv, norms, cos, sin = rope_inputs(tokens, heads, kv_heads, channels, dtype, norm)
    before = qkv.clone()
    shape = heads, kv_heads, channels
    rotary = Rotary(*shape, norms, norm or NORMS[0], cos, sin)
    found = rope_kernels.rotate(qkv, rotary)
    wanted = reference.rotate(qkv, rotary)
    assert torch.equal(qkv, before)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape
        if dtype == torch.float32:
            torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)
        elif norm is None:
            assert torch.equal(ours, theirs)
        else:  # a norm that is rounded one apart may cancel in the sum
            near(ours, theirs.double(), dtype)
            assert (ours != theirs).float().mean() < 0.01 or ours.numel() < 1000


def rope_inputs(tokens: int, heads: int, kv_heads: int, channels: int, dtype: torch.dtype, norm: Norm | None):
    qkv = random(tokens, (heads + 2 * kv_heads) * channels, dtype=dtype, scale=3)
    norms = None if norm is None else (random(channels, dtype=dtype), random(channels, dtype=dtype))
    angles = torch.rand(tokens, channels, device=DEVICE) * 6  # both halves differ, as no model's do
    return qkv, norms, angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "channels"), HEADS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [None, *NORMS])
def test_rotate_expanded(
    tokens: int, heads: int, kv_heads: int, channels: int, dtype: torch.dtype, norm: Norm | None
) -> None:
    from ebbtide.model import rope_kernels

    qkv, norms, cos, sin = rope_inputs(tokens, heads, kv_heads, channels, dtype, norm)
    given = qkv, Rotary(heads, kv_heads, channels, norms, norm or NORMS[0], cos, sin)
    query, key = rope_kernels.rotate(*given)
    found = rope_kernels.rotate_expanded(*given)
    value = qkv.unflatten(1, (-1, channels))[:, heads + kv_heads :]
    assert torch.equal(found[0], query)
    for ours, one in zip(found[1:], (key, value), strict=True):
        assert torch.equal(ours, one.repeat_interleave(heads // kv_heads, 1))


@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "channels"), HEADS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [None, *NORMS])
@pytest.mark.parametrize("apart", [False, True])
def test_rotate_backward(
    tokens: int, heads: int, kv_heads: int, channels: int, dtype: torch.dtype, norm: Norm | None, apart: bool
) -> None:
    from ebbtide.model import rope_kernels

    qkv, norms, cos, sin = rope_inputs(tokens, heads, kv_heads, channels, dtype, norm)
    if apart:  # in one tensor, the heads of a token one after another
        grads = random(tokens, 3 * heads, channels, dtype=dtype).split(heads, 1)
    else:
        grads = tuple(random(tokens, heads, channels, dtype=dtype) for _ in range(3))
    found = rope_kernels.rotate_backward(
        qkv, Rotary(heads, kv_heads, channels, norms, norm or NORMS[0], cos, sin), *grads
    )  # fmt: skip
    summed = [grads[0], *(one.double().unflatten(1, (kv_heads, -1)).sum(2) for one in grads[1:])]
    wanted = rope_gradients(qkv, (heads, kv_heads, kv_heads), channels, norms, norm, cos, sin, summed)
    for ours, theirs in zip(found, wanted, strict=True):
        if theirs is None:
            assert ours is None
        else:
            near(ours, theirs)


def rope_gradients(qkv, counts, channels, norms, norm, cos, sin, grads):  # type: ignore[no-untyped-def]
    """The gradients of qkv and of both weights, by autograd in float64."""
    leaf, *weights = leaves(qkv, *(norms or ()))
    parts = leaf.unflatten(-1, (-1, channels)).split(counts, 1)
    outputs = []
    for place, part in enumerate(parts[:2]):
        x = double_norm(part, weights[place], norm) if norms else part
        low, high = x.chunk(2, -1)
        outputs.append(x * cos.double()[:, None] + torch.cat([-high, low], -1) * sin.double()[:, None])
    torch.autograd.backward([*outputs, parts[2]], [grad.double() for grad in grads])
    return leaf.grad, *([weight.grad for weight in weights] if norms else (None, None))


@pytest.mark.parametrize(("rows", "width"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_activations(rows: int, width: int, dtype: torch.dtype, kind: str) -> None:
    from ebbtide.model import block_kernels

    gate_up = random(rows, 2 * width, dtype=dtype, scale=3)
    product = block_kernels.activate(gate_up, kind)
    wanted = reference.activate(gate_up, kind)
    if kind == "silu":
        within_an_ulp(product, wanted, ulps=2)  # of the activation, and then of the product
    else:  # torch's 1 + tanh loses what is left of a strongly negative gate
        torch.testing.assert_close(product, wanted, rtol=2 * torch.finfo(dtype).eps, atol=5e-6)
    apart = (product != wanted) & (wanted.abs() > 1e-2)
    assert dtype == torch.float32 or apart.float().mean() < 0.01

    leaf = gate_up.double().requires_grad_()
    reference.activate(leaf, kind).backward(grad := random(rows, width, dtype=dtype).double())
    given = grad.to(dtype)
    again, found = block_kernels.activate_backward(gate_up, given, kind)
    assert again is given
    assert found is gate_up
    assert torch.equal(again, product)
    near(found, leaf.grad)


@pytest.mark.parametrize(("tokens", "width"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "index"), [(1, torch.int64), (2, torch.int32), (6, torch.int64)])
@pytest.mark.parametrize("weighted", [False, True])
def test_combine(tokens: int, width: int, dtype: torch.dtype, count: int, index: torch.dtype, weighted: bool) -> None:
    from ebbtide.model import expert_kernels

    rows, inverse, weights = expert_inputs(tokens, width, dtype, count, index)
    found = expert_kernels.combine(rows, inverse, weights if weighted else None)
    wanted = reference.combine(rows, inverse, weights if weighted else None)
    if weighted:  # a fused multiply-add rounds once; what cancels keeps the error of its parts
        torch.testing.assert_close(found, wanted, rtol=torch.finfo(dtype).eps, atol=1e-6)
    else:
        assert torch.equal(found, wanted)


def expert_inputs(tokens: int, width: int, dtype: torch.dtype, count: int, index: torch.dtype):
    inverse = torch.randperm(tokens * count, device=DEVICE).view(tokens, count).to(index)
    return random(tokens * count, width, dtype=dtype), inverse, torch.rand(tokens, count, device=DEVICE)


@pytest.mark.parametrize(("tokens", "width"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_activate_weighted_backward(tokens: int, width: int, dtype: torch.dtype, kind: Activation) -> None:
    from ebbtide.model import expert_kernels

    gate_up, grad = random(tokens, 2 * width, dtype=dtype), random(tokens, width, dtype=dtype)
    weights = random(tokens, dtype=torch.float32).abs()
    exact = reference.activate_weighted_backward(gate_up.double(), grad.double(), weights.double(), kind)
    found = expert_kernels.activate_weighted_backward(gate_up, grad, weights, kind)
    assert found[0] is grad
    assert found[1] is gate_up
    assert found[2].dtype == torch.float32
    for ours, wanted in zip(found, exact, strict=True):
        near(ours, wanted, dtype)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_another_number_of_rows_compiles_nothing() -> None:
    from ebbtide.model import block_kernels, expert_kernels, rope_kernels, routing_kernels

    kernels = [
        block_kernels._add_norm, block_kernels._norm_backward, block_kernels._activate,
        block_kernels._activate_backward, rope_kernels._rotate, rope_kernels._rotate_backward,
        expert_kernels._combine, expert_kernels._activate_weighted_backward,
        routing_kernels._route, routing_kernels._route_backward, routing_kernels._group,
    ]  # fmt: skip

    def compiled() -> int:
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    def everything(tokens: int) -> None:
        x, weight = random(tokens, 96, dtype=torch.bfloat16), random(96, dtype=torch.bfloat16)
        block_kernels.add_norm(x, x, weight, NORMS[0])
        block_kernels.norm_backward(x, weight, NORMS[0], x, x)
        block_kernels.activate_backward(random(tokens, 192, dtype=torch.bfloat16), x.clone(), "silu")
        block_kernels.activate(x, "silu")
        qkv, norms, cos, sin = rope_inputs(tokens, 4, 2, 16, torch.bfloat16, NORMS[0])
        grads = random(tokens, 12, 16, dtype=torch.bfloat16).split(4, 1)
        rope_kernels.rotate(qkv, Rotary(4, 2, 16, norms, NORMS[0], cos, sin))
        rope_kernels.rotate_backward(qkv, Rotary(4, 2, 16, norms, NORMS[0], cos, sin), *grads)
        experts = expert_inputs(tokens, 96, torch.bfloat16, 2, torch.int64)
        expert_kernels.combine(*experts)
        halves, weights = random(tokens, 192, dtype=torch.bfloat16), random(tokens, dtype=torch.float32)
        expert_kernels.activate_weighted_backward(halves, x.clone(), weights, "silu")
        chosen, shares = routing_kernels.route(x, 4, normalizes=True)
        routing_kernels.route_backward(x, chosen, shares, normalizes=True)
        routing_kernels.group(chosen, 96)

    everything(5)
    before = compiled()
    for tokens in (1, 16, 17, 1024, 5000):
        everything(tokens)
    assert compiled() == before


def test_memory_that_is_not_aligned_gives_the_same() -> None:
    """A kernel that was compiled for aligned memory is not launched for other memory."""
    from ebbtide.model import block_kernels

    weight, norm = torch.ones(512, device=DEVICE, dtype=torch.bfloat16), Norm(1e-6)
    memory = torch.randn(1 + 3 * 512, device=DEVICE).to(torch.bfloat16)
    odd = memory[1:].view(3, 512)
    wanted = block_kernels.add_norm(odd.clone(), odd.clone(), weight, norm)
    found = block_kernels.add_norm(odd, odd, weight, norm)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
