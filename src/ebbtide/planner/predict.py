"""Predicts the memory and the seconds of each phase of a step, for one rank of one model on one machine and any
config. The memory of train is in train_memory.py, generation in generation_costs.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from ebbtide.checkpoint.costs import copied_bytes
from ebbtide.config.rollout import VllmConfig
from ebbtide.config.root import Config
from ebbtide.config.train import Rehearsal
from ebbtide.memory.plan import HOST_SHARE, HoldingName, Phase, Plan
from ebbtide.model.shape import Shape
from ebbtide.optim.costs import RING, grad_bytes, low_bytes, moment_bytes, ring_bytes, state_bytes
from ebbtide.parallel.costs import CommTime, GatherCosts, MeshShape
from ebbtide.planner.generation_costs import GenerationCosts, cache_costs_of
from ebbtide.planner.holdings import plan_holdings
from ebbtide.planner.moves import add_move_costs, add_offload_wait, device_bytes_by_phase, on_device_by_phase
from ebbtide.planner.prediction import Generation, PhaseCost, Prediction, Seconds
from ebbtide.planner.speed import Speed
from ebbtide.planner.train_memory import TrainMemory
from ebbtide.planner.workload import MicroBatchSize, Workload
from ebbtide.policy.activation_costs import (
    LINK_SHARE,
    ActivationPolicy,
    activation_bytes,
    recomputes_whole_block,
    resolve_policy,
)
from ebbtide.rollout.paged.cache_costs import BLOCK_SIZES
from ebbtide.rollout.paged.scheduler import max_blocks
from ebbtide.system.machine import Machine
from ebbtide.system.units import GIB

PROBE = 8192  # Tokens of the forward by which a run checks `memory.activations` against the host link.
LIBRARIES = 96 * 2**20  # Device memory of matmul workspaces and rotary tables, allocated once.


class _Base(NamedTuple):
    """The holdings of a config, which do not depend on activations and packing."""

    plan: Plan
    sizes: dict[HoldingName, int]
    host: int
    where: dict[Phase, dict[str, int]]
    """Bytes on the device, by phase and holding."""
    paths: dict[HoldingName, dict[Phase, bool]]
    """For each holding that ever moves: whether it is on the device in a phase."""


class Predictor:
    """Predicts one rank of one model on one machine, with `predict` for each config that is tried. With several ranks
    it is rank 0, which has the largest shards."""

    def __init__(
        self,
        shape: Shape,
        machine: Machine,
        *,
        itemsize: int = 2,
        on_cpu: bool = False,
        sharing: MeshShape | None = None,
    ) -> None:
        self.shape, self.machine, self._itemsize = shape, machine, itemsize
        self.sharing = sharing or MeshShape()
        self._tp_shape = shape.tensor_parallel_shape(self.sharing.tensor)
        """The shape that this rank computes with in training (tensor parallelism). Generation has the whole model."""
        self._shard_parameters = self._tp_shape.model_shard(self.sharing.fsdp_size)
        """Parameters of this rank's shard."""
        self._gathers = (
            GatherCosts(shape, self._tp_shape, self.sharing, machine.links, itemsize) if self.sharing.size > 1 else None
        )
        self._kind = "cpu" if on_cpu else "cuda"
        self._speed = Speed(
            self._tp_shape,
            machine.rates,
            itemsize,
            self._shard_parameters,
            self.sharing.ranks_per_node,
            groups=machine.has_grouped_matmul,
        )
        self._train_memory = TrainMemory(self._tp_shape, self.sharing, self._gathers, itemsize)
        whole_speed = Speed(shape, machine.rates, itemsize, groups=machine.has_grouped_matmul)
        self._generation = GenerationCosts(
            shape, machine, self.sharing, self._gathers, whole_speed, itemsize, self._kind
        )
        # Caches of what the tried configs have in common.
        self._bases: dict[tuple[object, ...], _Base] = {}
        self._forward_cache: dict[tuple[int, Workload], Seconds] = {}
        self._update_cache: dict[tuple[int, int, Workload, ActivationPolicy, int, float], tuple[int, Seconds]] = {}

    def predict(self, config: Config, work: Workload, budget: int, rehearsal: Rehearsal | None = None) -> Prediction:
        """The prediction for a config. `budget`: bytes that the device's allocator may use; the KV cache takes what
        generation leaves of it."""
        base = self._base(config, rehearsal)
        phases = {phase: PhaseCost(dict(on), base.host) for phase, on in base.where.items()}
        if config.rollout.engine == "vllm":
            vllm = config.rollout.vllm or VllmConfig()
            for at, phase in phases.items():
                if at in ("generate", "evaluate") or vllm.sleep_level == 0:
                    # vLLM's share includes its copy of the weights.
                    phase.device["kv_cache"] = int(vllm.memory_share * self.machine.device_gib * GIB)
        choice = self.resolve_activations(config)
        if config.forward_passes.get("logprob"):
            self._train_memory.set_forward(config, work, phases["logprob"])
        if rehearsal is not None:
            self._train_memory.set_forward(config, work, phases["train"])
        else:
            self._train_memory.set_train(config, work, choice, phases["train"])
            if ring := ring_bytes(config.optimizer, self._shard_parameters, self._itemsize):
                phases["step"].device[RING] = ring
        # A replay generates nothing.
        generation = Generation(None, BLOCK_SIZES[self._kind], 0, cache_is_full_size=True, concurrent=0, min_peak=0.0)
        if config.evaluate is not None:
            tests = replace(work, prompts=config.evaluate.problems, samples=config.evaluate.samples)
            generation = self._generation.set_costs(config, tests, phases["evaluate"], budget)
        if config.rollout.replay is None:
            generation = self._generation.set_costs(config, work, phases["generate"], budget)
        if config.evaluate is None:
            del phases["evaluate"]
        if config.checkpoint is None:
            del phases["save"]
        for phase in phases.values():
            phase.device["workspace"] = phase.device.get("workspace", 0) + LIBRARIES * (self._kind == "cuda")
        self._set_seconds(config, work, choice, phases, rehearsal)
        for name, on in base.paths.items():
            add_move_costs(base.plan.specs[name], on, base.sizes[name], phases, self.machine.rates)
        add_offload_wait(base.plan, base.sizes, base.paths, phases, budget, self.machine.rates)
        loading = self.sharing.ranks_per_node * self._itemsize * self.shape.parameters if self.sharing.shards > 1 else 0
        copies = self._save_copies(config, phases)
        prediction = Prediction(config.cycle, phases, generation, choice, self.sharing, loading)
        if self.sharing.ranks_per_node * copies + prediction.host > host_limit(config, self.machine.host_gib):
            return replace(prediction, missing_save_bytes=copies)
        for phase in phases.values():  # The copies are pinned before the first step.
            phase.host += copies
        return prediction

    def _save_copies(self, config: Config, phases: Mapping[Phase, PhaseCost]) -> int:
        """Bytes of host memory for the copies of asynchronous saves."""
        if config.checkpoint is None or not config.checkpoint.async_save:
            return 0
        on = phases["save"].device
        return copied_bytes(on["weights"], on.get("master", 0) + on.get("moments", 0), self.shape.largest_tensor)

    def _base(self, config: Config, rehearsal: Rehearsal | None) -> _Base:
        """The holdings of a config; many of the tried configs have them in common."""
        optimizer, offload = config.optimizer, config.memory.offload
        rows = tuple(tuple(row) if row is not None else None for _, row in offload)
        key = (optimizer.place, optimizer.cpu_fraction, optimizer.overlap, optimizer.state_dtype, optimizer.grad_dtype)
        whole = (*key, config.memory.preset, rows, *config.forward_passes.items(), *config.rollout.partial, rehearsal)
        if (found := self._bases.get(whole)) is None:
            plan = plan_holdings(config)
            sizes, resident = self._holdings(config, optimizer=rehearsal != "none")
            if rehearsal is not None:
                sizes["grads"] = 0
            paths: dict[HoldingName, dict[Phase, bool]] = {
                name: on_device_by_phase(plan, name)
                for name in plan.names
                if name in sizes and plan.specs[name].exists_in is None and plan.is_ever_offloaded(name)
            }
            # Host memory for a holding that is ever offloaded is pinned once, and stays.
            host = sum(resident.values()) + sum(sizes[name] for name in paths)
            found = self._bases[whole] = _Base(plan, sizes, host, device_bytes_by_phase(plan, sizes), paths)
        return found

    def resolve_activations(self, config: Config) -> ActivationPolicy:
        """What `memory.activations` resolves to on this machine, checked against the host link with a forward of the
        same length as in a run."""
        tokens = min(PROBE, config.train.microbatch_tokens)
        length = min(1024, tokens, config.max_sequence_tokens)
        both, _ = self._speed.update(MicroBatchSize(tokens, tokens), length, ActivationPolicy(), 0)
        layers = max(1, self._tp_shape.layers - config.memory.activations.keep_last)
        carried = LINK_SHARE * self.machine.rates.link_out * both / 3 / tokens / layers
        return resolve_policy(
            config.memory.activations, self._tp_shape, self._itemsize, carried, gated=self.machine.is_timed
        )

    # Memory

    def _holdings(self, config: Config, *, optimizer: bool) -> tuple[dict[HoldingName, int], dict[str, int]]:
        """(bytes of holdings that are on the device unless offloaded, bytes of those that are always on the host)."""
        parameters = self._shard_parameters
        moving, resident = state_bytes(config.optimizer, parameters, self._itemsize) if optimizer else ({}, {})
        sizes: dict[HoldingName, int] = {"weights": self._itemsize * parameters, **moving}
        on_device = parameters
        # Gradients that go to the CPU leave during the backward: whole tensors, or with several ranks whole blocks.
        if config.optimizer.overlap:
            on_device -= round(config.optimizer.cpu_share * parameters)
            on_device = self._tp_shape.round_up_to_tensors(
                on_device, self.sharing.fsdp_size, grouped=self.sharing.size > 1
            )
        sizes["grads"] = grad_bytes(config.optimizer, self._itemsize) * on_device
        if config.has_reference:
            sizes["reference"] = self._itemsize * parameters
        if config.rollout.partial.kv_cache == "keep":
            rollout, block = config.rollout, BLOCK_SIZES[self._kind]
            blocks = max_blocks(
                rollout.partial.extra_prompts,
                rollout.max_prompt_tokens,
                rollout.group_size,
                rollout.max_new_tokens,
                block,
            )
            sizes["kv_cache"] = blocks * block * cache_costs_of(self.shape).bytes_per_token(self._itemsize)
        return {name: size for name, size in sizes.items() if size or name == "grads"}, resident

    # Seconds

    def _set_seconds(
        self,
        config: Config,
        work: Workload,
        choice: ActivationPolicy,
        phases: Mapping[Phase, PhaseCost],
        rehearsal: Rehearsal | None,
    ) -> None:
        """Adds the seconds of logprob, train, step and save, and the bytes that cross the host link in them."""
        train = config.train
        updates = train.minibatches * train.epochs
        forwards = len(config.forward_passes.get("logprob", ()))
        phases["logprob"].add_seconds(forwards, self._forward_seconds(train.microbatch_tokens, work))
        if rehearsal is not None:
            phases["train"].add_seconds(train.epochs, self._forward_seconds(train.microbatch_tokens, work))
        else:
            grads_leaving = config.optimizer.cpu_share if config.optimizer.overlap else 0.0
            keep_last = config.memory.activations.keep_last
            count, update = self._update_seconds(
                train.microbatch_tokens, train.minibatches, work, choice, keep_last, grads_leaving
            )
            phases["train"].add_seconds(updates, update)
            phases["train"].seconds += updates * self._speed.host_accumulation(config.optimizer, count)
            stepped, exposed = self._speed.step(config.optimizer)
            phases["step"].seconds, phases["step"].exposed = updates * stepped, updates * exposed
            for phase, size in self._link_bytes(config, work, choice).items():
                phases[phase].moved += updates * size
        if "save" in phases:
            copied = sum(phases["save"].device.get(name, 0) for name in ("weights", "master", "moments"))
            phases["save"].seconds = phases["save"].exposed = copied / self.machine.rates.link_out
            phases["save"].moved += copied

    def _link_bytes(self, config: Config, work: Workload, choice: ActivationPolicy) -> dict[Phase, int]:
        """Bytes that cross the host link in an update, besides holdings that move: activations, gradients for the CPU's
        step and the weights that it returns, and streamed optimizer state."""
        optimizer, train = config.optimizer, config.train
        on_cpu = round(optimizer.cpu_share * self._shard_parameters)
        packed = work.pack(train.microbatch_tokens, train.minibatches, self.sharing.data)
        offloaded = activation_bytes(
            self._tp_shape, self._itemsize, choice, config.memory.activations.keep_last
        ).offloaded
        in_train = 2 * offloaded * sum(count * part.tokens for part, count in packed.parts)
        in_step = self._itemsize * on_cpu
        grads = grad_bytes(optimizer, self._itemsize) * on_cpu
        if optimizer.overlap:
            in_train += packed.passes * grads
        else:
            in_step += grads
        if optimizer.place == "streamed":
            in_step += 2 * (low_bytes(self._itemsize) + 2 * moment_bytes(optimizer)) * (self._shard_parameters - on_cpu)
        return {"train": round(in_train), "step": in_step}

    def _forward_seconds(self, tokens: int, work: Workload) -> Seconds:
        """Seconds of a forward over all samples without gradient."""
        key = tokens, work
        if (found := self._forward_cache.get(key)) is None:
            length, packed = work.prompt_tokens + work.new_tokens, work.pack(tokens, ranks=self.sharing.data)
            seconds, communication, exposed = (
                sum(count * self._speed.logprobs(part, length) for part, count in packed.parts),
                0.0,
                0.0,
            )
            if self._gathers is not None:
                tensor_parallel = sum(
                    count * self._gathers.tp_allreduce_seconds(part.tokens, backward=False)
                    for part, count in packed.parts
                )
                blocks = tensor_parallel + sum(
                    count * self._speed.forward(part.tokens, length) for part, count in packed.parts
                )
                gathered = self._gathers.forward_time(packed.passes, blocks / packed.passes)
                communication, exposed = tensor_parallel + gathered.seconds, tensor_parallel + gathered.exposed
            found = self._forward_cache[key] = Seconds(seconds + exposed, 0.0, communication, exposed)
        return found

    def _update_seconds(
        self,
        tokens: int,
        minibatches: int,
        work: Workload,
        choice: ActivationPolicy,
        keep_last: int,
        grads_leaving: float,
    ) -> tuple[int, Seconds]:
        """(number of micro-batches, seconds of their forwards and backwards) of a minibatch."""
        key = tokens, minibatches, work, choice, keep_last, grads_leaving
        if (found := self._update_cache.get(key)) is None:
            length, packed = work.prompt_tokens + work.new_tokens, work.pack(tokens, minibatches, self.sharing.data)
            seconds, exposed, communication, exposed_communication = 0.0, 0.0, 0.0, 0.0
            for part, count in packed.parts:
                both, late = self._speed.update(part, length, choice, keep_last, grads_leaving)
                comm = self._update_communication(part, length, choice, both - late)
                seconds, exposed = seconds + count * (both + comm.exposed), exposed + count * late
                communication, exposed_communication = (
                    communication + count * comm.seconds,
                    exposed_communication + count * comm.exposed,
                )
            found = self._update_cache[key] = (
                packed.passes,
                Seconds(seconds, exposed, communication, exposed_communication),
            )
        return found

    def _update_communication(
        self, part: MicroBatchSize, length: float, choice: ActivationPolicy, compute: float
    ) -> CommTime:
        """Communication of a micro-batch's forward and backward, which take `compute` seconds by themselves."""
        if self._gathers is None:
            return CommTime(0.0, 0.0)
        recomputed = recomputes_whole_block(self._tp_shape, choice)
        before, whole = (
            self._gathers.tp_allreduce_seconds(part.tokens, backward=backward, recompute=backward and recomputed)
            for backward in (False, True)
        )
        forward = self._speed.forward(part.tokens, length)
        backward = max(0.0, compute - forward - self._speed.head(part.completion_tokens, 4))
        found = self._gathers.update_time(forward + before, backward + whole - before)
        return CommTime(whole + found.seconds, whole + found.exposed)


def host_limit(config: Config, host_gib: float) -> float:
    """Bytes of host memory that a run may pin on a host with so much free memory."""
    budget = config.memory.host_budget_gib
    return GIB * (HOST_SHARE * host_gib if budget is None else min(budget, host_gib))
