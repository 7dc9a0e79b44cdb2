"""The rows at the peak of a phase, with an allocator of the test's own in place of a GPU's."""

import threading

import pytest
import torch

from ebbtide.config.memory import MemoryConfig
from ebbtide.errors import UserError
from ebbtide.memory import gauge as gauges
from ebbtide.memory.gauge import Gauge, mark, measuring, transient
from ebbtide.memory.plan import HoldingSpec, build_plan
from ebbtide.memory.residency import Residency

GPU = torch.device("cuda", 0)


class Allocator:
    """Bytes by name, and their peak, as the caching allocator keeps it."""

    def __init__(self, monkeypatch) -> None:
        self.bytes: dict[str, int] = {}
        self.peak = 0
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak)

    def allocate(self, **sizes: int) -> None:
        for name, size in sizes.items():
            self.bytes[name] = self.bytes.get(name, 0) + size
            self.peak = max(self.peak, sum(self.bytes.values()))

    def free(self, *names: str) -> None:
        for name in names:
            self.bytes.pop(name, None)


@pytest.fixture
def memory(monkeypatch) -> Allocator:
    made = Allocator(monkeypatch)
    made.allocate(weights=100, buffers=7)
    return made


def gauge_of(memory: Allocator, *held: str) -> Gauge:
    return Gauge(GPU, lambda: {name: memory.bytes.get(name, 0) for name in held})


def test_the_rows_are_those_of_the_moment_of_the_peak(memory) -> None:
    gauge = gauge_of(memory, "weights", "grads")
    with measuring(gauge):
        memory.allocate(saved=50)
        with transient("logits", 30):
            memory.allocate(logits=30, passing=5)  # 192: the peak
            memory.free("logits", "passing")
        memory.free("saved")
        memory.allocate(grads=80)
        mark()
    gauge.close("activations")
    assert gauge.peak == 192
    assert gauge.rows == {"weights": 100, "grads": 0, "logits": 30, "activations": 55}  # the gradients came later
    assert gauge.peak - sum(gauge.rows.values()) == 7  # what was there before


def test_gradients_count_where_they_are_part_of_the_peak(memory) -> None:
    gauge = gauge_of(memory, "weights", "grads")
    with measuring(gauge):
        memory.allocate(saved=50)
        for _ in range(4):
            memory.allocate(grads=20)
            mark()
        memory.allocate(wide=3)
        memory.free("wide", "saved")
    gauge.close("activations")
    assert gauge.rows == {"weights": 100, "grads": 80, "activations": 53}


def test_what_was_freed_before_the_last_mark_is_no_part_of_a_later_peak(memory) -> None:
    memory.allocate(hidden=60)
    gauge = gauge_of(memory, "weights", "hidden")
    with measuring(gauge):
        memory.free("hidden")
        mark()  # no new peak
        memory.allocate(saved=90)
        memory.free("saved")
    gauge.close("activations")
    assert gauge.rows == {"weights": 100, "hidden": 0, "activations": 90}


def test_what_a_phase_without_forwards_allocates_is_workspace(memory) -> None:
    gauge = gauge_of(memory, "weights", "grads")
    memory.allocate(grads=40, norms=9)
    memory.free("grads", "norms")
    gauge.close(None)
    assert gauge.peak - sum(gauge.rows.values()) >= 9


def test_a_kept_cache_that_becomes_a_new_one_counts_once(memory) -> None:
    memory.allocate(kv_cache=20)
    gauge = gauge_of(memory, "weights", "kv_cache")
    with measuring(gauge):
        memory.bytes["live"] = memory.bytes.pop("kv_cache")
        with transient("kv_cache", 60):
            memory.allocate(live=40, pass_=11)
            memory.free("pass_")
        memory.bytes["kv_cache"] = memory.bytes.pop("live")
    gauge.close("activations")
    assert gauge.rows == {"weights": 100, "kv_cache": 60, "activations": 11}


def test_a_backward_on_another_thread_reports_as_well(memory) -> None:
    gauge = gauge_of(memory, "weights")

    def backward() -> None:
        with transient("logits", 30):
            memory.allocate(logits=30)
            memory.free("logits")

    with measuring(gauge):
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
    gauge.close("activations")
    assert gauge.rows == {"weights": 100, "logits": 30}


def test_nothing_is_reported_outside_of_a_phase() -> None:
    with transient("logits", 30):
        mark()
    assert gauges._gauge is None


PARTS = [
    HoldingSpec("weights", frozenset({"train"}), movable=False),
    HoldingSpec("verifier", frozenset({"judge"}), frozen=True, advice={"judge": "use a smaller verifier"}),
    HoldingSpec("scratchpad", transient=True),
]


def made_up() -> Residency:
    residency = Residency(build_plan(MemoryConfig(preset="lean"), PARTS, ("judge", "train")), torch.device("cpu"))
    residency.register("weights", [torch.zeros(2**18)])
    residency.register("verifier", [torch.zeros(2**22)], frozen=True)
    residency.pin()
    return residency


def test_a_part_that_only_this_test_knows_is_planned_moved_and_measured() -> None:
    residency = made_up()
    assert residency.plan.table_rows() == [
        ["phase", "weights", "verifier"],
        ["judge", "stays", "device"],
        ["train", "device", "away"],
        ["save", "stays", "stays"],
        ["evaluate", "stays", "stays"],
    ]
    for phase in ("judge", "train"):
        with residency.phase(phase), transient("scratchpad", 2**20 * (2 if phase == "judge" else 1)):
            pass
    figures = residency.meter.drain()
    assert figures["device_gib/judge/verifier"] == 2**24 / 2**30
    assert figures["device_gib/train/verifier"] == 0
    assert figures["device_gib/judge/scratchpad"] == 2**21 / 2**30
    assert figures["device_gib/train/scratchpad"] == 2**20 / 2**30
    for phase in ("judge", "train"):
        parts = [value for key, value in figures.items() if key.startswith(f"device_gib/{phase}/")]
        assert sum(parts) == pytest.approx(figures[f"peak_gib/{phase}"], rel=1e-12)
    heading, *rows = residency.meter.table_rows()
    assert "verifier" in heading
    assert [row[0] for row in rows] == ["judge", "train"]


def test_the_message_about_memory_names_that_part() -> None:
    residency = made_up()
    judging = residency.phase("judge")
    with pytest.raises(UserError, match="ran out in the judge phase") as found, judging, transient("scratchpad", 2**29):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0")
    text = str(found.value)
    assert "scratchpad      0.500      0.000" in text
    assert "verifier        0.016      0.000" in text
    assert "use a smaller verifier" in text
    with pytest.raises(UserError, match="ran out in the train phase") as found, residency.phase("train"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0")
    assert "verifier        0.000      0.016" in str(found.value)
