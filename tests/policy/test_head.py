"""The chunked head equals full logits, in values and gradients, and never makes a [tokens, vocabulary] tensor."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ebbtide.model import quantize
from ebbtide.policy.head import Head, token_logprobs

TOKENS, HIDDEN, VOCABULARY = 50, 16, 97


def inputs(bias: bool = False):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, requires_grad=True)
    extra = torch.randn(VOCABULARY, generator=generator, requires_grad=True) if bias else None
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    mix = torch.randn(2, TOKENS, generator=generator)
    return hidden, weight, extra, targets, mix


def full(hidden, weight, bias, targets, scale, softcap):
    logits = hidden @ weight.T + (bias if bias is not None else 0)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logprobs = torch.log_softmax(logits * scale, -1)
    return logprobs.gather(-1, targets[:, None])[:, 0], torch.distributions.Categorical(logits=logits * scale).entropy()


@pytest.mark.parametrize("chunk", [1, 7, 50, 1000])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (1 / 0.7, None), (0.5, 3.0)])
def test_equals_full_logits(chunk, bias, scale, softcap) -> None:
    hidden, weight, extra, targets, mix = inputs(bias)
    leaves = [leaf for leaf in (hidden, weight, extra) if leaf is not None]
    wanted = full(hidden, weight, extra, targets, scale, softcap)
    wanted_grads = torch.autograd.grad((wanted[0] * mix[0] + wanted[1] * mix[1]).sum(), leaves)
    found = token_logprobs(hidden, weight, extra, targets, scale=scale, softcap=softcap, chunk=chunk)
    found_grads = torch.autograd.grad((found[0] * mix[0] + found[1] * mix[1]).sum(), leaves)
    for ours, reference in zip((*found, *found_grads), (*wanted, *wanted_grads), strict=True):
        torch.testing.assert_close(ours, reference, rtol=2e-5, atol=2e-5)


def test_gradients_pass_gradcheck_where_only_one_output_is_used() -> None:
    hidden, weight, _, targets, _ = inputs()
    for pick in (0, 1):
        wanted = torch.autograd.grad(full(hidden, weight, None, targets, 1.0, None)[pick].sum(), [hidden, weight])
        found = torch.autograd.grad(
            token_logprobs(hidden, weight, None, targets, chunk=8)[pick].sum(), [hidden, weight]
        )
        torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)


class Largest(TorchDispatchMode):
    """Watches every tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return made


def test_no_tensor_of_tokens_by_vocabulary_is_made() -> None:
    hidden, weight, _, targets, _ = inputs()
    with Largest() as naive:
        full(hidden, weight, None, targets, 1.0, None)
    assert naive.elements >= TOKENS * VOCABULARY  # the watch sees what it should
    with Largest() as chunked:
        logprobs, entropies = token_logprobs(hidden, weight, None, targets, chunk=8)
        (logprobs.sum() + entropies.sum()).backward()
    assert chunked.elements == VOCABULARY * HIDDEN  # the weight's gradient; a chunk of 8 rows of logits is smaller


def test_frozen_head_gets_no_gradient() -> None:
    hidden, weight, _, targets, _ = inputs()
    frozen = weight.detach()
    token_logprobs(hidden, frozen, None, targets, chunk=8)[0].sum().backward()
    assert hidden.grad is not None
    assert frozen.grad is None


def test_bfloat16_weights_sum_their_gradient_in_fp32() -> None:
    hidden, weight, _, targets, _ = inputs()
    narrow = [leaf.detach().bfloat16().requires_grad_() for leaf in (hidden, weight)]
    token_logprobs(*narrow, None, targets, chunk=1)[0].sum().backward()
    one_chunk = [leaf.detach().clone().requires_grad_() for leaf in narrow]
    token_logprobs(*one_chunk, None, targets, chunk=TOKENS)[0].sum().backward()
    assert narrow[1].grad.dtype == torch.bfloat16
    torch.testing.assert_close(narrow[1].grad.float(), one_chunk[1].grad.float(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_quantized_head_computes_with_its_numbers_a_slice_at_a_time(monkeypatch, dtype) -> None:
    hidden, weight, extra, targets, mix = inputs(bias=True)
    monkeypatch.setattr(quantize, "slice_rows", lambda columns: 10)
    codes = quantize.quantize(weight.detach(), "float8")
    numbers, extra = quantize.dequantize(codes, dtype), extra.detach().to(dtype)
    found = []
    for matrix in (codes, numbers):
        leaf = hidden.detach().to(dtype).requires_grad_()
        with Largest() as watch:
            logprobs, entropies = token_logprobs(leaf, matrix, extra, targets, scale=0.7, softcap=3.0, chunk=8)
            (logprobs * mix[0] + entropies * mix[1]).sum().backward()
        found.append((watch.elements, logprobs, entropies, leaf.grad))
    assert found[0][0] == TOKENS * HIDDEN < VOCABULARY * HIDDEN
    close = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for ours, wanted in zip(found[0][1:], found[1][1:], strict=True):
        torch.testing.assert_close(ours, wanted, rtol=close, atol=close)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [45, 48], ids=["at any place", "at whole cache lines"])
def test_a_loss_of_its_own_has_the_logits_of_a_quantized_head_a_slice_at_a_time(monkeypatch, rows, bias) -> None:
    hidden, weight, extra, *_ = inputs(bias)
    monkeypatch.setattr(quantize, "slice_rows", lambda columns: 10)
    codes = quantize.quantize(weight.detach(), "float8")
    numbers, extra = quantize.dequantize(codes, torch.float32), None if extra is None else extra.detach()
    mix = torch.randn(TOKENS, rows)
    found = []
    for matrix in (codes, numbers):
        leaf = hidden.detach().clone().requires_grad_()
        head = Head(matrix, extra)
        assert head.vocabulary == VOCABULARY
        with Largest() as watch:
            raw = head.raw(leaf[:12], rows)
            (raw * mix[:12]).sum().backward()
        found.append((watch.elements, raw, leaf.grad))
    assert found[0][0] == TOKENS * HIDDEN < VOCABULARY * HIDDEN
    for ours, wanted in zip(found[0][1:], found[1][1:], strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)
