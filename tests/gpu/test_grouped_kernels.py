"""Matmuls of the experts of few tokens as Triton kernels: against plain torch, and with the bits of those of many."""

import os

import pytest
import torch
from torch import Tensor

from ebbtide.model.block_functions import activate, group
from ebbtide.model.block_reference import Activation
from ebbtide.model.linear import gated_grouped_linear, grouped_linear
from ebbtide.system.gpu import HOPPER, generation
from ebbtide.system.torch_internals import grouped_mm

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's interpreter runs them on a CPU
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a GPU")]

DTYPE = torch.float16 if INTERPRETED else torch.bfloat16  # The interpreter truncates to bfloat16 where a GPU rounds.
# Tokens, experts, those of a token, depth, width: also of widths that are no multiple of a tile's.
SIZES = [(1, 6, 1, 64, 40), (3, 6, 2, 320, 96), (40, 3, 2, 256, 72), (24, 5, 5, 128, 64), (50, 20, 1, 64, 40)]
MODELS = [(tokens, 32, 4, 2048, 768) for tokens in (1, 16, 128, 256)]  # the shape of benchmarks/rollout.py
MODELS += [(tokens, 128, 8, 2048, 768) for tokens in (1, 9, 64, 128)]  # Qwen3-30B-A3B
MODELS += [(tokens, 60, 4, 2048, 1408) for tokens in (5, 100)] + [(100, 8, 2, 4096, 1536)]
if not INTERPRETED:
    SIZES += MODELS


@pytest.fixture(autouse=True)
def _seed() -> None:
    if not INTERPRETED and generation(torch.device("cuda")) != HOPPER:
        pytest.skip("elsewhere torch multiplies")
    torch.manual_seed(0)


def made(tokens: int, experts: int, count: int, depth: int, width: int, *, skewed: bool) -> tuple[Tensor, ...]:
    """x, a weight with `width` rows for each expert, and the chosen experts: if `skewed`, only the first ones."""
    x = torch.randn(tokens, depth, device=DEVICE).to(DTYPE)
    weight = (torch.randn(experts, width, depth, device=DEVICE) * depth**-0.5).to(DTYPE)
    preferred = torch.linspace(experts, 0, experts, device=DEVICE) if skewed else 0
    return x, weight, (torch.rand(tokens, experts, device=DEVICE) + preferred).topk(count).indices


def check(found: Tensor, wanted: Tensor) -> None:
    """The bits of torch's kernels; the interpreter's matmuls add in another order."""
    if INTERPRETED:
        torch.testing.assert_close(found, wanted, rtol=4e-3, atol=2e-3)
    else:
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(("tokens", "experts", "count", "depth", "width"), SIZES)
@pytest.mark.parametrize("skewed", [False, True])
def test_grouped_linear(tokens: int, experts: int, count: int, depth: int, width: int, skewed: bool) -> None:
    from ebbtide.model import grouped_kernels

    x, weight, chosen = made(tokens, experts, count, depth, width, skewed=skewed)
    order, _, ends = group(chosen, experts)
    rows = x[order // count]
    assert grouped_kernels.takes(rows, weight, len(rows))
    found = grouped_kernels.grouped_linear(rows, weight, ends)
    check(found, grouped_mm(rows, weight.transpose(1, 2), ends))
    right = torch.stack([weight[expert].double() @ x[token].double() for token, expert in visits(chosen, order)])
    torch.testing.assert_close(found.double(), right, rtol=2e-2, atol=2e-2)


def visits(chosen: Tensor, order: Tensor) -> list[tuple[int, int]]:
    """The token and the expert of each row."""
    return [(int(visit) // chosen.shape[1], int(chosen.flatten()[visit])) for visit in order]


@pytest.mark.parametrize(("tokens", "experts", "count", "depth", "width"), SIZES)
@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_gated_grouped_linear(
    tokens: int, experts: int, count: int, depth: int, width: int, skewed: bool, kind: Activation
) -> None:
    from ebbtide.model import grouped_kernels

    x, weight, chosen = made(tokens, experts, count, depth, 2 * width, skewed=skewed)
    order, _, ends = group(chosen, experts)
    assert grouped_kernels.takes(x, weight, len(order))
    found = grouped_kernels.gated_grouped_linear(x, weight, order, ends, count, kind)
    check(found, activate(grouped_mm(x[order // count], weight.transpose(1, 2), ends), kind))


@pytest.mark.parametrize(("experts", "count", "depth", "width"), [(32, 4, 2048, 768), (128, 8, 2048, 768)])
@pytest.mark.skipif(INTERPRETED, reason="the interpreter multiplies in other orders")
def test_few_rows_have_the_bits_of_many(experts: int, count: int, depth: int, width: int) -> None:
    """Those of decode, which these kernels multiply, and of training, which torch's do."""
    x, halves, chosen = made(4000, experts, count, depth, 2 * width, skewed=False)
    down = (torch.randn(experts, depth, width, device=DEVICE) * width**-0.5).to(DTYPE)

    def mixed(some: slice) -> Tensor:
        order, places, ends = group(chosen[some], experts)
        active = gated_grouped_linear(x[some], halves, order, ends, count, "silu")
        return grouped_linear(active, down, ends)[places]

    with torch.no_grad():
        many = mixed(slice(None))
        for first, tokens in ((0, 1), (5, 2), (100, 16), (200, 33), (300, 128), (500, 256), (900, 700)):
            some = slice(first, first + tokens)
            assert torch.equal(mixed(some), many[some]), tokens


@pytest.mark.skipif(INTERPRETED, reason="the interpreter captures nothing")
def test_a_captured_pass_has_the_groups_of_its_replay() -> None:
    x, weight, chosen = made(128, 32, 4, 256, 128, skewed=False)
    others = made(128, 32, 4, 256, 128, skewed=True)[2]

    def multiplied() -> Tensor:
        order, _, ends = group(given, 32)
        return gated_grouped_linear(x, weight, order, ends, 4, "silu")

    given, graph = chosen.clone(), torch.cuda.CUDAGraph()
    with torch.no_grad():
        multiplied()  # compiles
        with torch.cuda.graph(graph):
            found = multiplied()
        for one in (others, chosen):
            given.copy_(one)
            graph.replay()
            assert torch.equal(found, multiplied())


@pytest.mark.skipif(INTERPRETED, reason="linear.py asks for a GPU")
def test_gradients_reach_through_few_rows() -> None:
    x, weight, chosen = made(8, 6, 2, 64, 64, skewed=False)
    order, _, ends = group(chosen, 6)
    rows = x[order // 2].requires_grad_()
    ones = torch.ones(16, 64, device=DEVICE, dtype=DTYPE)  # torch's backward takes no gradient that was expanded
    (found,) = torch.autograd.grad(grouped_linear(rows, weight, ends), rows, ones)
    wanted = weight.float().sum(1)[chosen.flatten()[order]]
    torch.testing.assert_close(found.float(), wanted, rtol=2e-2, atol=2e-2)
