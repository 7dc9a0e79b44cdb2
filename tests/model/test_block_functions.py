"""The functions between the matmuls of a transformer block, in plain torch: against autograd, and transformers."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu
from transformers.activations import ACT2FN
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from ebbtide.model import block_functions as blocks
from ebbtide.model.block_functions import Norm

DTYPES = [torch.float32, torch.bfloat16]
LLAMA, GEMMA = Norm(1e-6), Norm(1e-5, offset=1.0, wide=True)
HEADS, KV_HEADS, CHANNELS = 4, 2, 16
COUNTS = [HEADS, KV_HEADS, KV_HEADS]
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}  # relative, of a whole tensor


def random(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).to(dtype)


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def near(ours: Tensor, wanted: Tensor | None) -> None:
    assert wanted is not None
    assert ours.shape == wanted.shape
    assert ((ours.double() - wanted).norm() / wanted.norm()).item() < CLOSE[ours.dtype]


def double_norm(x: Tensor, weight: Tensor, norm: Norm) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * (weight + norm.offset)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def transformers_norm(weight: Tensor, norm: Norm) -> torch.nn.Module:
    made = (GemmaRMSNorm if norm.wide else Qwen3RMSNorm)(len(weight), eps=norm.eps).to(weight.dtype)
    made.weight.data.copy_(weight)
    return made


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [LLAMA, GEMMA])
def test_add_norm_is_transformers(dtype: torch.dtype, norm: Norm) -> None:
    x, delta, weight = random(33, 48, dtype=dtype, scale=3), random(33, 48, dtype=dtype), random(48, dtype=dtype)
    theirs = transformers_norm(weight, norm)
    added, normed = blocks.add_norm(x, delta, weight, norm)
    assert torch.equal(added, x + delta)
    assert torch.equal(normed, theirs(x + delta))
    same, normed = blocks.add_norm(x, None, weight, norm)
    assert same is x
    assert torch.equal(normed, theirs(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [LLAMA, GEMMA])
@pytest.mark.parametrize("adds", [False, True])
def test_norm_backward_is_autograd(dtype: torch.dtype, norm: Norm, adds: bool) -> None:
    x, weight, grad = random(33, 48, dtype=dtype, scale=3), random(48, dtype=dtype), random(33, 48, dtype=dtype)
    residual = random(33, 48, dtype=dtype) if adds else None
    x_leaf, weight_leaf = leaves(x, weight)
    double_norm(x_leaf, weight_leaf, norm).backward(grad.double())
    assert x_leaf.grad is not None
    dx, dweight, normed = blocks.norm_backward(x, weight, norm, grad, residual, remakes=True)
    assert torch.equal(normed, blocks.add_norm(x, None, weight, norm)[1])
    assert dx.dtype == dweight.dtype == dtype
    near(dx, x_leaf.grad if residual is None else x_leaf.grad + residual.double())
    near(dweight, weight_leaf.grad)


def test_a_residual_is_added_before_the_gradient_is_rounded() -> None:
    x, weight, grad = (random(*shape, dtype=torch.bfloat16) for shape in ((9, 48), (48,), (9, 48)))
    exact, _, _ = blocks.norm_backward(x.float(), weight.float(), GEMMA, grad.float(), None)
    rounded, _, _ = blocks.norm_backward(x, weight, GEMMA, grad, None)
    remainder, _, _ = blocks.norm_backward(x, weight, GEMMA, grad, -rounded)
    torch.testing.assert_close(remainder.float(), exact - rounded.float(), rtol=0.01, atol=1e-6)


def test_the_gradient_of_a_weight_is_of_the_rounded_input() -> None:
    x, grad = random(1, 48, dtype=torch.bfloat16), torch.ones(1, 48, dtype=torch.bfloat16)
    weight = torch.ones(48)
    rounded = transformers_norm(torch.ones(48, dtype=torch.bfloat16), LLAMA)(x)
    assert torch.equal(blocks.norm_backward(x, weight, LLAMA, grad, None)[1], rounded[0].float())
    assert not torch.equal(blocks.norm_backward(x, weight, GEMMA, grad, None)[1], rounded[0].float())


def rope_inputs(dtype: torch.dtype, norm: Norm | None) -> tuple[Tensor, tuple[Tensor, Tensor] | None, Tensor, Tensor]:
    qkv = random(11, sum(COUNTS) * CHANNELS, dtype=dtype, scale=3)
    norms = None if norm is None else (random(CHANNELS, dtype=dtype), random(CHANNELS, dtype=dtype))
    angles = torch.rand(11, CHANNELS) * 6  # both halves differ, as no model's do
    return qkv, norms, angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [None, LLAMA, GEMMA])
def test_rotate_is_transformers(dtype: torch.dtype, norm: Norm | None) -> None:
    qkv, norms, cos, sin = rope_inputs(dtype, norm)
    query, key, _ = qkv.unflatten(-1, (-1, CHANNELS)).split(COUNTS, 1)
    if norm is not None and norms is not None:
        query, key = (transformers_norm(w, norm)(x) for w, x in zip(norms, (query, key), strict=True))
    wanted = apply_rotary_pos_emb(query, key, cos, sin)
    found = blocks.rotate(qkv, blocks.Rotary(HEADS, KV_HEADS, CHANNELS, norms, norm or LLAMA, cos, sin))
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [None, LLAMA, GEMMA])
def test_rotate_backward_is_autograd(dtype: torch.dtype, norm: Norm | None) -> None:
    qkv, norms, cos, sin = rope_inputs(dtype, norm)
    grads = random(11, 3 * HEADS, CHANNELS, dtype=dtype).split(HEADS, 1)
    leaf, *weights = leaves(qkv, *(norms or ()))
    query, key, value = leaf.unflatten(-1, (-1, CHANNELS)).split(COUNTS, 1)
    if norm is not None:
        query, key = (double_norm(x, w, norm) for w, x in zip(weights, (query, key), strict=True))
    query, key = apply_rotary_pos_emb(query, key, cos.double(), sin.double())
    outputs = query, *(one.repeat_interleave(HEADS // KV_HEADS, 1) for one in (key, value))
    expanded = blocks.rotate_expanded(qkv, blocks.Rotary(HEADS, KV_HEADS, CHANNELS, norms, norm or LLAMA, cos, sin))
    for ours, theirs in zip(expanded, outputs, strict=True):
        near(ours, theirs.detach())
    torch.autograd.backward(outputs, [grad.double() for grad in grads])
    dqkv, *of_norms = blocks.rotate_backward(
        qkv, blocks.Rotary(HEADS, KV_HEADS, CHANNELS, norms, norm or LLAMA, cos, sin), *grads
    )  # fmt: skip
    assert dqkv.dtype == dtype
    near(dqkv, leaf.grad)
    if norm is None:
        assert of_norms == [None, None]
    for found, weight in zip(of_norms, weights, strict=False):
        near(found, weight.grad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "theirs"), [("silu", "silu"), ("gelu_tanh", "gelu_pytorch_tanh")])
def test_activate_is_transformers(dtype: torch.dtype, kind: blocks.Activation, theirs: str) -> None:
    gate_up = random(9, 48, dtype=dtype, scale=3)
    gate, up = gate_up.chunk(2, -1)  # not copied: on a CPU, tanh has other bits where tensors lie in other ways
    assert torch.equal(blocks.activate(gate_up, kind), ACT2FN[theirs](gate) * up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_activate_backward_is_autograd_in_place(dtype: torch.dtype, kind: blocks.Activation) -> None:
    gate_up, grad = random(33, 48, dtype=dtype, scale=3), random(33, 24, dtype=dtype)
    product = blocks.activate(gate_up, kind)
    (leaf,) = leaves(gate_up)
    gate, up = leaf.chunk(2, -1)
    act = silu(gate) if kind == "silu" else gelu(gate, approximate="tanh")
    (act * up).backward(grad.double())
    again, found = blocks.activate_backward(gate_up, grad, kind)
    assert again is grad
    assert found is gate_up
    assert torch.equal(again, product)
    near(found, leaf.grad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", [torch.int64, torch.int32])
@pytest.mark.parametrize("weighted", [False, True])
def test_combine(dtype: torch.dtype, index: torch.dtype, weighted: bool) -> None:
    rows, inverse = random(27, 20, dtype=dtype), torch.randperm(27).view(9, 3).to(index)
    weights = torch.rand(9, 3)
    rows_leaf, weights_leaf = leaves(rows, weights)
    wanted = (rows_leaf[inverse] * (weights_leaf[..., None] if weighted else 1)).sum(1)
    found = blocks.combine(rows, inverse, weights if weighted else None)
    assert found.dtype == dtype
    near(found, wanted.detach())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalizes", [False, True])
def test_route_is_transformers(dtype: torch.dtype, normalizes: bool) -> None:
    config = Qwen3MoeConfig(hidden_size=16, num_experts=6, num_experts_per_tok=3, norm_topk_prob=normalizes)
    router = Qwen3MoeTopKRouter(config).to(dtype)
    router.weight.data = random(6, 16, dtype=dtype)
    logits, weights, chosen = router(random(40, 16, dtype=dtype))
    found, found_weights = blocks.route(logits.detach(), 3, normalizes=normalizes)
    assert torch.equal(found_weights, weights.float())
    assert torch.equal(logits.gather(1, found.long()), logits.gather(1, chosen))  # of equal ones either is right


def test_of_equal_experts_the_first_are_chosen() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0], [0.0, -0.0, 0.0, -0.0, -1.0]])
    chosen, weights = blocks.route(logits, 3, normalizes=True)
    assert chosen.tolist() == [[1, 3, 0], [0, 1, 2]]
    near(weights.sum(-1), torch.ones(2).double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalizes", [False, True])
def test_route_backward_is_autograd(dtype: torch.dtype, normalizes: bool) -> None:
    logits, grad = random(9, 6, dtype=dtype), random(9, 3)
    chosen, _ = blocks.route(logits, 3, normalizes=normalizes)
    (leaf,) = leaves(logits)
    weights = leaf.softmax(-1).gather(1, chosen.long())
    (weights / weights.sum(-1, keepdim=True) if normalizes else weights).backward(grad.double())
    near(blocks.route_backward(logits, chosen, grad, normalizes=normalizes), leaf.grad)


def test_group_sorts_visits_by_expert() -> None:
    order, places, ends = blocks.group(torch.tensor([[3, 1], [1, 0], [3, 0]]), 5)
    assert order.tolist() == [3, 5, 1, 2, 0, 4]
    assert places.tolist() == [[4, 2], [3, 0], [5, 1]]
    assert ends.tolist() == [2, 4, 4, 6, 6]


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_weighted_activations(kind) -> None:
    gate_up, grad, weights = torch.randn(6, 10), torch.randn(6, 5), torch.rand(6)
    leaves = [one.double().requires_grad_() for one in (gate_up, weights)]
    product = blocks.activate(leaves[0], kind)
    (product * leaves[1][:, None]).backward(grad.double())
    found = blocks.activate_weighted_backward(gate_up, over := grad.clone(), weights, kind)
    assert found[0] is over
    assert found[1] is gate_up
    near(found[0], (product * leaves[1][:, None]).detach())
    near(found[1], leaves[0].grad)
    near(found[2], leaves[1].grad)


def test_a_cpu_needs_no_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; import ebbtide.model.block_functions"
    subprocess.run([sys.executable, "-c", code], check=True)
