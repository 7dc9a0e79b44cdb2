"""Fused blocks on the GPU: as close to float32 as transformers' own, and the same bits under every choice."""

import random
from dataclasses import replace

import pytest
import torch

from blocks import Setup, errors_in_bfloat16
from conftest import FAMILIES, family
from ebbtide.config.loss import LossConfig
from ebbtide.memory.residency import Residency
from ebbtide.model.attention_kind import AttentionKind
from ebbtide.model.load import load_model
from ebbtide.model.shape import find_shape
from ebbtide.model.workload import max_workload
from ebbtide.planner.holdings import plan_holdings
from ebbtide.planner.predict import Predictor
from ebbtide.policy.attention import packed_attention
from ebbtide.policy.datum import trajectory
from ebbtide.policy.fuse import saved_names
from ebbtide.policy.losses import build_loss
from ebbtide.policy.packed_attention import PackedAttention
from ebbtide.policy.policy import Policy
from ebbtide.progress import no_progress
from ebbtide.system.machine import machine_for
from ebbtide.system.torch_internals import grouped_mm

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
SIZES = {"rollout.max_new_tokens": 80, "rollout.max_prompt_tokens": 60}


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def setup(name: str, dtype: str, *, fused: bool) -> Setup:
    return Setup(name, dtype, "cuda", size=8, fused=fused, **SIZES)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_further_from_float32_than_transformers_own_blocks(name) -> None:
    own, fused = errors_in_bfloat16(name, "cuda", size=8, **SIZES)
    assert fused.mean() <= 1.05 * own.mean()
    assert fused.max(1).values.mean() <= 1.1 * own.max(1).values.mean()


@pytest.mark.parametrize("name", ["qwen3", "gemma", "qwen3_moe"])
def test_any_choice_gives_the_same_bits(name, deterministic) -> None:
    one, generator = setup(name, "bfloat16", fused=True), random.Random(0)
    names = saved_names(one.blocks[0])
    for _ in range(8):
        places = {each: generator.choice(["keep", "offload", "recompute"]) for each in names if each != "block_input"}
        places["block_input"] = generator.choice(["keep", "offload"])
        chosen = {wanted: [each for each in names if places[each] == wanted] for wanted in ("offload", "recompute")}
        one.with_choice(**chosen, recompute_blocks=generator.choice([None, 1, 3]), room=2**26)


@pytest.mark.parametrize("window", [None, 5])
def test_attention_is_that_of_the_packed_function(window, deterministic) -> None:
    starts = torch.tensor([0, 1, 38, 338, 402], dtype=torch.int32, device="cuda")
    query = torch.randn(402, 8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    key, value = (torch.randn(402, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    given = [one.transpose(0, 1)[None] for one in (query, key, value)]
    wanted, _ = packed_attention(
        torch.nn.Identity(), *given, None, scaling=0.1, sliding_window=window, cu_seq_lens_q=starts, max_length_q=300
    )
    grad = torch.randn_like(wanted)
    attention = PackedAttention(starts, 300, 0.1, AttentionKind(window))
    with torch.no_grad():
        mixed, sums = attention.forward(query, key, value)
        found = attention.backward(grad[0], query, key, value, mixed, sums)
    assert torch.equal(mixed, wanted[0])
    for ours, theirs in zip(found, torch.autograd.grad(wanted, (query, key, value), grad), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("preset", ["keep", "recompute", "offload"])
@pytest.mark.parametrize(
    ("name", "more"),
    [("qwen3", {}), ("qwen3_moe", {}), ("qwen3_moe", {"mlp": 256, "experts": 16, "experts_per_token": 8})],
)
def test_the_peak_is_what_was_predicted(tiny, name, more, preset) -> None:
    sizes = {"hidden": 512, "heads": 8, "kv_heads": 4, "head_dim": 64, "mlp": 1024, "layers": 6, "context": 1024}
    sizes |= more
    config = tiny(
        {
            **family(name),
            **{f"model.scratch.{key}": value for key, value in sizes.items()},
            "device": "cuda",
            "model.dtype": "bfloat16",
            "rollout.max_prompt_tokens": 256,
            "rollout.max_new_tokens": 256,
            "train.microbatch_tokens": 8192,
            "memory.activations.preset": preset,
        }
    )
    policy = Policy(load_model(config), config)
    policy.fuse_blocks()
    sequences = [trajectory([1] * 256, [2] * 256, [-1.0] * 256, advantage=1.0, weight=1e-3) for _ in range(48)]
    with Residency(plan_holdings(config), policy.device) as residency:
        policy.place_activations(residency, {})
        policy.forward_backward(sequences, build_loss(LossConfig()), no_progress)  # what kernels need once
        policy.model.zero_grad()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        policy.forward_backward(sequences, build_loss(LossConfig()), no_progress)
    predictor = Predictor(find_shape(config.model), machine_for("h200", None, 125, None))
    work = replace(max_workload(config), prompts=48, samples=1)
    device = predictor.predict(config, work, 2**40).phases["train"].device
    predicted = sum(device[name] for name in ("grads", "activations", "logits"))
    assert torch.cuda.max_memory_allocated() - base == pytest.approx(predicted, rel=0.1)


def test_experts_without_tokens_have_a_gradient_of_zero() -> None:
    rows, ends = 96, torch.tensor([0, 64, 64, 96], dtype=torch.int32, device="cuda")
    left = torch.randn(rows, 32, device="cuda", dtype=torch.bfloat16)
    right = torch.randn(rows, 64, device="cuda", dtype=torch.bfloat16)
    torch.full((4, 32, 64), float("nan"), device="cuda", dtype=torch.bfloat16)  # what the result's memory may have had
    found = grouped_mm(left.t(), right, ends)
    assert found.shape == (4, 32, 64)
    for group, (first, last) in enumerate(((0, 0), (0, 64), (64, 64), (64, 96))):
        wanted = left[first:last].t().float() @ right[first:last].float()
        torch.testing.assert_close(found[group].float(), wanted, rtol=2e-2, atol=2e-2)
