"""The memory and the seconds that the optimizer needs, and where. This file imports no torch: a plan is computed with
it before anything is loaded.

The constants of seconds are fitted to an H200 (benchmarks/plan.py, stage `fit`); other machines differ by their rates.
"""

from __future__ import annotations

from collections.abc import Sequence

from ebbtide.config.optimizer import OptimizerConfig
from ebbtide.config.root import Config
from ebbtide.config.train import Rehearsal
from ebbtide.memory.costs import HoldingBytes, PhaseCosts, PlannedRun
from ebbtide.memory.plan import HoldingName, HoldingSpec
from ebbtide.parallel.rank_model import RankModel
from ebbtide.system.units import ceil_div

# Elements per chunk: 160 MiB of state take 3 ms on the host link, so that what cannot overlap (the first fetch, the
# last copy back) is short.
STREAMED_CHUNK = 16 * 2**20
STREAMED_SLOTS = 3  # one is fetched, one is stepped, one is copied back
CPU_CHUNK = 16 * 2**20  # elements whose weights are copied to the device at once
CPU_SLOTS = 4  # chunks of staging memory in each direction

# Operations of the host before an optimizer step on the device starts: always, and per tensor.
STEP_OPS, TENSOR_OPS = 420, 2.0
STEP_RATE = 0.92  # Rate at which an optimizer step on the device reads and writes, as a fraction of the copy rate.
# Rate at which later micro-batches' gradients are accumulated on the CPU while compute waits, as a multiple of the rate
# of a CPU step.
HOST_ACCUMULATION_RATE = 9.0
CPU_STARTS = 0.004  # Seconds before and after a step on the CPU.
STREAM_RATE = 0.87  # Fraction of the host link's rate when both directions are busy.
STREAM_AND_CPU = 0.85  # Fraction of the summed seconds when half is streamed while the CPU steps the rest.

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


class OptimizerCosts:
    """The gradients and the optimizer of one rank."""

    def __init__(self, rank: RankModel) -> None:
        self._rank = rank

    @staticmethod
    def holdings(config: Config, shards: int) -> Sequence[HoldingSpec]:
        return optimizer_holdings(config.optimizer)

    def sizes(self, config: Config, rehearsal: Rehearsal | None) -> HoldingBytes:
        """A rehearsal has no gradients, and that of `none` no optimizer."""
        optimizer, rank = config.optimizer, self._rank
        found = HoldingBytes({}, {})
        if rehearsal != "none":
            found = HoldingBytes(*state_bytes(optimizer, rank.trained, rank.itemsize))
        on_device = rank.trained
        # Gradients that go to the CPU leave during the backward: whole tensors, or with several ranks whole blocks.
        if optimizer.overlap:
            on_device -= round(optimizer.cpu_share * rank.trained)
            if rank.shape.lora is None:
                on_device = rank.tp_shape.round_up_to_tensors(
                    on_device, rank.mesh.fsdp_size, grouped=rank.mesh.size > 1
                )
        found.device["grads"] = grad_bytes(optimizer, rank.itemsize) * on_device if rehearsal is None else 0
        return found

    def add_costs(self, run: PlannedRun, phases: PhaseCosts) -> None:
        if run.rehearsal is not None or "step" not in phases:
            return
        optimizer, train, rank, step = run.config.optimizer, run.config.train, self._rank, phases["step"]
        if ring := ring_bytes(optimizer, rank.trained, rank.itemsize):
            step.device[RING] = ring
        micro_batches = run.work.pack(train.microbatch_tokens, train.minibatches, rank.mesh.data).passes
        phases["train"].seconds += run.updates * self.host_accumulation(optimizer, micro_batches)
        seconds, exposed = self.step(optimizer)
        step.seconds, step.exposed = run.updates * seconds, run.updates * exposed
        # Gradients for the CPU's step and the weights that it returns, and streamed state, cross the host link.
        on_cpu = round(optimizer.cpu_share * rank.trained)
        moved, grads = rank.itemsize * on_cpu, grad_bytes(optimizer, rank.itemsize) * on_cpu
        if optimizer.overlap:
            phases["train"].moved += run.updates * micro_batches * grads
        else:
            moved += grads
        if optimizer.place == "streamed":
            moved += 2 * (low_bytes(rank.itemsize) + 2 * moment_bytes(optimizer)) * (rank.trained - on_cpu)
        step.moved += run.updates * moved

    def step(self, config: OptimizerConfig) -> tuple[float, float]:
        """(seconds of an optimizer step, exposed seconds among them in which compute waits for the host link)."""
        rates, parameters, itemsize = self._rank.machine.rates, self._rank.trained, self._rank.itemsize
        cpu_parameters = config.cpu_share * parameters
        gpu_parameters = parameters - cpu_parameters
        state = low_bytes(itemsize) + 2 * moment_bytes(config)
        # Weights and state are read and written; gradients are read twice, once for their norm.
        touched = 2 * (itemsize + state + grad_bytes(config, itemsize))
        launches = STEP_OPS + (1 - config.cpu_share) * self._rank.tp_shape.trained_tensor_count * TENSOR_OPS
        on_device, exposed = gpu_parameters * touched / (STEP_RATE * rates.copy) + launches / rates.host_op, 0.0
        if config.place == "streamed":
            streamed = gpu_parameters * state / (STREAM_RATE * min(rates.link_out, rates.link_in))
            exposed = max(0.0, streamed - on_device)
            on_device += exposed
        # The ranks of a node share its cores and memory.
        with_cpu = self._rank.mesh.ranks_per_node * cpu_parameters / rates.cpu_adam
        with_cpu += CPU_STARTS if cpu_parameters else 0.0
        if config.place == "streamed" and cpu_parameters:  # Both use the bandwidth of the host's memory.
            return STREAM_AND_CPU * (on_device + with_cpu), STREAM_AND_CPU * exposed
        return max(on_device, with_cpu), exposed

    def host_accumulation(self, config: OptimizerConfig, micro_batches: int) -> float:
        """Additional seconds of an update's forwards and backwards if gradients are accumulated on the host."""
        rank = self._rank
        accumulated = (micro_batches - 1) * rank.mesh.ranks_per_node * config.cpu_share * rank.trained
        return accumulated / (HOST_ACCUMULATION_RATE * rank.machine.rates.cpu_adam)
