"""Matmuls on a GPU: a row has the same bits among few rows as among many, whichever kernel multiplies it."""

import pytest
import torch

from ebbtide.model.block_functions import activate
from ebbtide.model.linear import gated_linear, linear
from ebbtide.system.gpu import HOPPER, generation
from ebbtide.system.torch_internals import without_split_k

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

ROWS = (1, 2, 3, 16, 17, 32, 33, 64, 65, 96, 128, 129, 256, 700)  # of each tile there is, and past its end


@pytest.fixture(autouse=True)
def _without_split_k():
    if generation(torch.device("cuda")) != HOPPER:
        pytest.skip("elsewhere torch multiplies")
    torch.manual_seed(0)
    with without_split_k():
        yield


def weight_of(width: int, depth: int) -> torch.Tensor:
    return torch.randn(width, depth, device="cuda", dtype=torch.bfloat16) * depth**-0.5


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("depth", "width"),
    [
        *[(2048, 4096), (2048, 2048), (6144, 2048), (1024, 4096), (2048, 1024), (3072, 1024)],  # Qwen3-1.7B and 0.6B
        *[(2560, 6144), (9728, 2560), (4096, 6144), (12288, 4096)],  # 4B and 8B
        *[(4864, 896), (896, 1152), (576, 3584), (2048, 6200), (64, 40), (1536, 13), (512, 49155)],
    ],
)
def test_matmuls_of_few_rows_have_the_bits_of_many(depth, width, biased) -> None:
    weight, x = weight_of(width, depth), torch.randn(3000, depth, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(width, device="cuda", dtype=torch.bfloat16) if biased else None
    with torch.no_grad():
        many = linear(x, weight, bias)
        for rows in ROWS:
            assert torch.equal(linear(x[:rows], weight, bias), many[:rows]), rows
    wanted = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    torch.testing.assert_close(many, wanted.bfloat16(), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("depth", "width"),
    [(2048, 6144), (1024, 3072), (2560, 9728), (4096, 12288), (896, 4864), (576, 1536), (64, 40), (2048, 27648)],
)
def test_both_halves_of_a_gated_mlp_as_one_have_the_bits_of_matmul_and_activation(depth, width, kind) -> None:
    weight, x = weight_of(2 * width, depth), torch.randn(3000, depth, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        many = activate(linear(x, weight), kind)
        for rows in ROWS:
            assert torch.equal(gated_linear(x[:rows], weight, kind), many[:rows]), rows


def test_kernels_that_start_early_see_what_the_ones_before_them_wrote() -> None:
    """A chain in which each product is of the one before it, as one CUDA graph and one by one."""
    weights = [weight_of(1024, 1024) for _ in range(12)]
    for rows in (8, 64, 128):
        x = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)

        def chain(x: torch.Tensor = x) -> torch.Tensor:
            for weight in weights:
                x = linear(x, weight)
            return x

        with torch.no_grad():
            wanted = x
            for weight in weights:
                wanted = linear(wanted, weight)
                torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = chain()
            for _ in range(20):
                found.zero_()
                graph.replay()
                assert torch.equal(found, wanted)
                assert torch.equal(chain(), wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_matmuls_of_other_types_are_right(dtype) -> None:
    x, weight = (torch.randn(rows, 256, device="cuda").to(dtype) for rows in (20, 96))
    with torch.no_grad():
        torch.testing.assert_close(
            linear(x, weight), (x.double() @ weight.double().t()).to(dtype), atol=0.05, rtol=0.01
        )


def test_gradients_reach_through_a_matmul_of_few_rows() -> None:
    x, weight = (torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16) for rows in (1, 96))
    x.requires_grad_()
    (found,) = torch.autograd.grad(linear(x, weight).sum(), x)
    torch.testing.assert_close(found, weight.sum(0, keepdim=True), atol=0.2, rtol=0.05)
