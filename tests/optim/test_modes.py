"""The optimizer on the device, streamed, on the CPU and split: the same bits or the same accuracy, whatever the
overlap, types and chunks."""

import gc
import math
import weakref
from collections import deque
from concurrent.futures import Future

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ebbtide.config.memory import MemoryConfig
from ebbtide.config.optimizer import OptimizerConfig
from ebbtide.errors import UserError
from ebbtide.memory.mover import Mover
from ebbtide.memory.residency import Residency
from ebbtide.optim import costs, cpu_kernels, on_cpu, on_device, streamed
from ebbtide.optim.adamw import AdamW
from ebbtide.optim.costs import state_bytes
from ebbtide.optim.grad_accumulator import Ring
from ebbtide.optim.rule import join_master
from plans import plan_of
from toy import CPU, MODES, ON_CPU, Toy, error, in_double, same, state_of, trained


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch) -> None:
    """So that a toy's parameters lie in many chunks, and its matrices in several."""
    for module in (on_device, streamed, on_cpu):
        monkeypatch.setattr(module, "CHUNK", 256)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state", ["float32", "bfloat16", "bfloat16_stochastic"])
def test_streamed_is_the_device_to_the_bit(dtype, state) -> None:
    on, through = (trained(dtype, place=place, state_dtype=state) for place in ("device", "streamed"))
    assert same(on, through)
    start = Toy(dtype)
    changed = {key for key, value in on[0].state_dict().items() if not torch.equal(value, start.state_dict()[key])}
    assert changed == {name for name in start.state_dict() if "frozen" not in name and "unused" not in name}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("grads", ["auto", "float32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_overlap_changes_no_bit(mode, grads, dtype) -> None:
    """Also: gradients that leave during the backward and add up on the host are those that add up on the device."""
    assert same(*(trained(dtype, overlap=overlap, grad_dtype=grads, **MODES[mode]) for overlap in (True, False)))


def test_small_gradients_go_together_and_no_later_one_overtakes(monkeypatch) -> None:
    """All of the toy's fit into one batch, which one micro-batch does not fill."""
    monkeypatch.setattr(on_cpu, "CHUNK", 2**20)
    assert same(*(trained(torch.bfloat16, place="cpu", overlap=overlap) for overlap in (True, False)))


def test_a_parameter_without_a_gradient_in_some_micro_batches_and_gradients_that_are_let_go(monkeypatch) -> None:
    """The sums are of what came, and of nothing that came before."""
    monkeypatch.setattr(on_cpu, "CHUNK", 2**20)
    ends = []
    for overlap in (True, False):
        model, _, optimizer, _ = trained(steps=0, place="cpu", overlap=overlap)
        model(torch.arange(8)).square().mean().backward()
        optimizer.discard_grads()
        for part in (model.last.weight, model.hidden.weight, model.last.weight):
            (part.square().sum() * 0.1).backward()
        figures = optimizer.step(1e-2)
        ends.append((model, figures))
    (mine, figures), (other, others) = ends
    start = Toy(torch.float32)
    assert figures == others
    assert figures["grad_norm"] == pytest.approx(
        math.hypot(0.4 * start.last.weight.norm().item(), 0.2 * start.hidden.weight.norm().item()), rel=1e-5
    )
    assert all(torch.equal(*pair) for pair in zip(mine.parameters(), other.parameters(), strict=True))


def test_gradients_of_the_cpu_part_do_not_stay_on_the_device() -> None:
    config = OptimizerConfig(place="cpu")
    residency = Residency(plan_of(MemoryConfig(), config), CPU)
    model = Toy(torch.bfloat16)
    optimizer = AdamW(model.named_parameters(), config, residency)
    for _ in range(2):
        model(torch.arange(8)).float().square().mean().backward()
        assert residency.holdings()["grads"].device == 0
        assert not optimizer._backends[0]._accumulator.waiting  # nor does one wait there for the next backward
    assert residency.holdings()["grads"].host > 0
    assert optimizer.step(1e-3)["grad_norm"] > 0


@pytest.fixture(scope="module")
def truth():
    return in_double()


@pytest.mark.parametrize("options", [*MODES.values(), *({"cpu_fraction": k / 8} for k in range(9))], ids=str)
def test_every_mode_is_as_near_to_float64_as_the_device(options, truth) -> None:
    mine, device = error(trained(**options)[0], truth), error(trained()[0], truth)
    assert device < 1e-4  # against weights of size 1 and steps of 1e-2
    assert mine < 1.05 * device


@pytest.mark.parametrize("mode", MODES)
def test_bfloat16_moments_are_near_and_not_exact(mode, truth) -> None:
    exact = trained(**MODES[mode])[0]
    for kind in ("bfloat16", "bfloat16_stochastic"):
        near = trained(state_dtype=kind, **MODES[mode])[0]
        assert 1e-5 < error(near, exact.state_dict()) < 0.3


@pytest.mark.parametrize("mode", MODES)
def test_narrow_weights_are_wide_ones_rounded(mode) -> None:
    """The master of a bfloat16 weight, wherever it is and however it is stored, is what fp32 weights would be with
    the same gradients."""
    config = OptimizerConfig(weight_decay=0.1, clip_norm=0.5, lr=1e-2, **MODES[mode])
    ends = []
    for dtype in (torch.bfloat16, torch.float32):
        residency = Residency(plan_of(MemoryConfig(), config), CPU)
        generator = torch.Generator().manual_seed(3)
        named = {
            name: nn.Parameter(torch.randn(size, generator=generator).bfloat16().to(dtype))
            for name, size in (("a", 301), ("b", 700))
        }
        optimizer = AdamW(named.items(), config, residency)
        for _ in range(50):
            for weight in named.values():
                weight.grad = torch.randn(weight.shape, generator=generator).bfloat16().to(dtype)
            optimizer.step(1e-2)
        ends.append(named)
    narrow, wide = ends
    for name, weight in narrow.items():
        assert torch.equal(weight.detach(), wide[name].detach().bfloat16())
        assert not torch.equal(weight.detach().float(), wide[name].detach())


def test_the_low_half_with_the_weight_is_the_master_to_the_bit() -> None:
    _, residency, optimizer, _ = trained(torch.bfloat16)
    (part,) = optimizer._backends
    wide = trained(torch.float32, steps=0)[2]
    assert wide._backends[0]._chunks[0][1].low is None
    for chunk, state in part._chunks:
        for segment in chunk.segments:
            stretch = slice(segment.offset, segment.offset + segment.size)
            weight = optimizer._trained[segment.parameter].flat[segment.start : segment.stop]
            master = join_master(weight, state.low[stretch], state.second[stretch])
            assert torch.equal(master.bfloat16(), weight)
    held = residency.holdings()
    assert held["moments"].device == 4 * held["master"].device  # 2 bytes of master beside 8 of moments


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(mode, bad) -> None:
    model, _, optimizer, _ = trained(steps=2, **MODES[mode])

    def state():
        return [weight.clone() for weight in model.parameters()], [one.steps for one in optimizer._trained]

    def give(name, value) -> None:
        weight = dict(model.named_parameters())[name]
        weight.grad = torch.full_like(weight, value)

    before = state()
    give("hidden.weight", 1.0)
    give("norm.bias", bad)
    give("last.weight", bad)
    figures = optimizer.step(1e-3)
    assert figures["updates_skipped"] == 1
    assert not math.isfinite(figures["grad_norm"])
    assert optimizer.skipped_for == "norm.bias"
    after = state()
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
    assert before[1] == after[1]
    give("norm.bias", 1.0)  # and the next one is as if nothing had been
    assert optimizer.step(1e-3)["updates_skipped"] == 0
    assert optimizer.skipped_for is None
    clean = trained(steps=2, **MODES[mode])
    dict(clean[0].named_parameters())["norm.bias"].grad = torch.ones(17)
    clean[2].step(1e-3)
    assert same((model, None, None, 0), (clean[0], None, None, 0))


def test_stop_and_ignore() -> None:
    model, _, optimizer, _ = trained(steps=1, check_for_nan_in_grad="stop")
    before = model.last.weight.detach().clone()
    model.last.weight.grad = torch.full_like(model.last.weight, math.nan)
    with pytest.raises(UserError, match=r"first in last\.weight.*check_for_nan_in_grad"):
        optimizer.step(1e-3)
    assert torch.equal(model.last.weight, before)
    model, _, optimizer, _ = trained(steps=1, check_for_nan_in_grad="ignore")
    for bad in (math.nan, math.inf):
        other = model.norm.bias.detach().clone()
        model.last.weight.grad = torch.full_like(model.last.weight, bad)
        model.norm.bias.grad = torch.ones_like(other)
        assert optimizer.step(1e-3)["updates_skipped"] == 0
        assert model.last.weight.isnan().all()
        assert 0 < (model.norm.bias - other).abs().max() < 2e-3  # the others are clipped and stepped as ever


@pytest.mark.parametrize("mode", MODES)
def test_no_plan_changes_a_bit_in_any_mode(mode) -> None:
    kept, moved = (
        trained(torch.bfloat16, memory=MemoryConfig(preset=preset), **MODES[mode]) for preset in ("keep", "lean")
    )
    assert same(kept, moved)
    on_host = OptimizerConfig(**MODES[mode]).is_state_on_host
    assert (moved[1].plan.place("generate", "moments") == "host") == on_host


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state", ["float32", "bfloat16"])
def test_the_bytes_foretold_are_the_bytes_held(mode, dtype, state, monkeypatch) -> None:
    for module in (on_device, streamed, on_cpu):
        monkeypatch.setattr(module, "CHUNK", 2**16)
    monkeypatch.setattr(costs, "CPU_CHUNK", 2**16)
    config = OptimizerConfig(state_dtype=state, **MODES[mode])
    residency = Residency(plan_of(MemoryConfig(), config), CPU)
    optimizer = AdamW(
        nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 300)).to(dtype).named_parameters(), config, residency
    )
    parameters = sum(one.weight.numel() for one in optimizer._trained)
    device, host = state_bytes(config, parameters, dtype.itemsize)
    for name in ("master", "moments", "grads"):
        held = residency.holdings().get(name, (0, 0))
        for foretold, size in ((device.get(name, 0), held[0]), (host.get(name, 0), held[1])):
            assert abs(size - foretold) <= 0.01 * foretold  # segments start on round places
    assert sum(host.values()) == pytest.approx(residency.host_bytes, rel=0.02)


@pytest.mark.parametrize("mode", ON_CPU)
@pytest.mark.parametrize("state", ["float32", "bfloat16", "bfloat16_stochastic"])
def test_without_a_compiler_it_works_as_well(mode, state, monkeypatch, truth) -> None:
    with_one = trained(state_dtype=state, **MODES[mode])
    monkeypatch.setattr(on_cpu, "cpu_math", lambda _: cpu_kernels.TorchMath())
    without = trained(state_dtype=state, **MODES[mode])
    if state == "float32":
        assert error(without[0], truth) < 2 * error(with_one[0], truth)
    else:
        assert error(without[0], with_one[0].state_dict()) < 0.05


@given(st.lists(st.integers(1, 8).map(lambda size: 128 * size), max_size=30))
def test_landing_memory_is_not_handed_out_while_it_is_used(sizes) -> None:
    pending: deque[tuple[int, int, Future[None]]] = deque()
    ring = Ring(torch.zeros(1024, dtype=torch.uint8), Mover(CPU))

    class Later(Future):
        """Over when it is waited for, and not before all that are older."""

        def result(self, timeout=None) -> None:
            assert pending.popleft()[2] is self

    for size in sizes:

        def settle(data: torch.Tensor, size=size) -> Future[None]:
            start, done = data.storage_offset(), Later()
            assert len(data) == size
            assert not any(start < stop and first < start + size for first, stop, _ in pending)
            pending.append((start, start + size, done))
            return done

        ring.lend(size, settle)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_changes_under_a_lease(mode) -> None:
    model, residency, optimizer, _ = trained(steps=1, **MODES[mode])
    residency.register("weights", list(model.parameters()))
    for name in ("weights", "moments"):
        model.last.weight.grad = torch.ones_like(model.last.weight)
        taken = optimizer.steps
        with residency.lease(name), pytest.raises(RuntimeError, match=f"{name} would wait for ever"):
            optimizer.step(1e-3)
        assert optimizer.steps == taken
        optimizer.discard_grads()


@pytest.mark.parametrize("mode", MODES)
def test_an_optimizer_is_freed_with_its_last_user(mode) -> None:
    model, residency, optimizer, _ = trained(steps=1, **MODES[mode])
    alive = weakref.ref(optimizer), weakref.ref(residency)
    gc.disable()
    try:
        del optimizer, residency
        assert [one() for one in alive] == [None, None]
    finally:
        gc.enable()
    assert model is not None


@pytest.mark.parametrize("mode", MODES)
def test_discarded_gradients_are_gone(mode) -> None:
    start, _, optimizer, _ = trained(steps=0, **MODES[mode])
    start(torch.arange(8)).sum().backward()
    optimizer.discard_grads()
    assert optimizer.step(1e-3)["grad_norm"] == 0
    assert all(torch.equal(a, b) for a, b in zip(start.parameters(), Toy(torch.float32).parameters(), strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_a_parameter_without_an_element_here(mode) -> None:
    """Of which other ranks have all. Its gradient may be a view of what others' are in."""
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(0, 3))])
    config = OptimizerConfig(**MODES[mode])
    with Residency(plan_of(MemoryConfig(preset="lean"), config), CPU) as residency:
        optimizer = AdamW(model.named_parameters(), config, residency)
        residency.pin()
        for _ in range(2):
            with residency.phase("train"):
                model[1].grad = torch.ones(100)[:0].view(0, 3)
                model[0].square().sum().backward()
            with residency.phase("step"):
                optimizer.step(1e-3)
            assert [parameter.grad for parameter in model] == [None, None]
            with residency.phase("generate"):
                model[1].grad = torch.ones(0, 3)
        optimizer.discard_grads()


def test_what_cannot_be_loaded_is_done_without(monkeypatch) -> None:
    def refused(_) -> None:
        raise OSError("failed to map segment from shared object")

    monkeypatch.setattr(cpu_kernels.ctypes, "CDLL", refused)
    assert isinstance(cpu_kernels.cpu_math(2), cpu_kernels.TorchMath)


def test_a_gradient_away_at_the_step_comes_back(monkeypatch) -> None:
    """An accumulation that another phase interrupts: the gradients leave and return, and after the step there are
    none."""
    ends = []
    for interrupted in (False, True):
        model, residency, optimizer, _ = trained(steps=0, memory=MemoryConfig(preset="lean"))
        for _ in range(2):
            model(torch.arange(8)).square().mean().backward()
            if interrupted:
                residency.enter("evaluate")
                assert residency.holdings()["grads"].host > 0
                residency.enter("train")
        if interrupted:
            residency.enter("evaluate")
        residency.enter("step")
        optimizer.step(1e-3)
        assert residency.holdings()["grads"] == (0, 0)
        ends.append(model.state_dict())
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])


@pytest.mark.parametrize("weight", [torch.ones(3, 4).half(), torch.ones(3, 4).T])
def test_weights_that_cannot_be_trained_are_refused(weight) -> None:
    with pytest.raises(ValueError, match="w is torch"):
        AdamW([("w", nn.Parameter(weight))], OptimizerConfig(), Residency(plan_of(MemoryConfig()), CPU))


def test_the_cpu_part_uses_the_cores_there_are(monkeypatch) -> None:
    monkeypatch.setattr(on_cpu, "usable_cores", lambda: 7)
    _, _, optimizer, _ = trained(steps=1, place="cpu")
    assert optimizer._backends[0]._math.threads == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
def test_a_state_goes_into_any_mode_and_on_from_there_to_the_bit(mode, dtype) -> None:
    """Saved in one mode and set in the same: as if never stopped. Set in another: the same weights and state."""
    straight = trained(dtype, steps=6, **MODES[mode])
    stopped = trained(dtype, steps=3, **MODES[mode])
    saved = state_of(stopped[2])
    for other in MODES:
        _, _, optimizer, _ = began = trained(
            dtype, steps=0, state=saved, weights=stopped[0].state_dict(), **MODES[other]
        )
        again = state_of(optimizer)
        assert saved[1] == again[1]
        assert all(torch.equal(saved[0][key], again[0][key]) for key in saved[0])
        assert all(torch.equal(a, b) for a, b in zip(stopped[0].parameters(), began[0].parameters(), strict=True))
    resumed = trained(dtype, steps=6, start=3, state=saved, weights=stopped[0].state_dict(), **MODES[mode])
    assert same((resumed[0], None, None, 0), (straight[0], None, None, 0))
    assert straight[3][3:] == resumed[3]
