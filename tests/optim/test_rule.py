"""The rule: halves of a master, stochastic rounding, and the compiled arithmetic against torch's."""

import itertools
import os

import pytest
import torch

from ebbtide.config.optimizer import OptimizerConfig
from ebbtide.optim import cpu_kernels
from ebbtide.optim.rule import AdamWState, Rule, join_master, noise_bits, round_stochastic, split_master, update


def test_two_halves_and_a_sign_are_the_master_for_every_pattern() -> None:
    lower = torch.arange(2**16, dtype=torch.int32)
    for upper in (0x0000, 0x0001, 0x3F80, 0x3F81, 0x7F7E, 0x7F7F, -0x8000, -0x7FFF, -0x4080, -0x407F, -0x81):
        master = ((upper << 16) | lower).view(torch.float32)
        second = torch.linspace(0, 1, len(master))
        weight, low = torch.empty(len(master), dtype=torch.bfloat16), torch.empty(len(master), dtype=torch.int16)
        signed = split_master(master, weight, low, second)
        assert torch.equal(weight, master.bfloat16())
        assert torch.equal(join_master(weight, low, signed).view(torch.int32), master.view(torch.int32))
        assert torch.equal(signed.abs(), second)


def test_the_middle_needs_the_sign() -> None:
    # rounded down to 3F80, up to 3F82
    masters = torch.tensor([0x3F808000, 0x3F818000], dtype=torch.int32).view(torch.float32)
    weight, low = torch.empty(2, dtype=torch.bfloat16), torch.empty(2, dtype=torch.int16)
    signed = split_master(masters, weight, low, torch.zeros(2))
    assert signed.signbit().tolist() == [False, True]  # minus zero as well
    assert torch.equal(join_master(weight, low, signed), masters)


def test_stochastic_rounding_is_right_on_average_and_depends_on_the_place_alone() -> None:
    value = torch.full((20_000,), 1.0 + 2**-9)  # a quarter of the way to the next bfloat16
    bits = noise_bits(len(value), 0, key=5)
    found = round_stochastic(value, bits & 0xFFFF).float()
    assert set(found.tolist()) == {1.0, 1.0 + 2**-7}
    assert found.mean().item() == pytest.approx(1.0 + 2**-9, abs=2e-4)
    other = round_stochastic(value, bits >> 16).float()
    assert not torch.equal(found, other)
    assert torch.equal(noise_bits(100, 50, 5), bits[50:150])
    assert not torch.equal(noise_bits(100, 50, 6), bits[50:150])
    exact = torch.tensor([1.0, -2.0, 0.0]).repeat(100)
    assert torch.equal(round_stochastic(exact, noise_bits(300, 0, 1) & 0xFFFF).float(), exact)


def test_every_step_and_parameter_has_noise_of_its_own() -> None:
    def key(**changed) -> int:
        return Rule(
            OptimizerConfig(), **{"lr": 1e-3, "decay": 0.0, "step": 5, "scale": 1.0, "parameter": 2, **changed}
        ).key

    keys = {key(step=step, parameter=parameter) for step in range(50) for parameter in range(50)}
    assert len(keys) == 2500
    assert not torch.equal(noise_bits(100, 1, key()), noise_bits(100, 0, key(parameter=3)))
    assert not torch.equal(noise_bits(100, 1, key()), noise_bits(100, 0, key(step=6)))


def tensors(size: int, state: torch.dtype, grads: torch.dtype):
    generator = torch.Generator().manual_seed(0)

    def random(dtype):
        return torch.randn(size, generator=generator).to(dtype)

    return random(torch.float32), random(grads), random(state), random(state).abs()


compiled = cpu_kernels.cpu_math(2)


def added(math, total, part=None, *, first=False) -> float:
    (squares,) = math.add([cpu_kernels.CpuAddArgs(total, part, first)])()
    return squares


@pytest.mark.skipif(not compiled.compiled, reason="no C compiler")
@pytest.mark.parametrize("grads", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state", ["float32", "bfloat16", "bfloat16_stochastic"])
def test_compiled_and_torch_steps_agree(grads, state) -> None:
    rule = Rule(OptimizerConfig(state_dtype=state), 1e-2, decay=0.1, step=3, scale=0.5, parameter=2)
    kind = torch.float32 if state == "float32" else torch.bfloat16
    ends = []
    for math in (compiled, cpu_kernels.TorchMath()):
        master, grad, first, second = tensors(1003, kind, grads)
        weight = torch.empty(1003, dtype=grads)
        math.step([cpu_kernels.CpuStepArgs(master, grad, first, second, weight, rule, 17)])()
        assert torch.equal(weight, master.to(grads))
        ends.append((master, first, second))
    for mine, theirs in zip(*ends, strict=True):
        # Stochastic roundings agree too, but where the last bit of fp32 decides.
        assert ((mine.float() - theirs.float()).abs() > 2e-6 * theirs.float().abs() + 1e-7).float().mean() <= 0.002


@pytest.mark.skipif(not compiled.compiled, reason="no C compiler")
@pytest.mark.parametrize(
    ("total", "part"),
    [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)],
)
def test_compiled_sums_are_torchs_to_the_bit(total, part) -> None:
    for first in (True, False):
        sums = []
        for math in (compiled, cpu_kernels.TorchMath()):
            generator = torch.Generator().manual_seed(2)
            into, more = (
                torch.randn(5001, generator=generator).to(total),
                torch.randn(5001, generator=generator).to(part),
            )
            more[7], more[8] = torch.inf, torch.nan
            added(math, into, more, first=first)
            sums.append(into)
        assert torch.equal(*(one.nan_to_num(nan=-77.0) for one in sums))
    into, clean = torch.zeros(9001).to(total), torch.randn(9001).to(part)
    for first in (True, False):
        assert added(compiled, into, clean, first=first) == added(compiled, into)
        assert added(cpu_kernels.TorchMath(), into, clean, first=first) == pytest.approx(
            into.double().square().sum().item(), rel=1e-6
        )
    wanted = clean.double().square().sum().item()
    assert added(compiled, clean) == pytest.approx(wanted, rel=1e-6)
    assert added(cpu_kernels.TorchMath(), clean) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.skipif(not compiled.compiled, reason="no C compiler")
def test_many_threads_give_the_bits_of_one() -> None:
    rule = Rule(OptimizerConfig(state_dtype="bfloat16_stochastic"), 1e-2, decay=0.1, step=3, scale=0.5, parameter=2)
    ends = []
    for threads in (1, 5):
        math = cpu_kernels.cpu_math(threads)
        found = []
        stretches = []
        for size in (0, 1, 65_536, 0, 65_537, 300_001, 70_000, 1_000_003):
            master, grad, first, second = tensors(size, torch.bfloat16, torch.bfloat16)
            found.append(torch.tensor([added(math, grad, first), added(math, grad)]))
            stretches.append(
                cpu_kernels.CpuStepArgs(master, grad, first, second, torch.empty(size, dtype=torch.bfloat16), rule, 17)
            )
            if threads == 1:
                math.step(stretches[-1:])()
        if threads > 1:
            math.step(stretches)()
        found.append(torch.tensor(math.add([cpu_kernels.CpuAddArgs(stretch.grad, None) for stretch in stretches])()))
        ends.append(found + [tensor for stretch in stretches for tensor in stretch[:5]])
    assert all(torch.equal(*pair) for pair in zip(*ends, strict=True))


@pytest.mark.skipif(not compiled.compiled, reason="no C compiler")
def test_a_fork_without_the_threads_does_the_same() -> None:
    grad = torch.ones(300_001)
    child = os.fork()
    if child == 0:
        os._exit(0 if added(compiled, grad) == 300_001 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_no_compiler_is_no_error(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cpu_kernels._compile.__wrapped__() is None
    monkeypatch.setattr(cpu_kernels, "_compile", cpu_kernels._compile.__wrapped__)
    assert isinstance(cpu_kernels.cpu_math(2), cpu_kernels.TorchMath)


@pytest.mark.skipif(not compiled.compiled, reason="no C compiler")
def test_a_cache_folder_that_cannot_be_written_to_is_no_error(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    access = os.access
    monkeypatch.setattr(
        cpu_kernels.os, "access", lambda path, mode, **more: mode != os.W_OK and access(path, mode, **more)
    )
    library = cpu_kernels._compile.__wrapped__()
    assert library is not None
    assert tmp_path not in library.parents


def test_a_broken_compiler_is_no_error(monkeypatch, tmp_path) -> None:
    false = tmp_path / "cc"
    false.write_text("#!/bin/sh\nexit 1\n")
    false.chmod(0o755)
    monkeypatch.setenv("CC", str(false))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cpu_kernels._compile.__wrapped__() is None


def test_an_update_in_stretches_is_the_update_of_the_whole() -> None:
    rule = Rule(OptimizerConfig(state_dtype="bfloat16_stochastic"), 1e-2, decay=0.1, step=3, scale=0.5)
    ends = []
    for cuts in ([0, 1000], [0, 128, 640, 1000]):
        _, grad, first, second = tensors(1000, torch.bfloat16, torch.bfloat16)
        weight, low = (
            torch.randn(1000, generator=torch.Generator().manual_seed(9)).bfloat16(),
            torch.zeros(1000, dtype=torch.int16),
        )
        state = AdamWState(low, first, second)
        for start, stop in itertools.pairwise(cuts):
            update(weight[start:stop], grad[start:stop], state.part(start, stop), rule, start)
        ends.append((weight, low, first, second))
    for mine, theirs in zip(*ends, strict=True):
        assert torch.equal(mine, theirs)
