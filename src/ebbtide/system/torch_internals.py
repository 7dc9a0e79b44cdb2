"""The private and undocumented parts of torch that Ebbtide uses. Each has a test in
tests/system/test_torch_internals.py that fails when a new version of torch changes it.

Everything here is as in torch 2.13 (constraints.txt). The names of torch's classes in a checkpoint's `.metadata` are in
checkpoint/index.py, which imports no torch; their test is there too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import Store
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:  # these take seconds to import: a run on one rank does not wait for them
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

# Passed on as they are. A `StorageWeakRef` identifies a storage, and its identity is not reused while the reference
# exists. A `TorchDispatchMode` sees every operation below autograd, also those on DTensors. `tree_leaves` and
# `tree_map` go through nested tuples, lists and dicts.
MOST_SIZES = 64  # for which a function is compiled

__all__ = [
    "StorageWeakRef",
    "TorchDispatchMode",
    "allow_deterministic_matmuls",
    "call_after_backward",
    "compile_by_size",
    "cuda_host_register",
    "cuda_host_unregister",
    "dump_allocations",
    "flash_backward",
    "flash_forward",
    "foreach_copy",
    "foreach_norm",
    "forward_pre_hooks",
    "fsdp_on_one_stream",
    "fused_adamw",
    "gloo_group",
    "grouped_mm",
    "is_attention_op",
    "is_matmul_op",
    "is_strided_shard",
    "local_tensor",
    "nccl_group",
    "op_mutates",
    "record_allocations",
    "stop_recording_allocations",
    "storage_id",
    "tensor_version",
    "tree_leaves",
    "tree_map",
    "without_split_k",
]

# Tensors, storages and modules


def storage_id(tensor: Tensor) -> int:
    """A number that is the same for all tensors over one storage, as long as the storage exists. It relies on
    `UntypedStorage._cdata`, the address of the storage's C++ object. (`data_ptr()` is 0 for every empty storage.)"""
    found: int = tensor.untyped_storage()._cdata
    return found


def tensor_version(tensor: Tensor) -> int:
    """How often a tensor, or another over the same data, was changed in place. It relies on `Tensor._version`,
    autograd's counter."""
    return tensor._version


def forward_pre_hooks(module: nn.Module) -> list[Any]:
    """The hooks of `register_forward_pre_hook`, in the order in which they run. It relies on
    `Module._forward_pre_hooks`."""
    return list(module._forward_pre_hooks.values())


def call_after_backward(callback: Callable[[], None]) -> None:
    """Inside a backward: has a function called once, when that backward has computed all gradients. It relies on the
    autograd engine's `queue_callback`, as FSDP and DDP do."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# Operations on several tensors at once


def foreach_copy(destinations: list[Tensor], sources: list[Tensor]) -> None:
    """Copies each tensor into the one at the same place, in a few kernels. It relies on `torch._foreach_copy_`."""
    torch._foreach_copy_(destinations, sources)


def foreach_norm(tensors: list[Tensor]) -> list[Tensor]:
    """The 2-norm of each tensor, computed in fp32 whatever its dtype, in a few kernels. It relies on
    `torch._foreach_norm` and its `dtype`."""
    return list(torch._foreach_norm(tensors, 2, torch.float32))


def fused_adamw(
    weight: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    step: int,
    lr: float,
    betas: Sequence[float],
    weight_decay: float,
    eps: float,
) -> None:
    """One AdamW step in place, in one pass over the memory. It relies on `torch._fused_adamw_`, which
    `torch.optim.AdamW(fused=True)` calls; it takes the number of the step that is being made."""
    torch._fused_adamw_(
        [weight],
        [grad],
        [first],
        [second],
        [],
        [torch.tensor(float(step))],
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )


# Matmuls


def allow_deterministic_matmuls(device: torch.device) -> None:
    """Lets matmuls run on a GPU under `torch.use_deterministic_algorithms`; to be called before the process's first.

    torch asks for `CUBLAS_WORKSPACE_CONFIG` then. It looks once whether the variable is set, at the first matmul, but
    parses it at every matmul: 55 us of the host's time, or 160 with a bias, where a matmul takes 18 (torch 2.11 on the
    host of an H200). So it is set for one matmul, and gone afterwards. What the variable promises holds all the same:
    torch gives cuBLAS a workspace for every stream. One that is set from outside stays."""
    name = "CUBLAS_WORKSPACE_CONFIG"
    if device.type != "cuda" or name in os.environ:
        return
    os.environ[name] = ":4096:8"
    try:
        one = torch.ones(1, 1, device=device)
        one.mm(one)
    finally:
        del os.environ[name]


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Inside this context nothing reaches the process's standard error, where it has one."""
    try:
        kept = os.dup(2)
    except OSError:
        yield
        return
    if sys.stderr is not None:
        sys.stderr.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


@contextmanager
def without_split_k() -> Iterator[None]:
    """Inside this context no matmul in bfloat16 splits its inner dimension: a row then has the same bits among few rows
    as among many, on GPUs of the Hopper generation. torch has this switch for cuBLASLt alone, as the second of two
    values."""
    settings = torch.backends.cuda.matmul
    library = torch.backends.cuda.preferred_blas_library()
    before = settings.allow_bf16_reduced_precision_reduction, settings.allow_bf16_reduced_precision_reduction_split_k
    with _without_stderr():  # torch warns there, past Python, that this setting is experimental
        torch.backends.cuda.preferred_blas_library("cublaslt")
    settings.allow_bf16_reduced_precision_reduction = (False, False)
    try:
        yield
    finally:
        settings.allow_bf16_reduced_precision_reduction = before
        torch.backends.cuda.preferred_blas_library(library)


# Operations without a public backward of their own


def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, *, starts: Tensor, longest: int, scale: float, window: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """(mixed values [T, heads, channels], log-sum-exp [heads, T]) of attention within packed sequences, by flash
    kernels. It relies on `aten._flash_attention_forward`, which `torch.nn.attention.varlen.varlen_attn` calls with the
    same arguments."""
    mixed, sums, *_ = torch.ops.aten._flash_attention_forward.default(
        query,
        key,
        value,
        starts,
        starts,
        longest,
        longest,
        0.0,  # no dropout
        window == (-1, 0),
        False,  # no mask for debugging
        scale=scale,
        window_size_left=window[0],
        window_size_right=window[1],
    )
    return mixed, sums


def flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixed: Tensor,
    sums: Tensor,
    *,
    starts: Tensor,
    longest: int,
    scale: float,
    window: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values for `flash_forward`. It relies on `aten._flash_attention_backward`;
    without dropout it does not read the state of the random numbers."""
    no_state = _no_random_state(query.device)
    dquery, dkey, dvalue = torch.ops.aten._flash_attention_backward.default(
        grad,
        query,
        key,
        value,
        mixed,
        sums,
        starts,
        starts,
        longest,
        longest,
        0.0,
        window == (-1, 0),
        no_state,
        no_state,
        scale=scale,
        window_size_left=window[0],
        window_size_right=window[1],
    )
    return dquery, dkey, dvalue


@cache
def _no_random_state(device: torch.device) -> Tensor:
    return torch.zeros(2, dtype=torch.uint64, device=device)


def grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Matmuls of consecutive rows of `a` [N, K] with one matrix of `b` [G, K, M] each: [N, M]; or, of a [K, N] and b
    [N, M], one matmul per group of rows: [G, K, M]. `ends` [G] int32: where each group ends. It relies on
    `torch._grouped_mm`, which `torch.nn.functional.grouped_mm` calls."""
    return torch._grouped_mm(a, b, offs=ends)


def compile_by_size(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function for each size of its tensors anew. It relies on `torch._dynamo.config.recompile_limit`, the
    number of sizes after which torch compiles no more: it is 8 unless set."""
    import torch._dynamo.config as settings

    settings.recompile_limit = max(settings.recompile_limit, MOST_SIZES)
    return torch.compile(function, dynamic=False)


# Operations that a TorchDispatchMode sees

_aten = torch.ops.aten
_MATMULS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten._grouped_mm.default}


def is_matmul_op(op: Any) -> bool:
    """Whether the operation is a matmul. It relies on the names under which linear layers and grouped matmuls reach a
    dispatch mode: `mm`, `addmm`, `bmm` and `_grouped_mm`."""
    return op in _MATMULS


def is_attention_op(op: Any) -> bool:
    """Whether the operation is fused attention. It relies on the operation's `_schema`, and on these parts of the names
    of the kernels behind `scaled_dot_product_attention` and `varlen_attn`."""
    name = op._schema.name
    return "attention" in name or "varlen_attn" in name


def op_mutates(op: Any) -> bool:
    """Whether the operation changes one of its inputs. It relies on `_schema.is_mutable`."""
    return bool(op._schema.is_mutable)


# Sharded tensors


def local_tensor(tensor: DTensor) -> Tensor:
    """This rank's part of a DTensor. It relies on `DTensor._local_tensor`, the tensor that `to_local()` returns where
    no gradient is recorded."""
    return tensor._local_tensor


def is_strided_shard(placement: Any) -> bool:
    """Whether a placement shards what another one left of the same dimension, as FSDP does after tensor parallelism. It
    relies on the private placement `_StridedShard`, which alone has a `split_factor`."""
    return hasattr(placement, "split_factor")


def fsdp_on_one_stream(root: FSDPModule) -> None:
    """Makes FSDP work on the compute stream instead of streams of its own. It relies on the root's state having a
    communication context (`_comm_ctx`) whose `lazy_init` makes these four streams before the first forward."""
    context = root._get_fsdp_state()._comm_ctx
    lazy_init = context.lazy_init

    def lazy_init_on_one_stream(device: torch.device) -> None:
        lazy_init(device)
        stream = torch.get_device_module(device).current_stream(device)
        for name in ("all_gather_copy_in", "all_gather", "reduce_scatter", "all_reduce"):
            setattr(context, f"{name}_stream", stream)

    context.lazy_init = lazy_init_on_one_stream  # type: ignore[method-assign]


# Process groups that are not registered with torch.distributed


def gloo_group(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """A gloo group outside torch.distributed's world. It relies on the undocumented constructor, and on the group's
    own `broadcast(tensor, root)`, which returns a `Work`."""
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def nccl_group(store: Store, rank: int, size: int, timeout: timedelta, name: str) -> Any:
    """A NCCL group outside torch.distributed's world. It relies on the undocumented constructor and on
    `Options._timeout`."""
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout, options.group_name = timeout, name
    return dist.ProcessGroupNCCL(store, rank, size, options)


# CUDA


def cuda_host_register(address: int, size: int) -> int:
    """Pins host memory where it lies; returns CUDA's status, 0 for success. It relies on `cudaHostRegister` in
    `torch.cuda.cudart()`, whose functions are not documented."""
    return int(torch.cuda.cudart().cudaHostRegister(address, size, 0))


def cuda_host_unregister(address: int) -> int:
    """Unpins host memory that `cuda_host_register` pinned; returns CUDA's status."""
    return int(torch.cuda.cudart().cudaHostUnregister(address))


def record_allocations(entries: int) -> None:
    """Starts to record the last `entries` events of the CUDA allocator, without stack traces. It relies on
    `torch.cuda.memory._record_memory_history`, which torch's guide to memory snapshots uses."""
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=entries)


def dump_allocations(path: str) -> None:
    """Writes what was recorded, for https://pytorch.org/memory_viz. It relies on `torch.cuda.memory._dump_snapshot`."""
    torch.cuda.memory._dump_snapshot(path)


def stop_recording_allocations() -> None:
    """Stops the recording."""
    torch.cuda.memory._record_memory_history(enabled=None)
