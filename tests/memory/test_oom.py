"""When memory runs out, the error says what was where and what would make room."""

import pytest
import torch

from ebbtide.config.memory import MemoryConfig
from ebbtide.errors import UserError
from ebbtide.memory.residency import Residency
from plans import plan_of


def residency_of(**memory) -> Residency:
    residency = Residency(plan_of(MemoryConfig.model_validate(memory)), torch.device("cpu"))
    residency.register("weights", [torch.zeros(10)])
    residency.register("moments", [torch.zeros(2**28)])
    residency.register("reference", [torch.zeros(5)])
    residency.pin()
    return residency


def run_out(residency: Residency, phase: str) -> str:
    with pytest.raises(UserError) as found, residency.phase(phase):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 1 GiB"
        )
    return str(found.value)


def test_what_was_where_and_what_makes_room() -> None:
    text = run_out(residency_of(), "generate")
    assert "ran out in the generate phase (CUDA out of memory. Tried to allocate 2.00 GiB)" in text
    assert "moments         1.000      0.000" in text
    assert "`memory.offload.generate: [moments, reference]`, which frees 1.00 GiB" in text
    assert "lower `rollout.max_num_seqs`" in text


def test_only_what_could_leave_is_named() -> None:
    text = run_out(residency_of(offload={"logprob": ["moments"]}), "logprob")
    assert "memory.offload" not in text  # moments are away already, and the reference is needed
    assert "moments         0.000      1.000" in text
    text = run_out(residency_of(), "step")
    assert "`memory.offload.step: [reference]`" in text
    assert "`optimizer.place` to streamed or cpu" in text


def test_what_is_away_stays_so() -> None:
    text = run_out(residency_of(offload={"generate": ["reference"]}), "generate")
    assert "`memory.offload.generate: [moments, reference]`, which frees 1.00 GiB" in text


def test_other_errors_are_left_alone() -> None:
    with pytest.raises(KeyError), residency_of().phase("train"):
        raise KeyError("x")


def test_where_a_phase_cannot_be_entered_the_one_before_it_does_not_count(monkeypatch) -> None:
    residency = residency_of(preset="lean")
    with residency.phase("step"):
        pass

    def run_out_of_memory(holding) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")

    monkeypatch.setattr(residency, "_fetch", run_out_of_memory)
    with pytest.raises(UserError) as found, residency.phase("generate"):
        pass
    assert "moments         0.000      1.000" in str(found.value)  # the step phase had them on the device
