"""The Triton kernels of the gated delta rule, against a token at a time in float64."""

import os

import pytest
import torch
from torch import Tensor

from ebbtide.model import gated_delta_rule as rules
from ebbtide.model.gated_delta_rule import gated_delta_rule

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's interpreter runs them on a CPU
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a GPU")]

DTYPES = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]  # The first has no matmuls of bfloat16.
CLOSE = {torch.float16: 1e-3, torch.bfloat16: 6e-3, torch.float32: 1e-3}  # relative, of a whole tensor
# B, T, heads, K, V
SIZES = [(2, 70, 2, 16, 16), (1, 32, 1, 32, 16), (2, 1, 1, 16, 32), (1, 33, 1, 128, 64), (1, 40, 1, 64, 128)]
if not INTERPRETED:
    SIZES += [(5, 356, 4, 128, 128), (2, 200, 3, 64, 128), (2, 100, 3, 128, 64), (2, 150, 2, 256, 256)]
DECAYS = {"weak": 0.02, "strong": 5.0}


@pytest.fixture(autouse=True)
def _seed(monkeypatch) -> None:
    torch.manual_seed(0)
    if INTERPRETED:
        monkeypatch.setattr(rules, "has_kernels", lambda *_: True)


def random_inputs(
    size: tuple[int, ...], dtype: torch.dtype, decay: float = 0.3, *, alike: bool = False
) -> list[Tensor]:
    batch, tokens, heads, key_size, value_size = size
    query, key = (torch.randn((batch, tokens, heads, key_size), device=DEVICE) for _ in range(2))
    value = torch.randn((batch, tokens, heads, value_size), device=DEVICE)
    g = -decay * torch.nn.functional.softplus(torch.randn((batch, tokens, heads), device=DEVICE))
    beta = torch.rand((batch, tokens, heads), device=DEVICE)
    if alike:
        key, beta = key[:, :1] + 0.01 * torch.randn_like(key), 1 - 0.01 * beta
    return [query.to(dtype), key.to(dtype), value.to(dtype), g, beta.to(dtype)]


def token_by_token(inputs: list[Tensor], state: Tensor | None = None, *, normalizes: bool) -> tuple[Tensor, Tensor]:
    query, key, value, g, beta = inputs
    if normalizes:
        query, key = (one * (one.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for one in (query, key))
    if state is None:
        state = query.new_zeros((len(query), query.shape[2], query.shape[3], value.shape[3]))
    outputs = []
    for at in range(query.shape[1]):
        state = state * g[:, at, :, None, None].exp()
        known = (state * key[:, at, :, :, None]).sum(-2)
        state = state + key[:, at, :, :, None] * ((value[:, at] - known) * beta[:, at, :, None])[:, :, None]
        outputs.append((state * query[:, at, :, :, None]).sum(-2) * query.shape[-1] ** -0.5)
    return torch.stack(outputs, 1), state


def near(ours: Tensor, wanted: Tensor, most: float) -> None:
    assert ours.shape == wanted.shape
    assert ours.isfinite().all()
    assert (ours.double() - wanted).norm() <= most * wanted.norm() + 1e-5  # g of a single token has no gradient


def check(inputs: list[Tensor], *, normalizes: bool) -> None:
    assert rules.has_kernels(*inputs[:3])
    ours = [one.clone().requires_grad_() for one in inputs]
    exact = [one.double().requires_grad_() for one in inputs]
    output, last = gated_delta_rule(*ours, normalizes=normalizes)
    wanted, state = token_by_token(exact, normalizes=normalizes)
    assert output.dtype == inputs[2].dtype
    assert last.dtype == torch.float32
    near(output, wanted, CLOSE[output.dtype])
    near(last, state, 1e-4)
    grad = torch.randn_like(output)
    found, gradients = torch.autograd.grad(output, ours, grad), torch.autograd.grad(wanted, exact, grad.double())
    for one, found_one, gradient in zip(inputs, found, gradients, strict=True):
        assert found_one.dtype == one.dtype
        near(found_one, gradient, CLOSE[one.dtype])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decay", DECAYS)
def test_outputs_and_gradients(size, dtype, decay) -> None:
    check(random_inputs(size, dtype, DECAYS[decay]), normalizes=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decay", DECAYS)
def test_keys_that_are_alike_with_rates_near_one(dtype, decay) -> None:
    """Then the inverse has its largest numbers, and what a chunk writes almost cancels."""
    size = (1, 130, 1, 32, 32) if INTERPRETED else (3, 356, 2, 128, 128)
    check(random_inputs(size, dtype, DECAYS[decay], alike=True), normalizes=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_and_keys_that_are_not_normalized(dtype) -> None:
    query, key, *others = random_inputs((2, 70, 2, 64, 32), dtype)
    check([0.5 * query, torch.nn.functional.normalize(key, dim=-1), *others], normalizes=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalizes", [True, False])
def test_sequences_go_on_from_states(dtype, normalizes) -> None:
    query, key, *others = random_inputs((2, 75, 2, 32, 64), dtype)
    inputs = [query, key if normalizes else torch.nn.functional.normalize(key, dim=-1), *others]
    state = torch.randn((2, 2, 32, 64), device=DEVICE)
    output, last = gated_delta_rule(*inputs, state, normalizes=normalizes)
    wanted, end = token_by_token([one.double() for one in inputs], state.double(), normalizes=normalizes)
    near(output, wanted, CLOSE[dtype])
    near(last, end, 1e-4)


def run(inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    leaves = [one.detach().requires_grad_() for one in inputs]
    output, last = gated_delta_rule(*leaves, normalizes=True)
    return [output, *torch.autograd.grad(output, leaves, grad), last]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequence_has_the_same_bits_alone_and_among_others(dtype) -> None:
    tokens, length = (70, 37) if INTERPRETED else (356, 203)
    inputs = random_inputs((3, tokens, 2, 64, 32), dtype)
    grad = torch.randn_like(inputs[2])
    for one in (*inputs, grad):
        one[1, length:] = 0
    together = run(inputs, grad)
    alone = run([one[1:2, :length] for one in inputs], grad[1:2, :length])
    for ours, others in zip(alone[:-1], together[:-1], strict=True):
        assert torch.equal(ours[0], others[1, :length])
    assert torch.equal(alone[-1][0], together[-1][1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_may_be_parts_of_a_tensor(dtype) -> None:
    """As a layer has them: queries, keys and values of one projection, or behind a convolution."""
    inputs = random_inputs((2, 45, 2, 32, 16), dtype)
    grad = torch.randn_like(inputs[2])
    wanted = run(inputs, grad)
    joined = torch.cat([one.flatten(2) for one in inputs[:3]], 2)  # [B, T, channels]
    for whole in (joined, joined.transpose(1, 2).contiguous().transpose(1, 2)):
        parts = whole.split([64, 64, 32], 2)
        views = [part.unflatten(2, one.shape[2:]) for part, one in zip(parts, inputs, strict=False)]
        for ours, others in zip(
            run([*views, *inputs[3:]], grad.transpose(1, 2).contiguous().transpose(1, 2)), wanted, strict=True
        ):
            assert torch.equal(ours, others)


@pytest.mark.skipif(INTERPRETED, reason="chooses by the device")
def test_other_inputs_are_computed_in_plain_torch() -> None:
    wide = random_inputs((2, 70, 2, 32, 32), torch.float32)
    odd = random_inputs((2, 70, 2, 24, 32), torch.bfloat16)
    for inputs in (wide, odd):
        assert not rules.has_kernels(*inputs[:3])
        wanted, _ = token_by_token([one.double() for one in inputs], normalizes=True)
        near(gated_delta_rule(*inputs, normalizes=True)[0], wanted, CLOSE[inputs[0].dtype])
