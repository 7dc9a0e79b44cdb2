"""torch's private parts behave as Ebbtide relies on: a test that fails here after an update of torch names the function
of system/torch_internals.py to adapt. (Those that need a GPU are in tests/gpu/test_cuda_internals.py.)"""

import inspect
import io
import math
import pickle
import pickletools
import re
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from ebbtide.checkpoint.entries import TensorEntry, WriteShare
from ebbtide.checkpoint.index import DTYPE, METADATA, OPCODES, STAND_INS, TENSORS
from ebbtide.checkpoint.tensors import finish_tensors, write_tensors
from ebbtide.system import torch_internals
from ebbtide.system.torch_internals import (
    StorageWeakRef,
    TorchDispatchMode,
    call_after_backward,
    compile_by_size,
    foreach_copy,
    foreach_norm,
    forward_pre_hooks,
    fsdp_on_one_stream,
    fused_adamw,
    gloo_group,
    grouped_mm,
    is_attention_op,
    is_matmul_op,
    is_strided_shard,
    local_tensor,
    op_mutates,
    storage_id,
    tensor_version,
    tree_leaves,
    tree_map,
)
from patience import PATIENCE

# Tensors, storages and modules


def test_a_storage_has_one_id_for_all_tensors_over_it() -> None:
    whole = torch.zeros(6)
    assert storage_id(whole) == storage_id(whole[2:]) == storage_id(whole.view(2, 3)) == storage_id(whole.detach())
    assert storage_id(whole) != storage_id(whole.clone())
    first, second = torch.empty(0), torch.empty(0)
    assert storage_id(first) != storage_id(second)


def test_a_version_counts_changes_in_place_also_those_through_views() -> None:
    whole = torch.zeros(6)
    before = tensor_version(whole)
    assert whole.add(1).sum() == 6
    assert tensor_version(whole) == before
    view = whole.detach()[1:3]
    view.add_(1)
    assert tensor_version(whole) == tensor_version(view) == before + 1


def test_a_weak_reference_identifies_a_storage_and_does_not_keep_it() -> None:
    tensor = torch.zeros(1000)
    first, second = StorageWeakRef(tensor.untyped_storage()), StorageWeakRef(tensor.untyped_storage())
    assert first == second
    assert len({first, second}) == 1
    assert not first.expired()
    del tensor
    assert first.expired()
    # Its identity is not given to another storage while the reference exists.
    others = [torch.zeros(1000) for _ in range(50)]
    assert all(StorageWeakRef(other.untyped_storage()) not in {first} for other in others)


def test_forward_pre_hooks_are_found_in_their_order() -> None:
    module, calls = nn.Linear(2, 2), []
    assert forward_pre_hooks(module) == []
    module.register_forward_pre_hook(lambda *_: calls.append(1))
    handle = module.register_forward_pre_hook(lambda *_: calls.append(2))
    for hook in forward_pre_hooks(module):
        hook(module, ())
    assert calls == [1, 2]
    handle.remove()
    assert len(forward_pre_hooks(module)) == 1


def test_a_function_is_called_once_after_the_backward_it_was_passed_in() -> None:
    calls = []
    first, second = nn.Linear(2, 2), nn.Linear(2, 1)
    for name, weight in (("second", second.weight), ("first", first.weight)):
        weight.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))
    second.weight.register_post_accumulate_grad_hook(lambda _: call_after_backward(lambda: calls.append("after")))
    for _ in range(2):
        second(first(torch.ones(1, 2))).sum().backward()
    assert calls == ["second", "first", "after"] * 2


# Operations on several tensors at once


def test_foreach_copy_fills_views_of_any_shape() -> None:
    whole = torch.zeros(4, 6, dtype=torch.bfloat16)
    sources = [torch.full((4, 2), 1.0, dtype=torch.bfloat16), torch.full((2, 4), 2.0, dtype=torch.bfloat16)]
    foreach_copy([whole[:, :2], whole[1:3, 2:]], sources)
    assert whole.sum() == 8 * 1 + 8 * 2
    assert torch.equal(whole[1:3, 2:], sources[1])


def test_foreach_norm_is_computed_in_fp32() -> None:
    # In bfloat16 the sum of squares would stop growing at 256.
    tensors = [torch.ones(70_000, dtype=torch.bfloat16), torch.full((3, 3), 2.0, dtype=torch.bfloat16)]
    norms = foreach_norm(tensors)
    assert [norm.dtype for norm in norms] == [torch.float32] * 2
    assert torch.stack(norms).tolist() == pytest.approx([math.sqrt(70_000), 6.0], rel=1e-6)


def test_fused_adamw_makes_the_step_of_its_number() -> None:
    torch.manual_seed(0)
    weight, grad, first = torch.randn(3, 40).unbind()
    second = torch.rand(40)
    lr, (beta1, beta2), decay, eps, step = 0.1, (0.8, 0.9), 0.05, 1e-3, 3
    mean, square = first * beta1 + grad * (1 - beta1), second * beta2 + grad**2 * (1 - beta2)
    update = mean / (1 - beta1**step) / ((square / (1 - beta2**step)).sqrt() + eps)
    wanted = weight * (1 - lr * decay) - lr * update
    kept = grad.clone()
    fused_adamw(weight, grad, first, second, step=step, lr=lr, betas=[beta1, beta2], weight_decay=decay, eps=eps)
    assert torch.allclose(weight, wanted, atol=1e-6)
    assert torch.allclose(first, mean, atol=1e-6)
    assert torch.allclose(second, square, atol=1e-6)
    assert torch.equal(grad, kept)


# Operations that a dispatch mode sees


class Seen(TorchDispatchMode):
    """The operations of a forward, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args))
        return func(*args, **(kwargs or {}))

    @property
    def matmuls(self) -> list[Any]:
        return [args for op, args in self.calls if is_matmul_op(op)]


def grouped() -> Tensor:
    ends = torch.tensor([2, 4], dtype=torch.int32)
    x, weights = torch.ones(4, 16, dtype=torch.bfloat16), torch.ones(2, 16, 24, dtype=torch.bfloat16)
    return torch._grouped_mm(x, weights, offs=ends)


@pytest.mark.parametrize(
    "forward",
    [
        lambda: nn.Linear(4, 5)(torch.ones(1, 3, 4)),
        lambda: nn.Linear(4, 5, bias=False)(torch.ones(1, 3, 4)),
        lambda: torch.ones(2, 3, 4) @ torch.ones(2, 4, 5),
        grouped,
    ],
    ids=["linear", "linear without bias", "batched", "grouped"],
)
def test_each_kind_of_matmul_is_one_operation_that_is_known(forward) -> None:
    with Seen() as seen:
        result = forward()
    [args] = seen.matmuls
    matrices = [arg for arg in args if isinstance(arg, Tensor) and arg.ndim >= 2]
    assert matrices[-1].shape[-1] == result.shape[-1]  # selective checkpointing tells matmuls apart by this
    assert not any(is_attention_op(op) for op, _ in seen.calls)


def test_grouped_matmuls_are_one_matmul_for_each_group() -> None:
    left, right, ends = torch.randn(12, 8), torch.randn(3, 8, 16), torch.tensor([4, 4, 12], dtype=torch.int32)
    rows = [left[:4], left[4:4], left[4:]]
    torch.testing.assert_close(
        grouped_mm(left, right, ends), torch.cat([a @ b for a, b in zip(rows, right, strict=True)])
    )
    other = torch.randn(12, 16)
    pairs = zip(rows, (other[:4], other[4:4], other[4:]), strict=True)
    torch.testing.assert_close(grouped_mm(left.t(), other, ends), torch.stack([a.t() @ b for a, b in pairs]))


def test_attention_is_one_operation_that_is_known() -> None:
    states = [torch.ones(1, 2, 8, 16, requires_grad=True) for _ in range(3)]
    with Seen() as seen:
        scaled_dot_product_attention(*states, is_causal=True)
    assert [is_attention_op(op) for op, _ in seen.calls].count(True) == 1
    assert seen.matmuls == []


def test_varlen_attention_is_known_by_its_name() -> None:
    import torch.nn.attention.varlen  # registers it

    assert is_attention_op(torch.ops.torch_attn._varlen_attn.default)


def test_operations_that_change_their_inputs_are_known() -> None:
    with Seen() as seen:
        torch.ones(3).add(1).add_(1)
    added = [op for op, _ in seen.calls if "add" in str(op)]
    assert [op_mutates(op) for op in added] == [False, True]


def test_trees_are_walked_and_rebuilt() -> None:
    tree = (1, [2, {"a": 3, "b": None}], "text")
    assert tree_leaves(tree) == [1, 2, 3, None, "text"]
    assert tree_map(lambda leaf: leaf * 2 if isinstance(leaf, int) else leaf, tree) == (
        2,
        [4, {"a": 6, "b": None}],
        "text",
    )


# Sharded tensors


@pytest.fixture
def ranks() -> Iterator[Any]:
    """ranks(4, "fake"): joins a group of so many, in which this process is rank 0."""

    def join(count: int, backend: str = "gloo") -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        store = FakeStore() if backend == "fake" else dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=count)

    yield join
    dist.destroy_process_group()


def test_the_local_tensor_is_what_to_local_returns(ranks) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    ranks(2, "fake")
    tensor = distribute_tensor(torch.zeros(4, 3), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None)
    assert type(local_tensor(tensor)) is Tensor
    assert local_tensor(tensor).shape == (2, 3)
    with torch.no_grad():
        assert storage_id(tensor.to_local()) == storage_id(local_tensor(tensor))


def test_a_dispatch_mode_sees_an_operation_on_dtensors_once(ranks) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    ranks(2, "fake")
    weight = distribute_tensor(torch.ones(4, 3), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None)
    with Seen() as seen:
        weight.mm(weight.new_ones(3, 2))
    [args] = seen.matmuls
    assert all(isinstance(arg, DTensor) for arg in args)


def test_fsdp_marks_what_it_shards_after_tensor_parallelism(ranks) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    ranks(4, "fake")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.LayerNorm(8, bias=False))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["shard"])
    strided = [[is_strided_shard(one) for one in weight.placements] for weight in model.parameters()]
    # The first is sharded twice in one dimension, the second once in each, the third once.
    assert strided == [[True, False], [False, False], [False]]


@pytest.mark.parametrize("on_one", [True, False])
def test_fsdp_has_four_streams_that_can_be_the_compute_stream(ranks, on_one: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    ranks(1)
    root = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for module in (*root, root):
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    if on_one:
        fsdp_on_one_stream(root)
    root(torch.ones(2, 4)).sum().backward()
    for module in (*root, root):  # all share the root's
        context = vars(module._get_fsdp_state()._comm_ctx)
        streams = {name: stream for name, stream in context.items() if name.endswith("_stream")}
        assert streams.keys() == {
            "all_gather_copy_in_stream",
            "all_gather_stream",
            "reduce_scatter_stream",
            "all_reduce_stream",
        }
        assert all((stream is torch.cpu.current_stream()) == on_one for stream in streams.values())


# Process groups


def in_threads(work: Any) -> list[Any]:
    """What `work(rank)` returns or raises on two ranks, which are threads."""
    results: list[Any] = [None, None]

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return results


def test_a_gloo_group_of_its_own_broadcasts() -> None:
    store = dist.HashStore()

    def work(rank: int) -> list[float]:
        tensor = torch.full((3,), float(rank + 1))
        sent = gloo_group(store, rank, 2, timedelta(seconds=PATIENCE)).broadcast(tensor, 1)
        sent.wait()
        assert sent.is_completed()
        return tensor.tolist()

    assert in_threads(work) == [[2.0] * 3] * 2
    assert not dist.is_initialized()


def test_a_gloo_group_gives_up_after_its_own_timeout() -> None:
    store, done = dist.HashStore(), threading.Event()

    def work(rank: int) -> None:
        group = gloo_group(store, rank, 2, timedelta(seconds=1))
        if rank == 0:  # takes no part
            done.wait(PATIENCE)
            return
        try:
            group.broadcast(torch.zeros(3), 0).wait()
        finally:
            done.set()

    _, error = in_threads(work)
    assert isinstance(error, RuntimeError)
    assert "imed out" in str(error)


# CUDA


def test_the_allocators_history_has_the_arguments_that_are_used() -> None:
    assert {"enabled", "context", "max_entries"} <= inspect.signature(
        torch.cuda.memory._record_memory_history
    ).parameters.keys()
    assert next(iter(inspect.signature(torch.cuda.memory._dump_snapshot).parameters)) == "filename"


# The rest of the source

PRIVATE = re.compile(
    r"\b(?<!ebbtide\.)torch(\.\w+)*\._[a-z]|(from|import) torch[\w.]*\._|multiprocessing\.reductions|cudart\(|"
    r"ProcessGroup(Gloo|NCCL)|split_factor|\._(cdata|version|schema|local_tensor|get_fsdp_state|comm_ctx|"
    r"forward_pre_hooks|grouped_mm)\b"
)


def test_no_other_file_uses_private_parts_of_torch() -> None:
    source = Path(torch_internals.__file__).parents[1]
    files = {str(path.relative_to(source)): path.read_text() for path in source.rglob("*.py")}
    assert [name for name, text in files.items() if PRIVATE.search(text)] == ["system/torch_internals.py"]


# Checkpoints: index.py reads what these write, without torch


def test_a_checkpoints_metadata_names_only_the_classes_that_are_read(tmp_path) -> None:
    tensors = {"model.a": torch.ones(3, 4), "optimizer.b": torch.ones(5, dtype=torch.bfloat16)}
    everyone = [[TensorEntry(name, tensor.size(), tensor.dtype) for name, tensor in tensors.items()]]
    results = write_tensors(tmp_path, everyone, tensors.__getitem__, WriteShare())
    finish_tensors(tmp_path, everyone, [results], WriteShare())
    opcodes = list(pickletools.genops((tmp_path / METADATA).read_bytes()))
    assert {opcode.name for opcode, _, _ in opcodes} <= OPCODES
    named = globals_of((tmp_path / METADATA).read_bytes())
    assert {
        ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
    } <= named
    assert {name for name in named if name not in STAND_INS} <= {("torch", "float32"), ("torch", "bfloat16")}
    assert all(DTYPE.fullmatch(name) for module, name in named if module == "torch" and name != "Size")
    # The digests of a rank's files are computed by this pattern (checkpoint/writer.py).
    assert {path.name for path in (tmp_path / TENSORS).glob("__0_*")} == {
        path.name for path in (tmp_path / TENSORS).iterdir()
    } - {".metadata"}


def globals_of(data: bytes) -> set[tuple[str, str]]:
    """The (module, name) of each object that a pickle names."""
    found = set()

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            found.add((module, name))
            return super().find_class(module, name)

    Reader(io.BytesIO(data)).load()
    return found


def test_more_sizes_are_compiled_than_torch_would() -> None:
    import torch._dynamo.config as settings

    compile_by_size(lambda numbers: numbers + 1)
    assert settings.recompile_limit >= 64
