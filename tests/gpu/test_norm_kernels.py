"""What the Triton kernel makes again of a norm, against plain torch: the same bits."""

import pytest
import torch

from ebbtide.policy.recompute import recompute_norm

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("shape", [(1, 3, 7), (1, 333, 2048), (2, 65, 16, 128), (1, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_equals_two_operations(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    from ebbtide.policy import norm_kernels

    x = (torch.randn(shape, device="cuda") * 10).to(dtype)
    roots = torch.rand(*shape[:-1], 1, device="cuda") * 3
    for ours, wanted in zip(norm_kernels.recompute_norm(x, roots), recompute_norm(x, roots), strict=True):
        assert ours.dtype == wanted.dtype
        assert torch.equal(ours, wanted)
    if len(shape) == 4:  # not contiguous
        turned, turned_roots = x.transpose(1, 2), roots.transpose(1, 2)
        assert torch.equal(
            norm_kernels.recompute_norm(turned, turned_roots)[1], recompute_norm(turned, turned_roots)[1]
        )
