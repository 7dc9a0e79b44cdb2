"""torch's private parts that need a GPU, as those of tests/system/test_torch_internals.py."""

import mmap
import os
import pickle
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ebbtide.system.torch_internals import (
    TorchDispatchMode,
    cuda_host_register,
    cuda_host_unregister,
    dump_allocations,
    is_attention_op,
    nccl_group,
    record_allocations,
    stop_recording_allocations,
    without_split_k,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_a_nccl_group_of_its_own_broadcasts_and_has_its_timeout() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    group = nccl_group(dist.HashStore(), 0, 1, timedelta(seconds=77), "of a test")
    tensor = torch.full((3,), 2.0, device=device)
    group.broadcast(tensor, 0).wait()
    assert tensor.tolist() == [2.0] * 3
    assert group.options._timeout == timedelta(seconds=77)
    assert not dist.is_initialized()


def test_host_memory_is_pinned_where_it_lies() -> None:
    torch.cuda.init()
    memory = torch.frombuffer(mmap.mmap(-1, 1 << 21), dtype=torch.uint8)
    memory.zero_()
    assert not memory.is_pinned()
    assert cuda_host_register(memory.data_ptr(), memory.numel()) == 0
    assert memory.is_pinned()
    assert cuda_host_unregister(memory.data_ptr()) == 0
    assert not memory.is_pinned()


def test_the_allocators_history_is_recorded_written_and_ended(tmp_path) -> None:
    record_allocations(50)
    try:
        kept = [torch.empty(1 << 20, dtype=torch.uint8, device="cuda") for _ in range(80)]
        dump_allocations(str(tmp_path / "history"))
    finally:
        stop_recording_allocations()
    found = pickle.loads((tmp_path / "history").read_bytes())
    events = [event for trace in found["device_traces"] for event in trace]
    assert 0 < len(events) <= 50
    assert any(event["action"] == "alloc" and event["size"] == 1 << 20 for event in events)
    assert not any(event.get("frames") for event in events)
    del kept
    more = [torch.empty(3 << 20, dtype=torch.uint8, device="cuda") for _ in range(3)]
    dump_allocations(str(tmp_path / "after"))
    later = [event for trace in pickle.loads((tmp_path / "after").read_bytes())["device_traces"] for event in trace]
    assert not any(event["size"] == more[0].nbytes for event in later)


def test_varlen_attention_is_one_operation_that_is_known() -> None:
    from torch.nn.attention.varlen import varlen_attn

    seen = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    states = [torch.ones(8, 2, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(3)]
    starts = torch.tensor([0, 3, 8], dtype=torch.int32, device="cuda")
    with Seen():
        varlen_attn(*states, starts, starts, 5, 5, window_size=(-1, 0))
    assert [is_attention_op(op) for op in seen].count(True) == 1


def test_matmuls_are_deterministic_without_a_variable_that_each_would_parse() -> None:
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ  # conftest.py had it set for one matmul
    torch.use_deterministic_algorithms(True)
    try:
        torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")
    finally:
        torch.use_deterministic_algorithms(False)


def test_split_k_is_forbidden_for_a_while() -> None:
    settings, library = torch.backends.cuda.matmul, torch.backends.cuda.preferred_blas_library()
    with without_split_k():
        assert not settings.allow_bf16_reduced_precision_reduction_split_k
        assert torch.backends.cuda.preferred_blas_library() != library
        few, many = (torch.ones(rows, 6144, device="cuda", dtype=torch.bfloat16) for rows in (16, 8192))
        weight = torch.ones(2048, 6144, device="cuda", dtype=torch.bfloat16)
        assert torch.equal(few @ weight.t(), (many @ weight.t())[:16])
    assert settings.allow_bf16_reduced_precision_reduction_split_k
    assert torch.backends.cuda.preferred_blas_library() == library
