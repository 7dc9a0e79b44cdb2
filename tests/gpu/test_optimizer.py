"""The optimizer on a real GPU: its kernel against float64, streams and hooks against plain order, and the same bits
through the link as on the device."""

from pathlib import Path

import pytest
import torch
from torch import nn

from ebbtide.config.memory import MemoryConfig
from ebbtide.config.optimizer import OptimizerConfig
from ebbtide.memory.host import pci_address
from ebbtide.optim import on_cpu, on_device, streamed
from ebbtide.optim import rule as plain
from ebbtide.optim.layout import ALIGNMENT, Segment
from ebbtide.optim.rule import AdamWState, Rule, StepArgs, join_master, noise_bits
from toy import MODES, error, in_double, same, trained

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch) -> None:
    for module in (on_device, streamed, on_cpu):
        monkeypatch.setattr(module, "CHUNK", 256)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def update_there(weight: torch.Tensor, grad: torch.Tensor, state: AdamWState, rule: Rule, start: int) -> None:
    """The kernel on one stretch."""
    from ebbtide.optim.gpu_kernels import build_chunk_steps

    (step,) = build_chunk_steps([[StepArgs(Segment(0, 0, len(weight)), weight, grad, start, rule)]])
    step(state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state", ["float32", "bfloat16", "bfloat16_stochastic"])
def test_streamed_is_the_device_to_the_bit(dtype, state) -> None:
    assert same(*(trained(dtype, place=place, state_dtype=state, device=CUDA) for place in ("device", "streamed")))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("grads", ["auto", "float32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_overlap_changes_no_bit(mode, grads, dtype) -> None:
    assert same(
        *(trained(dtype, overlap=overlap, grad_dtype=grads, device=CUDA, **MODES[mode]) for overlap in (True, False))
    )


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_as_near_to_float64_as_the_device(mode) -> None:
    truth = in_double()
    mine, device = error(trained(device=CUDA, **MODES[mode])[0], truth), error(trained(device=CUDA)[0], truth)
    assert device < 1e-4
    assert mine < 2 * device


@pytest.mark.parametrize("mode", MODES)
def test_no_plan_changes_a_bit(mode) -> None:
    assert same(
        *(
            trained(torch.bfloat16, memory=MemoryConfig(preset=preset), device=CUDA, **MODES[mode])
            for preset in ("keep", "lean")
        )
    )


def test_the_kernel_is_the_rule_in_plain_torch() -> None:
    """Every kind of moments, against the same function on the CPU."""
    generator = torch.Generator().manual_seed(0)
    for kind in ("float32", "bfloat16", "bfloat16_stochastic"):
        moments = torch.float32 if kind == "float32" else torch.bfloat16
        rule = Rule(OptimizerConfig(state_dtype=kind), 1e-2, decay=0.1, step=3, scale=0.5, parameter=4)
        master = torch.randn(5003, generator=generator)
        weight, low = master.bfloat16(), torch.zeros(5003, dtype=torch.int16)
        grad = torch.randn(5003, generator=generator).bfloat16()
        first, second = (
            torch.randn(5003, generator=generator).to(moments),
            torch.rand(5003, generator=generator).to(moments),
        )
        here = [tensor.clone() for tensor in (weight, grad, low, first, second)]
        there = [tensor.cuda() for tensor in here]
        for update, (weight, grad, low, first, second) in ((plain.update, here), (update_there, there)):
            update(weight, grad, AdamWState(low, first, second), rule, 11)
        mine = join_master(*(there[place] for place in (0, 2, 4))).cpu()
        torch.testing.assert_close(mine, join_master(*(here[place] for place in (0, 2, 4))), rtol=2e-6, atol=1e-7)
        for place in (3, 4):
            differ = (here[place].float().abs() - there[place].float().cpu().abs()).abs() > 2e-6 * here[
                place
            ].float().abs() + 1e-7
            assert differ.float().mean() <= 0.002


def test_a_chunk_at_once_is_its_stretches_one_by_one() -> None:
    """Of all sizes, at places of all kinds, each by its own rule; to the bit."""
    from ebbtide.optim.gpu_kernels import build_chunk_steps

    generator = torch.Generator().manual_seed(1)
    # kernels read the first by vectors
    for sizes, start in (((128, 4096, 16, 70_000, 1024), 32), ((1, 4096, 5003, 1025, 7), 3)):
        ends = []
        for together in (True, False):
            generator.manual_seed(2)
            chunk, offset = [], 0
            for number, size in enumerate(sizes):
                weight, grad = (torch.randn(size + start, generator=generator).bfloat16().cuda() for _ in range(2))
                rule = Rule(
                    OptimizerConfig(state_dtype="bfloat16_stochastic"), 1e-2, 0.1 * number, 1 + number, 0.5, number
                )
                chunk.append(StepArgs(Segment(number, start, start + size, offset), weight, grad, 7, rule))
                offset += -(-size // ALIGNMENT) * ALIGNMENT
            moments = torch.zeros(2, offset, dtype=torch.bfloat16, device="cuda")
            state = AdamWState(torch.zeros(offset, dtype=torch.int16, device="cuda"), *moments)
            for step in build_chunk_steps([chunk] if together else [[stretch] for stretch in chunk]):
                step(state)
            ends.append([state.low, moments, *(stretch.weight for stretch in chunk)])
        assert all(torch.equal(*pair) for pair in zip(*ends, strict=True))
        assert all(moment.count_nonzero() > 0.9 * sum(sizes) for moment in moments)


def test_narrow_weights_are_wide_ones_rounded() -> None:
    ends = []
    for dtype in (torch.bfloat16, torch.float32):
        generator = torch.Generator().manual_seed(3)
        weight = nn.Parameter(torch.randn(1_000_003, generator=generator).bfloat16().to(dtype).cuda())
        low = torch.zeros(1_000_003, dtype=torch.int16, device="cuda") if dtype == torch.bfloat16 else None
        state = AdamWState(low, torch.zeros(1_000_003, device="cuda"), torch.zeros(1_000_003, device="cuda"))
        for step in range(1, 21):
            grad = torch.randn(1_000_003, generator=generator).bfloat16().to(dtype).cuda()
            update_there(weight.detach(), grad, state, Rule(OptimizerConfig(), 1e-3, 0.1, step, 1.0), 0)
        ends.append((weight.detach(), state))
    (narrow, state), (wide, other) = ends
    assert torch.equal(join_master(narrow, state.low, state.second), wide)
    assert torch.equal(narrow, wide.bfloat16())
    assert torch.equal(state.first, other.first)
    assert torch.equal(state.second.abs(), other.second)
    assert state.second.signbit().any()  # some master did lie in the middle


def test_the_noise_is_the_same_on_both_devices() -> None:
    """A moment of exactly one bit above a bfloat16 rounds up where the noise says so: the kernel's noise is
    rule.py's."""
    config = OptimizerConfig(state_dtype="bfloat16_stochastic", betas=[0.5, 0.5])
    rule = Rule(config, 1e-2, 0.0, 1, 1.0, parameter=3)
    value = 1.0 + 2**-8  # half-way
    first, second = (
        torch.zeros(4096, dtype=torch.bfloat16, device="cuda"),
        torch.zeros(4096, dtype=torch.bfloat16, device="cuda"),
    )
    weight, grad = torch.zeros(4096, device="cuda"), torch.full((4096,), 2 * value, device="cuda")
    update_there(weight, grad, AdamWState(None, first, second), rule, 1000)
    up = (noise_bits(4096, 1000, rule.key) & 0xFFFF) >= 0x8000
    assert torch.equal(first.cpu() > 1.0, up)


def test_the_gpu_is_where_the_system_says() -> None:
    assert (Path("/sys/bus/pci/devices") / pci_address(CUDA)).exists()
