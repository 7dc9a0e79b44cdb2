"""The routing of tokens to experts as Triton kernels, against plain torch; and that decode has the bits of training."""

import os

import pytest
import torch
from torch import Tensor

from ebbtide.model import block_reference as reference
from ebbtide.model.families import FAMILIES
from ebbtide.policy.fuse import KeptActivations
from ebbtide.policy.fused_experts import Experts
from ebbtide.policy.saved_activations import Dropped
from ebbtide.system.gpu import HOPPER, generation
from ebbtide.system.torch_internals import without_split_k

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's interpreter runs them on a CPU
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a GPU")]

# The interpreter truncates to bfloat16 where a GPU rounds.
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
CLOSE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SIZES = [(1, 4, 1), (1, 6, 6), (7, 60, 4), (33, 128, 8), (20, 32, 4)]  # tokens, experts, those of a token
if not INTERPRETED:
    SIZES += [(3000, 128, 8), (3000, 384, 8), (128, 32, 4)]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def made_logits(tokens: int, experts: int, dtype: torch.dtype, *, tied: bool) -> Tensor:
    """If `tied`, with many that are equal: zeros of both signs are the largest of every other token."""
    logits = 3 * torch.randn(tokens, experts, device=DEVICE)
    if tied:
        signs = logits.sign()
        logits = logits.abs().round()
        logits[::2] *= -1
        logits = torch.where(logits == 0, signs * 0.0, logits)
    return logits.to(dtype)


@pytest.mark.parametrize(("tokens", "experts", "count"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalizes", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_route(tokens: int, experts: int, count: int, dtype: torch.dtype, normalizes: bool, tied: bool) -> None:
    from ebbtide.model import routing_kernels

    logits = made_logits(tokens, experts, dtype, tied=tied)
    chosen, weights = routing_kernels.route(logits, count, normalizes=normalizes)
    wanted, wanted_weights = (one.to(DEVICE) for one in reference.route(logits.cpu(), count, normalizes=normalizes))
    assert torch.equal(chosen, wanted)
    assert chosen.dtype == wanted.dtype == torch.int32
    assert weights.dtype == torch.float32
    assert torch.equal(weights, weights.to(dtype).float())
    torch.testing.assert_close(weights, wanted_weights, rtol=CLOSE[dtype], atol=1e-7)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_each_token_has_its_experts_whatever_the_logits_are(odd: float) -> None:
    from ebbtide.model import routing_kernels

    logits = torch.randn(4, 6, device=DEVICE)
    logits[0], logits[1, 2:], logits[2, 5] = odd, -odd, odd
    chosen, weights = routing_kernels.route(logits, 4, normalizes=True)
    assert all(len(set(each)) == 4 and min(each) >= 0 and max(each) < 6 for each in chosen.tolist())
    assert torch.equal(weights[3], routing_kernels.route(logits[3:], 4, normalizes=True)[1][0])


@pytest.mark.parametrize(("tokens", "experts", "count"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalizes", [False, True])
def test_route_backward(tokens: int, experts: int, count: int, dtype: torch.dtype, normalizes: bool) -> None:
    from ebbtide.model import routing_kernels

    logits = torch.randn(tokens, experts, device=DEVICE).to(dtype)
    chosen, _ = reference.route(logits, count, normalizes=normalizes)
    grad = torch.randn(tokens, count, device=DEVICE)
    leaf = logits.double().requires_grad_()
    weights = leaf.softmax(-1).gather(1, chosen.long())
    weights = weights / weights.sum(-1, keepdim=True) if normalizes else weights
    (wanted,) = torch.autograd.grad(weights, leaf, grad.double())
    for function in (routing_kernels.route_backward, reference.route_backward):
        found = function(logits, chosen, grad, normalizes=normalizes)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), wanted, rtol=2 * CLOSE[dtype], atol=CLOSE[dtype] / 10)


@pytest.mark.parametrize(("tokens", "experts", "count"), [*SIZES, (700, 6, 4)])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("unvisited", [False, True])
def test_group(tokens: int, experts: int, count: int, index: torch.dtype, unvisited: bool) -> None:
    from ebbtide.model import routing_kernels

    chosen = torch.rand(tokens, experts, device=DEVICE).topk(count).indices.to(index)
    if unvisited:  # nobody visits the first, the last, and one between
        chosen = chosen.clamp(1, experts - 2).where(chosen != experts // 2, 1)
    found = routing_kernels.group(chosen, experts)
    for ours, wanted in zip(found, reference.group(chosen, experts), strict=True):
        assert ours.dtype == wanted.dtype
        assert torch.equal(ours, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalizes", [False, True])
def test_few_tokens_have_the_bits_of_many(dtype: torch.dtype, normalizes: bool) -> None:
    from ebbtide.model import routing_kernels

    logits = torch.randn(50 if INTERPRETED else 5000, 60, device=DEVICE).to(dtype)
    many = routing_kernels.route(logits, 4, normalizes=normalizes)
    for first, count in ((0, 1), (3, 1), (7, 16), (20, 30)):
        few = routing_kernels.route(logits[first : first + count].clone(), 4, normalizes=normalizes)
        assert all(torch.equal(one, other[first : first + count]) for one, other in zip(few, many, strict=True))


@pytest.mark.parametrize(("experts", "visited"), [(32, 4), (60, 4), (128, 8)])
@pytest.mark.skipif(INTERPRETED, reason="the interpreter multiplies in other orders")
def test_experts_of_decode_have_the_bits_of_training(experts: int, visited: int) -> None:
    if generation(torch.device("cuda")) != HOPPER:
        pytest.skip("elsewhere few rows have other bits")
    mlp = Experts(FAMILIES["qwen3_moe"], "silu", visited, normalizes=True)
    router, halves, down = mlp.names
    sizes = {router: (experts, 512), halves: (experts, 2 * 256, 512), down: (experts, 512, 256)}
    weights = {name: torch.randn(size, device=DEVICE, dtype=torch.bfloat16) / 16 for name, size in sizes.items()}
    x = torch.randn(3000, 512, device=DEVICE, dtype=torch.bfloat16)
    with torch.no_grad(), without_split_k():
        many = mlp.forward(x, weights, KeptActivations())
        for first, tokens in ((0, 1), (3, 2), (10, 16), (50, 33), (200, 128), (700, 700)):
            few = mlp.forward(x[first : first + tokens].clone(), weights, Dropped())
            assert torch.equal(few, many[first : first + tokens]), tokens
