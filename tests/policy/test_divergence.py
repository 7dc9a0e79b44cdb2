"""Divergences from a teacher in chunks equal full logits in float64, in values and gradients, and never make a [tokens,
vocabulary] tensor."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ebbtide.model import quantize
from ebbtide.policy.divergence import token_divergences
from ebbtide.policy.head import Head
from ebbtide.policy.losses import LossInputs
from ebbtide.policy.losses.distillation import sampled_divergence

TOKENS, HIDDEN, WIDER, VOCABULARY = 50, 16, 24, 97
SHAPES = {
    "plain": ({}, {}),
    "scaled": ({"scale": 1 / 0.7}, {"scale": 0.3}),
    "capped": ({"softcap": 3.0, "scale": 0.5}, {"softcap": 5.0}),
}


def inputs(rows: int = VOCABULARY, teacher_rows: int = VOCABULARY, bias: bool = False, dtype=torch.float32):
    """(hidden, weight, bias, targets, the teacher's hidden, weight and bias, a weight for each token)."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    hidden, weight = draw(TOKENS, HIDDEN).requires_grad_(), (0.5 * draw(rows, HIDDEN)).requires_grad_()
    extra = draw(rows).requires_grad_() if bias else None
    targets = torch.randint(min(rows, teacher_rows), (TOKENS,), generator=generator)
    teacher = draw(TOKENS, WIDER), 0.5 * draw(teacher_rows, WIDER), draw(teacher_rows) if bias else None
    return hidden, weight, extra, targets, teacher, torch.randn(TOKENS, generator=generator)


def full_logits(hidden, head: Head, rows: int) -> torch.Tensor:
    logits = hidden.double() @ head.weight.double().T + (0 if head.bias is None else head.bias.double())
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    return torch.log_softmax(head.scale * logits[:, :rows], -1)


def full(hidden, head, targets, teacher_hidden, teacher_head, beta):
    """(divergence, log-prob, entropy) of each token, by its definition in float64."""
    rows = min(len(head.weight), len(teacher_head.weight))
    p, q = full_logits(hidden, head, rows), full_logits(teacher_hidden, teacher_head, rows)

    def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a.exp() * (a - b)).sum(-1)

    if beta == 0:
        found = kl(q, p)
    elif beta == 1:
        found = kl(p, q)
    else:
        m = (beta * q.exp() + (1 - beta) * p.exp()).log()
        found = beta * kl(q, m) + (1 - beta) * kl(p, m)
    return found, p.gather(-1, targets[:, None])[:, 0], -(p.exp() * p).sum(-1)


def agree(case, beta, chunk, rows=(VOCABULARY, VOCABULARY), bias=False) -> None:
    hidden, weight, extra, targets, (theirs, matrix, offset), mix = inputs(*rows, bias)
    ours, teachers = SHAPES[case]
    head, teacher_head = Head(weight, extra, **ours), Head(matrix, offset, **teachers)
    leaves = [leaf for leaf in (hidden, weight, extra) if leaf is not None]
    wanted = full(hidden, head, targets, theirs, teacher_head, beta)
    wanted_grads = torch.autograd.grad((wanted[0] * mix).sum(), leaves)
    found = token_divergences(hidden, head, targets, theirs, teacher_head, beta=beta, chunk=chunk)
    assert (found.divergences > 0).all()
    grads = torch.autograd.grad((found.divergences * mix).sum(), leaves)
    for mine, reference in zip((found.divergences, found.logprobs, found.entropies), wanted, strict=True):
        torch.testing.assert_close(mine.double(), reference, rtol=2e-5, atol=2e-5)
    for mine, reference in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(mine.double(), reference.double(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("case", SHAPES)
def test_equals_full_logits(case, beta) -> None:
    agree(case, beta, chunk=7)


@pytest.mark.parametrize("chunk", [1, 50, 1000])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_chunks_of_any_size_do(beta, chunk) -> None:
    agree("capped", beta, chunk, bias=True)


@pytest.mark.parametrize("rows", [(97, 90), (90, 97)], ids=["more rows than the teacher", "fewer"])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_heads_of_different_rows_are_compared_on_those_that_both_have(beta, rows) -> None:
    agree("scaled", beta, 8, rows, bias=True)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_teacher_itself_has_no_divergence_and_no_gradient(beta) -> None:
    hidden, weight, _, targets, _, _ = inputs()
    head = Head(weight)
    found = token_divergences(hidden, head, targets, hidden.detach(), Head(weight.detach()), beta=beta, chunk=8)
    found.divergences.sum().backward()
    torch.testing.assert_close(found.divergences, torch.zeros(TOKENS), rtol=0, atol=1e-6)
    torch.testing.assert_close(hidden.grad, torch.zeros_like(hidden), rtol=0, atol=1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_far_apart_distributions_stay_finite(beta) -> None:
    """Of logits in the hundreds, most probabilities are 0 in float32."""
    hidden, weight, _, targets, (theirs, matrix, _), _ = inputs()
    found = token_divergences(
        hidden, Head(weight, scale=60.0), targets, theirs, Head(matrix, scale=60.0), beta=beta, chunk=8
    )
    found.divergences.sum().backward()
    for tensor in (found.divergences, found.entropies, hidden.grad, weight.grad):
        assert tensor.isfinite().all()


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_bfloat16_sums_the_weights_gradient_in_fp32(beta) -> None:
    found = []
    for chunk in (1, TOKENS):
        hidden, weight, _, targets, (theirs, matrix, _), _ = inputs(dtype=torch.bfloat16)
        token_divergences(
            hidden, Head(weight), targets, theirs, Head(matrix), beta=beta, chunk=chunk
        ).divergences.sum().backward()
        assert weight.grad.dtype == torch.bfloat16
        found.append(weight.grad.float())
    torch.testing.assert_close(found[0], found[1], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("rows", [97, 90], ids=["all rows", "fewer"])
def test_a_quantized_head_computes_with_its_numbers_a_slice_at_a_time(monkeypatch, rows) -> None:
    hidden, weight, extra, targets, (theirs, matrix, offset), mix = inputs(97, rows, bias=True)
    monkeypatch.setattr(quantize, "slice_rows", lambda columns: 10)
    codes, extra = [quantize.quantize(one.detach(), "float8") for one in (weight, matrix)], extra.detach()
    found = []
    for ours, teachers in (codes, [quantize.dequantize(one, torch.float32) for one in codes]):
        leaf = hidden.detach().clone().requires_grad_()
        with Largest() as watch:
            divergences = token_divergences(
                leaf, Head(ours, extra), targets, theirs, Head(teachers, offset), beta=0.3, chunk=4
            ).divergences
            (divergences * mix).sum().backward()
        found.append((watch.elements, divergences, leaf.grad))
    assert found[0][0] < VOCABULARY * HIDDEN
    for mine, reference in zip(found[0][1:], found[1][1:], strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-5)


class Largest(TorchDispatchMode):
    """Watches every tensor of numbers, not of codes, that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor) and tensor.itemsize > 1:
                self.elements = max(self.elements, tensor.numel())
        return made


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_no_tensor_of_tokens_by_vocabulary_is_made(beta) -> None:
    hidden, weight, _, targets, (theirs, matrix, _), _ = inputs()
    head, teacher_head = Head(weight, softcap=3.0), Head(matrix)
    with Largest() as naive:
        full(hidden, head, targets, theirs, teacher_head, beta)
    assert naive.elements >= TOKENS * VOCABULARY  # the watch sees what it should
    with Largest() as chunked:
        token_divergences(hidden, head, targets, theirs, teacher_head, beta=beta, chunk=8).divergences.sum().backward()
    assert chunked.elements <= VOCABULARY * WIDER  # a weight; a chunk of 8 rows of logits is smaller


class Alive(TorchDispatchMode):
    """Counts how many tensors of so many elements are alive at once, of those that operations return."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements, self.most, self.made = elements, 0, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.numel() == self.elements and made.dtype == torch.float32:
            self.made.append(weakref.ref(made))
        alive = [tensor for one in self.made if (tensor := one()) is not None]
        self.most = max(self.most, len({tensor.data_ptr() for tensor in alive}))
        return made


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_few_tensors_of_a_chunk_by_vocabulary_are_alive(beta, softcap) -> None:
    """A log-sum-exp has one more inside, while it is computed."""
    hidden, weight, _, targets, (theirs, matrix, _), _ = inputs()
    head, teacher_head = Head(weight, softcap=softcap), Head(matrix, softcap=softcap)
    chunk = TOKENS // 2
    with Alive(chunk * VOCABULARY) as forward:
        found = token_divergences(hidden, head, targets, theirs, teacher_head, beta=beta, chunk=chunk)
    assert forward.most == (2 if beta == 1 else 3)
    with Alive(chunk * VOCABULARY) as backward:
        found.divergences.sum().backward()
    assert backward.most == (2 if softcap is None else 3)


def test_sampled_tokens_have_the_gradient_of_a_policy_that_is_rewarded_by_the_teacher() -> None:
    """The mean over what a policy would sample is the gradient of the reverse KL: here over the whole vocabulary, each
    token as often as it is likely."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64).log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    chances = logprobs.exp()
    values = {"teacher_logprobs": teacher, "weights": chances.detach()}
    sequence = torch.zeros(VOCABULARY, dtype=torch.long)
    loss, reported = sampled_divergence(LossInputs(logprobs, logprobs, values, sequence, 1, [None]))
    (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
    reverse = (chances * (logprobs - teacher)).sum()
    (wanted,) = torch.autograd.grad(reverse, logits)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(loss, reverse)
    torch.testing.assert_close(reported["kl"], (logprobs - teacher).sum().detach())
