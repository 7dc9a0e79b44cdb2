"""Measures what this machine can do, for the planner: link, memory, products, the CPU's optimizer, and how fast Python hands work to the device. About ten seconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from ebbtide.config.tree import BuiltinTask, Config, Memory, Model, Optimizer, Scratch, Task
from ebbtide.errors import UserError
from ebbtide.memory.arena import GIB
from ebbtide.memory.host import bind_near, pci_address
from ebbtide.memory.plan import build_plan
from ebbtide.memory.residency import Residency
from ebbtide.optim.adamw import AdamW
from ebbtide.planner.machine import Rates
from ebbtide.planner.seconds import OPS
from ebbtide.policy.model import load_model
from ebbtide.policy.pack import Trajectory
from ebbtide.policy.policy import Policy
from ebbtide.progress import Progress

COPIED = 2**30  # bytes
WIDTH = 8192  # of a large product
STEPPED = 128 * 2**20  # parameters
BLOCKS = 28  # of a small model
REPEATS = 25  # of the host's work


def calibrate(progress: Progress) -> tuple[str, float, Rates]:
    """The GPU's name and GiB, and its rates and its host's."""
    try:
        return _measured(progress)
    except torch.OutOfMemoryError:
        raise UserError("`--calibrate` needs 4 GiB of the GPU, and others use it: wait for them, or stop them") from None


def _measured(progress: Progress) -> tuple[str, float, Rates]:
    if not torch.cuda.is_available():
        raise UserError("`--calibrate` measures a GPU and its link, and torch sees none")
    device = torch.device("cuda", torch.cuda.current_device())
    bind_near(pci_address(device))
    on_device, other = (torch.empty(COPIED, dtype=torch.uint8, device=device) for _ in range(2))
    progress(0, 5)
    on_host = torch.empty(COPIED, dtype=torch.uint8, pin_memory=True)
    link_out = COPIED / _seconds(lambda: on_host.copy_(on_device, non_blocking=True))
    link_in = COPIED / _seconds(lambda: on_device.copy_(on_host, non_blocking=True))
    progress(1, 5)
    copy = 2 * COPIED / _seconds(lambda: other.copy_(on_device))
    progress(2, 5)
    left, right = (torch.randn(WIDTH, WIDTH, device=device, dtype=torch.bfloat16) for _ in range(2))
    matmul = 2 * WIDTH**3 / _seconds(lambda: left @ right, repeats=20)
    progress(3, 5)
    host_op = BLOCKS * OPS["keep"] / _pass(device)
    progress(4, 5)
    cpu_adam = STEPPED / _cpu_step(device)
    progress(5, 5)
    rates = Rates(matmul=matmul, copy=copy, link_out=link_out, link_in=link_in, cpu_adam=cpu_adam, host_op=host_op)
    properties = torch.cuda.get_device_properties(device)
    return properties.name, properties.total_memory / GIB, rates


def _nothing() -> None: ...


def _seconds(work: Callable[[], object], repeats: int = 5, before: Callable[[], object] = _nothing) -> float:
    """The least of some: what the device does, it does the same each time, and what others do to the host only ever makes it slower."""
    return min(_each(work, repeats, before))


def _usual_seconds(work: Callable[[], object], before: Callable[[], object]) -> float:
    """Of work that keeps all cores busy: a step of a run, which is longer, is never as fast as the fastest, so of many a quarter are faster."""
    return statistics.quantiles(_each(work, REPEATS, before), n=4)[0]


def _each(work: Callable[[], object], repeats: int, before: Callable[[], object]) -> list[float]:
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


def _pass(device: torch.device) -> float:
    """A forward and backward through the code that trains, on a model so small that the host is what takes the time. One operation over and over would say little of it."""
    scratch = Scratch(layers=BLOCKS, hidden=256, heads=2, kv_heads=2, head_dim=128, context=1024)
    config = Config(model=Model(scratch=scratch), task=Task(builtin=BuiltinTask(name="copy")))
    policy = Policy(load_model(config, device), config)
    sequence = Trajectory([1] * 16, [1] * 48, [-1.0] * 48, advantage=1.0, weight=1 / 48)
    return _seconds(lambda: policy.accumulate([sequence], lambda *_: None), REPEATS, before=policy.model.zero_grad)


def _cpu_step(device: torch.device) -> float:
    """Of the optimizer on the CPU, on gradients that have left the device."""
    config = Optimizer(place="cpu")
    with Residency(build_plan(Memory(), config), device) as residency:
        weight = nn.Parameter(torch.zeros(STEPPED // 1024, 1024, device=device, dtype=torch.bfloat16))
        optimizer = AdamW([("weight", weight)], config, residency)
        return _usual_seconds(lambda: optimizer.step(1e-6), before=lambda: (weight.sum() * 1e-3).backward())
