"""Measures this machine's rates for the planner: host link, memory, matmuls, the optimizer on the CPU, and how fast
Python launches work on the device. It takes about ten seconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from ebbtide.config.algorithms.sft import SftConfig
from ebbtide.config.data import ExamplesConfig
from ebbtide.config.loss import LossConfig
from ebbtide.config.memory import MemoryConfig
from ebbtide.config.model import ModelConfig, ScratchConfig
from ebbtide.config.optimizer import OptimizerConfig
from ebbtide.errors import UserError
from ebbtide.memory.host import bind_to_numa_node, pci_address
from ebbtide.memory.plan import build_plan
from ebbtide.memory.residency import Residency
from ebbtide.optim.adamw import AdamW
from ebbtide.optim.costs import optimizer_holdings
from ebbtide.policy.compute_costs import OPS
from ebbtide.policy.datum import trajectory
from ebbtide.policy.losses import build_loss
from ebbtide.progress import Progress
from ebbtide.system.machine import Rates
from ebbtide.system.units import gib
from ebbtide.worker import Worker

COPY_BYTES = 2**30
MATMUL_WIDTH = 8192
CPU_STEP_PARAMETERS = 128 * 2**20
LAYERS = 28  # Layers of the small model that measures the host.
REPEATS = 25  # Repeats of what the host does, which varies more than what the device does.


def calibrate(progress: Progress) -> tuple[str, float, Rates]:
    """(the GPU's name, its memory in GiB, the rates of the GPU and its host)."""
    try:
        return _measure(progress)
    except torch.OutOfMemoryError:
        raise UserError(
            "`--calibrate` needs 4 GiB of free GPU memory: wait for the other processes on this GPU, or stop them"
        ) from None


def _measure(progress: Progress) -> tuple[str, float, Rates]:
    if not torch.cuda.is_available():
        raise UserError(
            "`--calibrate` measures a GPU and its host link, and torch finds no GPU: run it on a GPU machine"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    bind_to_numa_node(pci_address(device))
    on_device, other = (torch.empty(COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    progress(0, 5)
    on_host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    link_out = COPY_BYTES / _min_seconds(lambda: on_host.copy_(on_device, non_blocking=True))
    link_in = COPY_BYTES / _min_seconds(lambda: on_device.copy_(on_host, non_blocking=True))
    progress(1, 5)
    copy = 2 * COPY_BYTES / _min_seconds(lambda: other.copy_(on_device))
    progress(2, 5)
    left, right = (torch.randn(MATMUL_WIDTH, MATMUL_WIDTH, device=device, dtype=torch.bfloat16) for _ in range(2))
    matmul = 2 * MATMUL_WIDTH**3 / _min_seconds(lambda: left @ right, repeats=20)
    progress(3, 5)
    host_op = LAYERS * OPS["fused"] / _forward_backward_seconds()
    progress(4, 5)
    cpu_adam = CPU_STEP_PARAMETERS / _cpu_step_seconds(device)
    progress(5, 5)
    rates = Rates(matmul=matmul, copy=copy, link_out=link_out, link_in=link_in, cpu_adam=cpu_adam, host_op=host_op)
    properties = torch.cuda.get_device_properties(device)
    return properties.name, gib(properties.total_memory), rates


def _do_nothing() -> None: ...


def _min_seconds(work: Callable[[], object], repeats: int = 5, before: Callable[[], object] = _do_nothing) -> float:
    """The minimum over some repeats: the device takes the same time each time, and other processes on the host only
    ever make it slower."""
    return min(_times(work, repeats, before))


def _quartile_seconds(work: Callable[[], object], before: Callable[[], object]) -> float:
    """The lower quartile over many repeats, for work that keeps all cores busy: a step of a run takes longer and is
    never as fast as the fastest repeat."""
    return statistics.quantiles(_times(work, REPEATS, before), n=4)[0]


def _times(work: Callable[[], object], repeats: int, before: Callable[[], object]) -> list[float]:
    """Seconds of each repeat, after one to warm up."""
    taken = []
    for _ in range(repeats + 1):
        before()
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return taken[1:]


def _forward_backward_seconds() -> float:
    """Seconds of a forward and backward with the training code, on a model so small that the host limits it. Repeating
    a single operation would say little about that."""
    scratch = ScratchConfig(layers=LAYERS, hidden=256, heads=2, kv_heads=2, head_dim=128, context=1024)
    config = SftConfig(  # an algorithm without a sampler
        model=ModelConfig(scratch=scratch),
        data=ExamplesConfig(train="none", max_tokens=64),
        memory=MemoryConfig(plan="manual"),
        checkpoint=None,
    )
    data, loss = [trajectory([1] * 16, [1] * 48, [-1.0] * 48, advantage=1.0, weight=1 / 48)], build_loss(LossConfig())
    with Worker(config) as worker:
        return _min_seconds(
            lambda: worker.forward_backward(data, loss), REPEATS, before=lambda: worker.policy.model.zero_grad()
        )


def _cpu_step_seconds(device: torch.device) -> float:
    """Seconds of an optimizer step on the CPU, with gradients that are offloaded already."""
    config = OptimizerConfig(place="cpu")
    with Residency(build_plan(MemoryConfig(), optimizer_holdings(config), ["step"]), device) as residency:
        weight = nn.Parameter(torch.zeros(CPU_STEP_PARAMETERS // 1024, 1024, device=device, dtype=torch.bfloat16))
        optimizer = AdamW([("weight", weight)], config, residency)
        return _quartile_seconds(lambda: optimizer.step(1e-6), before=lambda: (weight.sum() * 1e-3).backward())
