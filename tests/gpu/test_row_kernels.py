"""The Triton row kernels against the same formulas in float64."""

import pytest
import torch

from ebbtide.policy.head import token_logprobs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("columns", [7, 4096, 4097, 151936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.7, None), (1.3, 5.0)])
def test_kernels_equal_the_formulas(columns: int, dtype: torch.dtype, scale: float, softcap: float | None) -> None:
    from ebbtide.policy import logprob_kernels

    logits = (torch.randn(33, columns, device="cuda") * 4).to(dtype)
    targets = torch.randint(columns, (33,), device="cuda")
    found = logprob_kernels.reduce(logits, targets, scale, softcap)
    wanted = _in_double(logits, targets, scale, softcap)
    for ours, reference in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), reference, rtol=1e-5, atol=2e-5)

    weights = [torch.randn(33, device="cuda") for _ in range(2)]
    wanted_grad = _autograd(logits, targets, weights, scale, softcap)
    found_grad = logprob_kernels.gradient(logits.clone(), targets, found[0], found[2], *weights, scale, softcap)
    loose = 1e-5 if dtype == torch.float32 else 1e-2
    assert ((found_grad.double() - wanted_grad).norm() / wanted_grad.norm()).item() < loose


def _in_double(logits, targets, scale, softcap):  # type: ignore[no-untyped-def]
    x = logits.double()
    x = (x / softcap).tanh() * softcap if softcap is not None else x
    x = x * scale
    logprobs = x.log_softmax(-1)
    return x.logsumexp(-1), logprobs.gather(-1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def _autograd(logits, targets, weights, scale, softcap):  # type: ignore[no-untyped-def]
    leaf = logits.double().requires_grad_()
    _, logprobs, entropy = _in_double(leaf, targets, scale, softcap)
    (logprobs * weights[0]).sum().add((entropy * weights[1]).sum()).backward()
    return leaf.grad


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 2e-3), (torch.bfloat16, 2e-2)])
def test_head_on_the_gpu_equals_full_logits(dtype, close) -> None:
    hidden = torch.randn(300, 64, device="cuda").to(dtype).requires_grad_()
    weight = torch.randn(1000, 64, device="cuda").to(dtype).requires_grad_()
    targets = torch.randint(1000, (300,), device="cuda")
    logprobs, entropy = token_logprobs(hidden, weight, None, targets, chunk=77)
    (logprobs.sum() + 0.3 * entropy.sum()).backward()
    leaf_h, leaf_w = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    full = (leaf_h @ leaf_w.T).log_softmax(-1)
    (full.gather(-1, targets[:, None]).sum() - 0.3 * (full.exp() * full).sum()).backward()
    for ours, reference in ((hidden.grad, leaf_h.grad), (weight.grad, leaf_w.grad)):
        assert ((ours.double() - reference).norm() / reference.norm()).item() < close
