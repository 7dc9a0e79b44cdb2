"""Residency: any sequence of phases, plans, exceptions, accumulations and readers keeps every byte of every holding."""

import threading

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ebbtide.config.memory import MemoryConfig
from ebbtide.memory.residency import Residency
from plans import plan_of

CPU = torch.device("cpu")
PLAN = plan_of()
PHASES = PLAN.phases


rows = st.fixed_dictionaries(
    {phase: st.none() | st.lists(st.sampled_from(PLAN.could_offload(phase)), unique=True) for phase in PHASES}
)


class AnyRun(RuleBasedStateMachine):
    """A run that does in any order what a loop may do, beside copies of all tensors that never move."""

    @initialize(offload=rows, preset=st.sampled_from(["keep", "lean"]))
    def start(self, offload, preset) -> None:
        torch.manual_seed(0)
        self.residency = Residency(plan_of(MemoryConfig.model_validate({"preset": preset, "offload": offload})), CPU)
        self.held = {
            "weights": [self.make_weight()],
            "master": [torch.randn(37), torch.randn(5)],
            "moments": [torch.randn(1000), torch.randn(3, 7)],
            "reference": [torch.randn(64)],
        }
        self.truth = {name: [tensor.clone() for tensor in tensors] for name, tensors in self.held.items()}
        self.gradient: torch.Tensor | None = None
        for name, tensors in self.held.items():
            self.residency.register(name, tensors, frozen=name == "reference")
        self.residency.register("grads", self.grads)
        self.held["kv_cache"], self.truth["kv_cache"] = [], []
        self.residency.register("kv_cache", lambda: self.held["kv_cache"])
        self.residency.pin()
        self.addresses = [tensor.data_ptr() for tensor in self.held["weights"]]
        self.phase = None
        self.leases: list = []

    def make_weight(self) -> torch.Tensor:
        """What is here of the weight that has gradients."""
        self.weight = torch.nn.Parameter(torch.randn(37))
        return self.weight.detach()

    def grads(self) -> list[torch.Tensor]:
        """What is here of its gradient."""
        return [] if self.weight.grad is None else [self.weight.grad]

    def backward(self) -> torch.Tensor:
        """Adds to the gradient; gives what was added."""
        more = torch.randn(37)
        self.weight.grad = more.clone() if self.weight.grad is None else self.weight.grad + more
        return more

    @rule(phase=st.sampled_from(PHASES))
    def enter(self, phase) -> None:
        with self.residency.phase(phase):
            self.phase = phase

    @rule(phase=st.sampled_from(PHASES))
    def fail_in_a_phase(self, phase) -> None:
        self.phase = phase
        with pytest.raises(KeyError), self.residency.phase(phase):
            raise KeyError("something in the phase")

    @rule()
    def accumulate(self) -> None:
        """A backward: adds to the gradient, which must be there whole if an accumulation is under way."""
        self.residency.need("grads")
        more = self.backward()
        self.gradient = more if self.gradient is None else self.gradient + more

    @rule(sizes=st.lists(st.integers(1, 300), max_size=3))
    def generate(self, sizes) -> None:
        """What was kept of a cache is used, let go of, and another kept."""
        with self.residency.phase("generate"):
            self.phase = "generate"
            self.residency.need("kv_cache")
            assert all(torch.equal(a, b) for a, b in zip(self.held["kv_cache"], self.truth["kv_cache"], strict=True))
            self.residency.forget("kv_cache")
            self.held["kv_cache"] = [torch.randn(size) for size in sizes]
            self.truth["kv_cache"] = [tensor.clone() for tensor in self.held["kv_cache"]]

    @precondition(lambda self: not self.leases)
    @rule()
    def step(self) -> None:
        """An optimizer step: changes master and moments, drops the gradient."""
        for name in ("master", "moments"):
            with self.residency.writing(name):
                for tensor, true in zip(self.held[name], self.truth[name], strict=True):
                    change = torch.randn_like(true)
                    tensor += change
                    true += change
        self.weight.grad = self.gradient = None
        self.residency.forget("grads")

    @rule(name=st.sampled_from(["master", "moments", "reference"]))
    def read(self, name) -> None:
        self.residency.need(name)
        assert all(torch.equal(a, b) for a, b in zip(self.held[name], self.truth[name], strict=True))

    @rule(name=st.sampled_from(["master", "moments", "reference"]))
    def lease(self, name) -> None:
        reader = self.residency.lease(name)
        reader.__enter__()
        self.leases.append((name, reader, self.residency.holdings()[name].device))

    @precondition(lambda self: self.leases)
    @rule()
    def release(self) -> None:
        self.leases.pop()[1].__exit__(None, None, None)

    @invariant()
    def every_byte_is_where_the_table_says(self) -> None:
        if not hasattr(self, "phase"):
            return
        for name, (device, host) in self.residency.holdings().items():
            tensors = self.grads() if name == "grads" else self.held.get(name, [])
            on_device = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
            assert on_device == device  # what is away is really given back
            whole = [self.gradient] if name == "grads" and self.gradient is not None else self.truth.get(name, [])
            assert device + host == sum(tensor.nbytes for tensor in whole)
            assert not (device and host)
            if host:
                blocks = self.residency._holdings[name].blocks
                assert all(
                    torch.equal(block.data, true.reshape(-1).view(torch.uint8))
                    for block, true in zip(blocks, whole, strict=True)
                )
            elif device:
                assert all(torch.equal(a, b) for a, b in zip(tensors, whole, strict=True))
        assert [tensor.data_ptr() for tensor in self.held["weights"]] == self.addresses
        for name, _, on_device in self.leases:
            if on_device:
                assert self.residency.holdings()[name].device == on_device  # nothing leaves under a reader

    @invariant()
    def a_phase_has_what_it_needs_and_not_what_is_away(self) -> None:
        if getattr(self, "phase", None) is None:
            return
        leased = {name for name, _, _ in self.leases}
        self.residency.enter(self.phase)
        held = self.residency.holdings()
        for name in PLAN.needs(self.phase):
            assert held[name].host == 0
        for name in self.residency.plan.offloaded_in(self.phase):
            assert held[name].device == 0 or name in leased

    def teardown(self) -> None:
        for _, reader, _ in getattr(self, "leases", []):
            reader.__exit__(None, None, None)


TestAnyRun = AnyRun.TestCase
TestAnyRun.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def lean() -> Residency:
    return Residency(plan_of(MemoryConfig(preset="lean")), CPU)


def test_frozen_holdings_are_copied_out_once() -> None:
    residency = lean()
    tensor = torch.randn(1000)
    residency.register("reference", [tensor], frozen=True)
    residency.pin()
    for phase in ("generate", "logprob", "train", "generate", "logprob"):
        with residency.phase(phase):
            pass
    figures = residency.meter.drain()
    assert figures["moved_gib"] * 2**30 == pytest.approx(tensor.nbytes * 3)  # out once, in twice
    with pytest.raises(RuntimeError, match="frozen"), residency.writing("reference"):
        pass


def test_views_of_a_bucket_come_back_with_it() -> None:
    residency = lean()
    bucket = torch.arange(10.0)
    left, right = bucket[:4].view(2, 2), bucket[4:]
    residency.register("moments", [bucket])
    residency.pin()
    residency.enter("generate")
    assert bucket.untyped_storage().nbytes() == 0
    residency.enter("step")
    with residency.writing("moments"):
        assert left.tolist() == [[0, 1], [2, 3]]
        right[0] = 40
    assert bucket[4] == 40


def test_gradients_between_steps_are_nowhere_and_inside_an_accumulation_are_kept() -> None:
    residency = lean()
    weight = torch.nn.Parameter(torch.ones(3))
    residency.register("grads", lambda: [weight.grad] if weight.grad is not None else [])
    residency.pin()
    residency.enter("generate")
    assert residency.holdings()["grads"] == (0, 0)
    weight.grad = torch.tensor([1.0, 2.0, 3.0])
    residency.enter("evaluate")  # in the middle of an accumulation
    assert residency.holdings()["grads"] == (0, 12)
    residency.enter("train")
    assert weight.grad.tolist() == [1.0, 2.0, 3.0]


def test_a_write_waits_for_a_reader_in_another_thread() -> None:
    residency = lean()
    tensor = torch.zeros(5)
    residency.register("moments", [tensor])
    residency.pin()
    taken, let_go, order = threading.Event(), threading.Event(), []

    def reader() -> None:
        with residency.lease("moments"):
            taken.set()
            let_go.wait()
            order.append("read")

    thread = threading.Thread(target=reader)
    thread.start()
    taken.wait()
    residency.enter("generate")
    assert residency.holdings()["moments"] == (20, 0)  # it does not leave under its reader
    wait_for = residency._released.wait_for

    def waits(predicate) -> bool:
        let_go.set()  # the reader goes on only once the writer waits for it
        return wait_for(predicate)

    residency._released.wait_for = waits
    with residency.writing("moments"):
        order.append("write")
    thread.join()
    assert order == ["read", "write"]
    with residency.lease("moments"), pytest.raises(RuntimeError, match="wait for ever"), residency.writing("moments"):
        pass


def test_a_reader_waits_for_a_write_under_way() -> None:
    residency = lean()
    tensor = torch.zeros(5)
    residency.register("moments", [tensor])
    asked, seen = threading.Event(), []

    def reader() -> None:
        wait_for = residency._released.wait_for

        def waits(predicate) -> bool:
            asked.set()
            return wait_for(predicate)

        residency._released.wait_for = waits
        with residency.lease("moments"):
            seen.append(tensor.sum().item())

    with residency.writing("moments"):
        thread = threading.Thread(target=reader)
        thread.start()
        asked.wait()
        tensor += 1
        assert not seen
    thread.join()
    assert seen == [5.0]


def test_a_lease_on_what_is_not_there_leaves_no_trace() -> None:
    residency = lean()
    residency.register("moments", [torch.zeros(5)])
    with pytest.raises(KeyError), residency.lease("moments", "master"):
        pass
    with residency.writing("moments"):
        pass


def test_a_holding_is_held_once() -> None:
    residency = lean()
    residency.register("moments", [torch.zeros(1)])
    with pytest.raises(ValueError, match="has its tensors already"):
        residency.register("moments", [torch.zeros(1)])


def test_holdings_and_other_add_up_to_the_peak() -> None:
    residency = lean()
    residency.register("moments", [torch.zeros(1000)])
    residency.pin()
    with residency.phase("step"):
        pass
    with residency.phase("generate"):
        pass
    figures = residency.meter.drain()
    for phase, moments in (("step", 4000), ("generate", 0)):
        assert figures[f"device_gib/{phase}/moments"] == moments / 2**30
        parts = [value for key, value in figures.items() if key.startswith(f"device_gib/{phase}/")]
        assert sum(parts) == pytest.approx(figures[f"peak_gib/{phase}"], rel=1e-12)
    assert figures["host_gib"] > 0
    assert residency.meter.drain()["moved_gib"] == 0
    heading, *body = residency.meter.table_rows()
    assert heading[:3] == ["phase", "seconds", "peak GiB"]
    assert [row[0] for row in body] == ["generate", "step"]
    assert residency.format_table().splitlines()[1].split() == ["moments", "0.000", "0.000"]
    assert residency.holdings()["moments"] == (0, 4000)


def test_what_lives_on_the_host_is_in_the_table_and_never_moves() -> None:
    residency = lean()
    (here,) = residency.allocate_host("moments", [100], pinned=True)
    residency.register("moments", [torch.zeros(5)])
    residency.pin()
    here.fill_(7)
    assert residency.holdings()["moments"] == (20, 100)
    residency.enter("generate")
    assert residency.holdings()["moments"] == (0, 120)
    residency.enter("step")
    residency.need("moments")
    assert residency.holdings()["moments"] == (20, 100)
    assert here.unique().tolist() == [7]
