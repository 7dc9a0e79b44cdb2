"""The Triton kernels of the output head, row by row, against the same formulas in float64."""

import pytest
import torch

from ebbtide.policy import divergence_reference
from ebbtide.policy.divergence import token_divergences
from ebbtide.policy.head import Head, token_logprobs

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


@pytest.mark.parametrize("columns", [7, 2048, 2049, 151936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (1.3, 5.0)])
def test_divergences_equal_the_formulas(columns, dtype, beta, scale, softcap) -> None:
    from ebbtide.policy import divergence_kernels

    torch.manual_seed(0)
    head, teacher = Head(torch.empty(0), None, scale, softcap), Head(torch.empty(0), None, 0.8, None)
    logits, theirs = ((torch.randn(33, columns, device="cuda") * 4).to(dtype) for _ in range(2))
    targets, weights = torch.randint(columns, (33,), device="cuda"), torch.randn(33, device="cuda")
    found = divergence_kernels.reduce(logits, theirs, targets, beta, head, teacher)
    leaf = logits.double().requires_grad_()
    p = (softcap * (leaf / softcap).tanh() if softcap else leaf).mul(scale).log_softmax(-1)
    q = theirs.double().mul(0.8).log_softmax(-1)
    m = (beta * q.exp() + (1 - beta) * p.exp()).log()
    parts = {0.0: (q, p), 1.0: (p, q)}
    if beta in parts:
        a, b = parts[beta]
        divergences = (a.exp() * (a - b)).sum(-1)
    else:
        divergences = beta * (q.exp() * (q - m)).sum(-1) + (1 - beta) * (p.exp() * (p - m)).sum(-1)
    wanted = divergences, p.gather(-1, targets[:, None])[:, 0], -(p.exp() * p).sum(-1)
    for ours, reference in zip(found[:3], wanted, strict=True):
        torch.testing.assert_close(ours.double(), reference.detach(), rtol=1e-5, atol=2e-5)
    (wanted_grad,) = torch.autograd.grad((divergences * weights).sum(), leaf)
    rows = found.lse, found.teacher_lse, found.centre, weights
    grad = divergence_kernels.gradient(logits.clone(), theirs, *rows, beta, head, teacher)
    loose = 2e-5 if dtype == torch.float32 else 1e-2
    assert ((grad.double() - wanted_grad).norm() / wanted_grad.norm()).item() < loose
    plain = divergence_reference.gradient(logits.clone(), theirs.clone(), *rows, beta, head, teacher)
    torch.testing.assert_close(grad.float(), plain.float(), rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_far_apart_distributions_stay_finite(beta) -> None:
    """Of logits in the hundreds, most probabilities are 0 in float32."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(9, 64, device="cuda", requires_grad=True), torch.randn(3000, 64, device="cuda")
    weight.requires_grad_()
    theirs, matrix = torch.randn(9, 32, device="cuda"), torch.randn(3000, 32, device="cuda")
    heads = Head(weight, scale=60.0), Head(matrix, scale=60.0)
    targets = torch.zeros(9, dtype=torch.long, device="cuda")
    found = token_divergences(hidden, heads[0], targets, theirs, heads[1], beta=beta, chunk=4)
    found.divergences.sum().backward()
    for tensor in (found.divergences, found.entropies, hidden.grad, weight.grad):
        assert tensor.isfinite().all()
