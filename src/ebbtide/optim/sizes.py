"""How much memory the optimizer takes, and where. Pure Python, no torch: a plan is made from it before anything is loaded."""

from __future__ import annotations

from ebbtide.config.tree import Optimizer as OptimizerConfig
from ebbtide.memory.plan import Name

STREAMED_CHUNK = (
    16 * 2**20
)  # elements: 160 MiB of state, 3 ms on the link, so that what cannot overlap (the first fetch, the last return) is short
STREAMED_SLOTS = 3  # one arrives, one is stepped, one returns
CPU_CHUNK = 16 * 2**20  # elements whose weights go up at once
CPU_SLOTS = 4  # chunks of staging memory in each direction


def moment_bytes(config: OptimizerConfig) -> int:
    """Of one moment of one parameter."""
    return 4 if config.state_dtype == "float32" else 2


def grad_bytes(config: OptimizerConfig, weight: int) -> int:
    """Of one parameter's gradient, for a weight of so many bytes."""
    return 4 if config.grad_dtype == "float32" else weight


def low_bytes(weight: int) -> int:
    """Of what a weight lacks of its fp32 master."""
    return 0 if weight == 4 else 2


def staging_bytes(parameters: int, grad: int) -> int:
    """Pinned memory beside the state of the CPU's part, for so many parameters with gradients of so many bytes each."""
    return 2 * CPU_SLOTS * min(CPU_CHUNK, parameters) * grad


def ring_bytes(config: OptimizerConfig, parameters: int, weight: int) -> int:
    """Device memory through which streamed state passes while it is stepped."""
    streamed = parameters - round(config.on_cpu * parameters)
    if config.place != "streamed" or not streamed:
        return 0
    slots = min(STREAMED_SLOTS, -(-streamed // STREAMED_CHUNK))
    return slots * min(STREAMED_CHUNK, streamed) * (low_bytes(weight) + 2 * moment_bytes(config))


def state_bytes(config: OptimizerConfig, parameters: int, weight: int) -> tuple[dict[Name, int], dict[str, int]]:
    """(bytes on the device, bytes on the host in every phase) of each holding, for so many parameters of so many bytes each."""
    on_cpu = round(config.on_cpu * parameters)
    elsewhere = parameters - on_cpu
    moment, grad = moment_bytes(config), grad_bytes(config, weight)
    gpu_part: dict[Name, int] = {"master": low_bytes(weight) * elsewhere, "moments": 2 * moment * elsewhere}
    cpu_part = {"master": 4 * on_cpu, "moments": 2 * moment * on_cpu, "grads": grad * on_cpu, "staging": staging_bytes(on_cpu, grad)}
    if config.place != "streamed":
        return gpu_part, cpu_part
    return {}, cpu_part | {name: size + cpu_part[name] for name, size in gpu_part.items()}
