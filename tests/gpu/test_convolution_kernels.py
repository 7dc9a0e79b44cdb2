"""The convolution of layers with states, against float64."""

import os

import pytest
import torch
from torch.nn.functional import conv1d, silu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's interpreter runs them on a CPU
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a GPU")]
# The interpreter truncates to bfloat16 where a GPU rounds.
CLOSE = {torch.float16: 1e-3} if INTERPRETED else {torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("activated", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("sizes", [(1, 130, 1, 4), (3, 96, 33, 3), (2, 256, 70, 4), (1, 40, 300, 4)])
def test_outputs_and_gradients(sizes, has_bias, activated, dtype) -> None:
    from ebbtide.model.convolution_kernels import convolve, convolve_backward

    batch, channels, tokens, width = sizes
    made = torch.Generator().manual_seed(0)
    x, grad = (torch.randn((batch, tokens, channels), generator=made).to(DEVICE, dtype).mT for _ in range(2))
    weight, bias = (torch.randn(size, generator=made).to(DEVICE, dtype) for size in ((channels, width), (channels,)))
    given = [x, weight, bias] if has_bias else [x, weight]
    leaves = [one.detach().double().requires_grad_() for one in given]
    wanted = conv1d(leaves[0], leaves[1][:, None], leaves[2] if has_bias else None, padding=width - 1, groups=channels)
    wanted = wanted[..., :tokens]
    wanted = silu(wanted) if activated else wanted
    wanted.backward(grad.double())
    for laid in (x, x.contiguous()):  # with channels side by side, as layers have it, and with tokens
        bias_or_none = bias if has_bias else None
        found = convolve(laid, weight, bias_or_none, silu=activated)
        gradients = convolve_backward(laid, weight, bias_or_none, grad, silu=activated)
        assert (gradients[2] is None) != has_bias
        ours = [found, *gradients[: len(given)]]
        for mine, right in zip(ours, [wanted, *(one.grad for one in leaves)], strict=True):
            assert mine.dtype == dtype
            assert mine.shape == right.shape
            assert (mine.double() - right).norm() <= CLOSE[dtype] * right.norm()
        again = convolve_backward(laid, weight, bias_or_none, grad, silu=activated)
        assert all(torch.equal(*pair) for pair in zip(gradients[:2], again[:2], strict=True))


def test_a_sequence_does_not_depend_on_its_neighbours() -> None:
    from ebbtide.model.convolution_kernels import convolve

    x, weight = torch.randn((3, 64, 40), device=DEVICE).half(), torch.randn((64, 4), device=DEVICE).half()
    found = convolve(x, weight, None, silu=True)
    assert torch.equal(convolve(x[1:2], weight, None, silu=True), found[1:2])
    assert torch.equal(convolve(x[..., :7], weight, None, silu=True), found[..., :7])
