"""The largest model that trains one step on this GPU, in each mode of the optimizer: found by trying.

    python benchmarks/largest.py [MODE]...

Blocks of the Qwen3-8B width (193 M parameters each) are added until a forward, a backward and an optimizer step no
longer fit on the device, or the state no longer fits in host memory (4 GiB of it are left to the system). Each try
is a process of its own, and takes a minute: modes that are not named keep the figures of an earlier run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from common import Row, kept, save

from ebbtide.config import load
from ebbtide.config.loss import LossConfig
from ebbtide.errors import UserError
from ebbtide.memory.host import free_host_bytes
from ebbtide.policy.datum import trajectory
from ebbtide.policy.losses import build_loss
from ebbtide.worker import Worker

CONFIG = str(Path(__file__).parent / "configs" / "qwen3-1.7b-sft.yaml")
WIDE = ["model.scratch.hidden=4096", "model.scratch.heads=32", "model.scratch.kv_heads=8", "model.scratch.mlp=12288"]
GIB = 2**30
STEP = 2  # blocks more, or fewer, at each try
# Mode -> (options, blocks to begin with).
MODES = {
    "device": ([], 50),
    "streamed": (["optimizer.place=streamed"], 62),
    "cpu": (["optimizer.place=cpu"], 44),
    "split, half cpu, half device": (["optimizer.cpu_fraction=0.5"], 90),
}


def attempt(mode: str, layers: int) -> dict[str, float]:
    """One step of a model of so many blocks; {} where it does not fit."""
    options = [
        *MODES[mode][0],
        *WIDE,
        f"model.scratch.layers={layers}",
        f"memory.host_budget_gib={free_host_bytes() / GIB - 4:.2f}",
    ]
    try:
        with Worker(load(CONFIG, options)) as worker:
            sequences = [trajectory([1] * 126, [2] * 256, [-5.0] * 256, advantage=1.0, weight=1 / 256)]
            worker.forward_backward(sequences, build_loss(LossConfig()))
            torch.cuda.synchronize()
            start = time.perf_counter()
            figures = worker.optim_step(1e-6)
            torch.cuda.synchronize()
            assert figures["grad_norm"] > 0
            return {
                "parameters": sum(weight.numel() for weight in worker.policy.model.parameters()) / 1e9,
                "seconds": time.perf_counter() - start,
                "device": torch.cuda.max_memory_allocated() / GIB,
                "host": worker.residency.host_bytes / GIB,
            }
    except (UserError, torch.OutOfMemoryError) as error:
        print(f"{mode}, {layers} blocks: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        return {}


def tried(mode: str, layers: int) -> dict[str, float]:
    done = subprocess.run([sys.executable, __file__, mode, str(layers)], stdout=subprocess.PIPE, text=True, check=False)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
    print(f"{mode}, {layers} blocks: {found or 'does not fit'}", flush=True)
    return found


def largest(mode: str) -> dict[str, float]:
    layers = MODES[mode][1]
    found = tried(mode, layers)
    while not found:
        layers -= STEP
        found = tried(mode, layers)
        if found:
            return found
    while more := tried(mode, layers + STEP):
        layers, found = layers + STEP, more
    return found


def main(modes: list[str]) -> None:
    rows = kept("largest", modes.__contains__)
    for mode in modes:
        found = largest(mode)
        rows += [
            Row(mode, "parameters", found["parameters"], "billion"),
            Row(mode, "peak on the device", found["device"], "GiB"),
            Row(mode, "host memory", found["host"], "GiB"),
            Row(mode, "first step", found["seconds"], "s"),
        ]
    save("largest", rows)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[2].isdigit():
        print(json.dumps(attempt(sys.argv[1], int(sys.argv[2]))))
    else:
        main(sys.argv[1:] or list(MODES))
