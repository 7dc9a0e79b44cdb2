"""AdamW against the formula in float64; masters, clipping, decay, skipping, schedule."""

import math

import pytest
import torch
from torch import nn

from ebbtide.config.memory import MemoryConfig
from ebbtide.config.optimizer import OptimizerConfig
from ebbtide.memory.residency import Residency
from ebbtide.optim.adamw import AdamW
from ebbtide.optim.schedule import learning_rate
from plans import plan_of


def parameters(dtype=torch.float32) -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {
        "matrix": nn.Parameter(torch.randn(5, 3).to(dtype)),
        "norm": nn.Parameter(torch.randn(7).to(dtype)),
        "frozen": nn.Parameter(torch.randn(4).to(dtype), requires_grad=False),
        "unused": nn.Parameter(torch.randn(2, 2).to(dtype)),
    }


def optimizer_for(named, config: OptimizerConfig) -> AdamW:
    return AdamW(named, config, Residency(plan_of(MemoryConfig()), torch.device("cpu")))


def in_double(weights, gradients, config, lrs):
    """AdamW from its paper, with the gradient's global norm clipped."""
    values = {name: weight.detach().double() for name, weight in weights.items() if name in gradients[0]}
    first = {name: torch.zeros_like(value) for name, value in values.items()}
    second = {name: torch.zeros_like(value) for name, value in values.items()}
    norms = []
    for step, (grads, lr) in enumerate(zip(gradients, lrs, strict=True), start=1):
        norm = math.sqrt(sum(grad.double().square().sum().item() for grad in grads.values()))
        norms.append(norm)
        clip = min(1.0, config.clip_norm / (norm + 1e-6)) if config.clip_norm else 1.0
        for name, value in values.items():
            grad = grads[name].double() * clip
            first[name] = config.betas[0] * first[name] + (1 - config.betas[0]) * grad
            second[name] = config.betas[1] * second[name] + (1 - config.betas[1]) * grad.square()
            hat1, hat2 = first[name] / (1 - config.betas[0] ** step), second[name] / (1 - config.betas[1] ** step)
            decay = config.weight_decay if value.ndim >= 2 else 0.0
            values[name] = value * (1 - lr * decay) - lr * hat1 / (hat2.sqrt() + config.eps)
    return values, norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_twenty_steps_equal_the_formula(dtype, clip) -> None:
    config = OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_norm=clip)
    weights = parameters(dtype)
    generator = torch.Generator().manual_seed(1)
    gradients = [
        {name: torch.randn(weights[name].shape, generator=generator).to(dtype) for name in ("matrix", "norm")}
        for _ in range(20)
    ]
    lrs = [1e-2 * (0.9**step) for step in range(20)]
    wanted, norms = in_double(weights, gradients, config, lrs)
    before = {name: weights[name].detach().clone() for name in ("frozen", "unused")}
    addresses = {name: weight.data_ptr() for name, weight in weights.items()}
    optimizer = optimizer_for(weights.items(), config)
    for grads, lr, norm in zip(gradients, lrs, norms, strict=True):
        for name, grad in grads.items():
            weights[name].grad = grad.clone()
        figures = optimizer.step(lr)
        assert figures["grad_norm"] == pytest.approx(norm, rel=1e-2 if dtype == torch.bfloat16 else 1e-5)
        assert all(weight.grad is None for weight in weights.values())
    for name, value in wanted.items():
        # The 16-bit weight is its fp32 master rounded once: without a master the small steps would be lost.
        loose = {"rtol": 2**-8, "atol": 2e-3} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(weights[name].detach().double(), value, **loose)
    assert all(torch.equal(weights[name], value) for name, value in before.items())
    assert {name: weight.data_ptr() for name, weight in weights.items()} == addresses


def test_small_steps_are_not_lost_in_bfloat16() -> None:
    weight = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    optimizer = optimizer_for([("w", weight)], OptimizerConfig(lr=1e-4, clip_norm=None))
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step(1e-4)
    assert weight.float().mean().item() == pytest.approx(0.99, abs=2e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad) -> None:
    weights = parameters()
    optimizer = optimizer_for(weights.items(), OptimizerConfig())
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    weights["matrix"].grad = torch.full_like(weights["matrix"], bad)
    weights["norm"].grad = torch.ones_like(weights["norm"])
    assert optimizer.step(1e-3)["updates_skipped"] == 1
    assert all(torch.equal(weights[name], value) for name, value in before.items())
    weights["norm"].grad = torch.ones_like(weights["norm"])
    assert optimizer.step(1e-3)["updates_skipped"] == 0
    assert torch.isfinite(weights["norm"]).all()
    assert not torch.equal(weights["norm"], before["norm"])


def test_schedules() -> None:
    def all_steps(**options):
        return [learning_rate(OptimizerConfig(lr=1.0, **options), step, 11) for step in range(11)]

    assert all_steps() == [1.0] * 11
    assert all_steps(warmup_steps=3)[:4] == [0.25, 0.5, 0.75, 1.0]
    line = all_steps(schedule="linear")
    assert line == pytest.approx([1 - step / 10 for step in range(11)])
    curve = all_steps(schedule="cosine", final_lr_fraction=0.1)
    assert curve[0] == 1.0
    assert curve[5] == pytest.approx(0.55)
    assert curve[10] == pytest.approx(0.1)
    assert all_steps(schedule="linear", warmup_steps=11)[-1] == pytest.approx(11 / 12)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_floors_of_the_learning_rate_are_those_of_megatron_and_verl(schedule) -> None:
    """Megatron: min_lr + coefficient * (lr - min_lr); verl, for a cosine: lr * (cos * (1 - m) / 2 + (1 + m) / 2), with
    the ratio m = min_lr / lr. Both count progress from 0 at the end of the warm-up to 1."""
    lr, floor, warmup, steps = 3e-6, 5e-7, 4, 25
    by_value = OptimizerConfig(lr=lr, min_lr=floor, schedule=schedule, warmup_steps=warmup)
    by_ratio = OptimizerConfig(lr=lr, final_lr_fraction=floor / lr, schedule=schedule, warmup_steps=warmup)
    for step in range(warmup, steps):
        progress = (step - warmup) / (steps - 1 - warmup)
        cosine, ratio = math.cos(math.pi * progress), floor / lr
        megatron = floor + (1 - progress if schedule == "linear" else 0.5 * (cosine + 1)) * (lr - floor)
        assert learning_rate(by_value, step, steps) == pytest.approx(megatron, rel=1e-12)
        assert learning_rate(by_ratio, step, steps) == pytest.approx(megatron, rel=1e-12)
        if schedule == "cosine":
            verl = lr * max(ratio, cosine * (1 - ratio) / 2 + (1 + ratio) / 2)
            assert learning_rate(by_value, step, steps) == pytest.approx(verl, rel=1e-12)
    assert learning_rate(by_value, steps - 1, steps) == floor
