"""The optimizer's step in each mode, on the Qwen3-1.7B shape: seconds, device memory, and what a 16k-token forward
and backward hides of it.

    python benchmarks/optimizer.py [MODE]...

Beside it, in the same process and where they are installed: Megatron-Core's HybridDeviceOptimizer (fp32 masters on
the CPU) and torchao's CPUOffloadOptimizer (bfloat16 state, no master). Gradients come from the same forward and
backward for all. Peers do not clip; Ebbtide does. Modes named on the command line are measured anew; the other rows
are kept.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common import Row, kept, save

from ebbtide.config import load
from ebbtide.config.loss import LossConfig
from ebbtide.model.load import load_model
from ebbtide.optim.costs import ring_bytes
from ebbtide.policy.datum import Datum, trajectory
from ebbtide.policy.losses import build_loss
from ebbtide.policy.policy import Policy
from ebbtide.progress import no_progress
from ebbtide.system.torch_internals import allow_deterministic_matmuls
from ebbtide.worker import Worker, seed_everything

CONFIG = str(Path(__file__).parent / "configs" / "qwen3-1.7b-sft.yaml")
GIB = 2**30
TOKENS = 16_384
REPEATS, WARM_UP = 5, 2
MODES = {
    "device": [],
    "streamed": ["optimizer.place=streamed"],
    "cpu": ["optimizer.place=cpu"],
    "cpu, no overlap": ["optimizer.place=cpu", "optimizer.overlap=false"],
    "split, half cpu, half device": ["optimizer.cpu_fraction=0.5"],
    "split, half cpu, half streamed": ["optimizer.place=streamed", "optimizer.cpu_fraction=0.5"],
}


def trajectories() -> list[Datum]:
    """Sequences of 126 + 256 tokens that fill one micro-batch."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for number in range(TOKENS // 382):
        tokens = torch.randint(200, (382,), generator=generator).tolist()
        made.append(
            trajectory(tokens[:126], tokens[126:], [-5.0] * 256, advantage=float(number % 2 * 2 - 1), weight=1 / TOKENS)
        )
    return made


def timed(backward: Callable[[], object], step: Callable[[], object]) -> tuple[float, float, int]:
    """(seconds of forward and backward, seconds of the step after it, peak bytes in the step)."""
    taken = []
    for _ in range(WARM_UP + REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        backward()
        torch.cuda.synchronize()
        middle = time.perf_counter()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        taken.append((middle - start, time.perf_counter() - middle, torch.cuda.max_memory_allocated()))
    backwards, steps, peaks = zip(*taken[WARM_UP:], strict=True)
    return statistics.median(backwards), statistics.median(steps), max(peaks)


def mode(name: str, options: list[str]) -> tuple[list[Row], list[torch.Tensor]]:
    """The figures of one mode, and the weights after its steps."""
    config, sequences = load(CONFIG, [*options, "deterministic=true"]), trajectories()
    start = time.perf_counter()
    with Worker(config) as worker:
        built = time.perf_counter() - start
        model, residency, optimizer = worker.policy.model, worker.residency, config.optimizer
        weights = sum(weight.nbytes for weight in model.parameters())
        held = residency.holdings()
        outside = torch.cuda.memory_allocated() - sum(held[name].device for name in ("weights", "master", "moments"))
        backward, step, peak = timed(
            lambda: worker.forward_backward(sequences, build_loss(LossConfig())),
            lambda: worker.optim_step(1e-6),
        )
        exposed = residency.mover.drain().exposed / (REPEATS + WARM_UP)
        ring = ring_bytes(optimizer, weights // 2, 2)
        grads = weights * (1 - optimizer.cpu_share if optimizer.overlap else 1)
        promised = weights + grads + ring + held["master"].device + held["moments"].device
        host, after = residency.host_bytes, [weight.detach().cpu() for weight in model.parameters()]
    rows = [
        Row(name, "forward and backward, 16k tokens", backward, "s"),
        Row(name, "step after it", step, "s"),
        Row(name, "exposed, a step", exposed, "s"),
        Row(name, "peak in the step", (peak - outside) / GIB, "GiB"),
        Row(name, "promised", promised / GIB, "GiB"),
        Row(name, "peak, of what was promised", (peak - outside) / promised * 100, "%"),
        Row(name, "host memory", host / GIB, "GiB"),
        Row(name, "building the worker", built, "s"),
    ]
    return rows, after


def megatron(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    made: torch.optim.Optimizer = HybridDeviceOptimizer(
        [{"params": parameters, "lr": 1e-6}],
        offload_fraction=1.0,
        cpu_optimizer_cls=functools.partial(torch.optim.AdamW, fused=True),
        gpu_optimizer_cls=torch.optim.AdamW,
        param_update_in_fp32=True,
        overlap_cpu_optimizer_d2h_h2d=True,
    )
    return made


def torchao(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    from torchao.optim import CPUOffloadOptimizer

    made: torch.optim.Optimizer = CPUOffloadOptimizer(
        parameters, torch.optim.AdamW, offload_gradients=True, lr=1e-6, fused=True
    )
    return made


def peer(name: str, make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]) -> list[Row]:
    config = load(CONFIG)
    allow_deterministic_matmuls(torch.device("cuda", 0))
    seed_everything(0, deterministic=True)
    loaded = load_model(config)
    policy, sequences = Policy(loaded, config), trajectories()
    try:
        optimizer = make(list(loaded.model.parameters()))
    except ImportError as error:
        print(f"{name}: not installed ({error})", flush=True)
        return []
    backward, seconds, peak = timed(
        lambda: policy.forward_backward(sequences, build_loss(LossConfig()), no_progress),
        lambda: (optimizer.step(), optimizer.zero_grad()),
    )
    return [
        Row(name, "forward and backward, 16k tokens", backward, "s"),
        Row(name, "step after it", seconds, "s"),
        Row(name, "peak in the step", peak / GIB, "GiB"),
    ]


def show(rows: list[Row]) -> list[Row]:
    print(*(f"{row.case}: {row.metric} {row.value:.4g} {row.unit}" for row in rows), sep="\n", flush=True)
    return rows


def some(names: list[str]) -> None:
    found = kept("optimizer", names.__contains__)
    for name in names:
        found += show(mode(name, MODES[name])[0])
    save("optimizer", found)


def main() -> None:
    found: list[Row] = []
    ends = {}
    for name, options in MODES.items():
        rows, ends[name] = mode(name, options)
        found += show(rows)
    same = all(torch.equal(a, b) for a, b in zip(ends["device"], ends["streamed"], strict=True))
    found.append(Row("streamed = device, after all steps", "identical to the bit", float(same), "(1 = yes)"))
    same = all(torch.equal(a, b) for a, b in zip(ends["cpu"], ends["cpu, no overlap"], strict=True))
    found.append(Row("cpu = cpu without overlap", "identical to the bit", float(same), "(1 = yes)"))
    found += show(peer("Megatron-Core HybridDeviceOptimizer", megatron))
    found += show(peer("torchao CPUOffloadOptimizer (bf16 state, no master)", torchao))
    steps = {row.case: row.value for row in found if row.metric == "step after it"}
    if (theirs := steps.get("Megatron-Core HybridDeviceOptimizer")) is not None:
        found.append(Row("cpu", "times Megatron's speed", theirs / steps["cpu"], "x"))
    save("optimizer", found)


if __name__ == "__main__":
    some(sys.argv[1:]) if len(sys.argv) > 1 else main()
