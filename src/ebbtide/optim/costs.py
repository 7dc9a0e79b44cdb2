"""The memory that the optimizer needs, and where. This file imports no torch: a plan is computed with it before
anything is loaded."""

from __future__ import annotations

from ebbtide.config.optimizer import OptimizerConfig
from ebbtide.memory.plan import HoldingName, HoldingSpec
from ebbtide.system.units import ceil_div

# Elements per chunk: 160 MiB of state take 3 ms on the host link, so that what cannot overlap (the first fetch, the
# last copy back) is short.
STREAMED_CHUNK = 16 * 2**20
STREAMED_SLOTS = 3  # one is fetched, one is stepped, one is copied back
CPU_CHUNK = 16 * 2**20  # elements whose weights are copied to the device at once
CPU_SLOTS = 4  # chunks of staging memory in each direction

STATE: tuple[HoldingName, ...] = ("master", "moments")
"""The holdings of the optimizer state."""
RING: HoldingName = "streamed_ring"
"""The row of the device memory through which streamed state passes."""
STAGING: HoldingName = "staging"
"""The row of the CPU backend's pinned memory, for gradients and weights on their way."""


def optimizer_holdings(config: OptimizerConfig) -> list[HoldingSpec]:
    """Gradients, which exist from the first backward of a minibatch until its step, and the optimizer state."""
    host_setting = None
    if config.is_state_on_host:
        host_setting = (
            f"`optimizer.place: {config.place}`"
            if config.place != "device"
            else f"`optimizer.cpu_fraction: {config.cpu_fraction}`"
        )
    place = "set `optimizer.place` to streamed or cpu, or"
    advice = {"step": f"{place} raise `optimizer.cpu_fraction`", None: f"{place} choose a smaller model"}
    updates = frozenset({"train", "step"})
    ring = [HoldingSpec(RING, transient=True)] if config.place == "streamed" else []
    return [
        HoldingSpec("grads", updates, exists_in=updates),
        HoldingSpec("master", frozenset({"step"}), host_setting=host_setting),
        HoldingSpec("moments", frozenset({"step"}), host_setting=host_setting, advice=advice),
        *ring,
    ]


def moment_bytes(config: OptimizerConfig) -> int:
    """The bytes of one moment of one parameter."""
    return 4 if config.state_dtype == "float32" else 2


def grad_bytes(config: OptimizerConfig, itemsize: int) -> int:
    """The bytes of one parameter's gradient, for a weight of `itemsize` bytes."""
    return 4 if config.grad_dtype == "float32" else itemsize


def low_bytes(itemsize: int) -> int:
    """The bytes that are stored of an fp32 master in addition to its weight of `itemsize` bytes."""
    return 0 if itemsize == 4 else 2


def staging_bytes(parameters: int, grad: int) -> int:
    """The pinned staging memory of the CPU backend, for so many parameters with gradients of `grad` bytes each."""
    return 2 * CPU_SLOTS * min(CPU_CHUNK, parameters) * grad


def ring_bytes(config: OptimizerConfig, parameters: int, itemsize: int) -> int:
    """The device memory through which streamed state passes while it is stepped."""
    streamed = parameters - round(config.cpu_share * parameters)
    if config.place != "streamed" or not streamed:
        return 0
    slots = min(STREAMED_SLOTS, ceil_div(streamed, STREAMED_CHUNK))
    return slots * min(STREAMED_CHUNK, streamed) * (low_bytes(itemsize) + 2 * moment_bytes(config))


def state_bytes(
    config: OptimizerConfig, parameters: int, itemsize: int
) -> tuple[dict[HoldingName, int], dict[str, int]]:
    """(bytes on the device, bytes on the host in every phase) by holding, for so many parameters of `itemsize`
    bytes each."""
    on_cpu = round(config.cpu_share * parameters)
    elsewhere = parameters - on_cpu
    moment, grad = moment_bytes(config), grad_bytes(config, itemsize)
    gpu_part: dict[HoldingName, int] = {"master": low_bytes(itemsize) * elsewhere, "moments": 2 * moment * elsewhere}
    cpu_part = {
        "master": 4 * on_cpu,
        "moments": 2 * moment * on_cpu,
        "grads": grad * on_cpu,
        "staging": staging_bytes(on_cpu, grad),
    }
    if config.place != "streamed":
        return gpu_part, cpu_part
    return {}, cpu_part | {name: size + cpu_part[name] for name, size in gpu_part.items()}
