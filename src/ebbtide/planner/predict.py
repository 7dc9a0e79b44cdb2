"""Predicts the memory and the seconds of each phase of a step, for one rank of one model on one machine and any config:
a sum over the parts of the system, each of which states its own costs beside its code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ebbtide.checkpoint.costs import SAVE, SaveCosts
from ebbtide.config.root import Config
from ebbtide.config.train import Rehearsal
from ebbtide.memory.costs import WORKSPACE, HoldingBytes, Part, PhaseCost, PlannedRun
from ebbtide.memory.move_costs import (
    add_move_costs,
    add_offload_wait,
    device_bytes_by_phase,
    host_bytes_of,
    on_device_by_phase,
)
from ebbtide.memory.plan import HOST_SHARE, HoldingName, Phase, Plan
from ebbtide.model.shape import Shape
from ebbtide.model.workload import Workload
from ebbtide.optim.costs import OptimizerCosts
from ebbtide.parallel.costs import MeshShape
from ebbtide.parallel.rank_model import RankModel
from ebbtide.planner.holdings import plan_holdings
from ebbtide.planner.prediction import Prediction
from ebbtide.policy.activation_costs import ActivationPolicy
from ebbtide.policy.model_costs import FrozenCosts, FrozenShape, WeightsCosts, loading_bytes
from ebbtide.policy.stream_costs import StreamCosts
from ebbtide.policy.train_costs import TrainCosts
from ebbtide.rollout.generation_costs import GenerationCosts
from ebbtide.rollout.reward_costs import RewardCosts, RewardModelSize
from ebbtide.system.machine import Machine
from ebbtide.system.units import GIB

LIBRARIES = 96 * 2**20  # Device memory of matmul workspaces and rotary tables, allocated once.


class _Base(NamedTuple):
    """The holdings of a config that the plan places: they do not depend on activations and packing."""

    plan: Plan
    sizes: dict[HoldingName, int]
    host: int
    """Bytes on the host, of what lives there and of what is ever offloaded."""
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
        frozen: Mapping[HoldingName, FrozenShape] | None = None,
        rewards: Sequence[RewardModelSize] = (),
    ) -> None:
        """`frozen`: the shapes of frozen models that are not the policy's. `rewards`: the sizes of reward models."""
        self.shape, self.machine, self.sharing = shape, machine, sharing or MeshShape()
        self.on_cpu = on_cpu
        self._rank = RankModel(shape, machine, itemsize=itemsize, on_cpu=on_cpu, mesh=self.sharing)
        self._train = TrainCosts(self._rank, frozen)
        self._generation, self._saves = GenerationCosts(self._rank), SaveCosts(self._rank)
        self._rewards = RewardCosts(self._rank, rewards)
        self._parts: list[Part] = [
            WeightsCosts(self._rank),
            self._train,
            OptimizerCosts(self._rank),
            FrozenCosts(self._rank, frozen),
            self._rewards,
            self._saves,
            StreamCosts(self._rank),
        ]
        self._loading_bytes = loading_bytes(shape, itemsize, self.sharing, [*(frozen or {}).values()])
        each = self.sharing.ranks_per_node
        self._loading_bytes = max(self._loading_bytes, *(each * one.bytes for one in rewards), 0)
        self._bases: dict[tuple[object, ...], _Base] = {}

    def resolve_activations(self, config: Config) -> ActivationPolicy:
        """What `memory.activations` resolves to on this machine."""
        return self._train.resolve_activations(config)

    def activation_options(self, balanced: ActivationPolicy) -> list[dict[str, Any]]:
        """The settings of `memory.activations` that a plan tries; `balanced`: what that preset resolves to."""
        return self._train.activation_options(balanced)

    def predict(self, config: Config, work: Workload, budget: int, rehearsal: Rehearsal | None = None) -> Prediction:
        """The prediction for a config. `budget`: bytes that the device's allocator may use; the KV cache takes what
        generation leaves of it."""
        base, run = self._base(config, rehearsal), PlannedRun(config, work, budget, rehearsal)
        absent = {SAVE} if config.checkpoint is None else set()
        absent |= {"evaluate"} if config.evaluate is None else set()
        phases = {phase: PhaseCost(dict(on), base.host) for phase, on in base.where.items() if phase not in absent}
        for part in self._parts:
            part.add_costs(run, phases)
        # Forwards over held-out data come before an evaluation samples anything, and those of reward models when its KV
        # cache is free again.
        forwards = [self._train.add_evaluation] if config.held_out_examples else []
        forwards += [self._rewards.add_evaluation] if config.reward_models and "evaluate" in config.scored_in else []
        without_cache = [(add, PhaseCost(dict(phases["evaluate"].device))) for add in forwards]
        generation = self._generation.generation(run, phases)  # Its KV cache takes what the others leave.
        for add_forwards, evaluation in without_cache:
            add_forwards(run, evaluation)
            phases["evaluate"].then(evaluation)
            generation = replace(generation, min_peak=max(generation.min_peak, evaluation.peak))
        for phase in phases.values():
            phase.device[WORKSPACE] = phase.device.get(WORKSPACE, 0) + LIBRARIES * (self._rank.device_type == "cuda")
        for name, on in base.paths.items():
            add_move_costs(base.plan.specs[name], on, base.sizes[name], phases, self.machine.rates)
        add_offload_wait(base.plan, base.sizes, base.paths, phases, budget, self.machine.rates)
        activations, sharing = self.resolve_activations(config), self.sharing
        prediction = Prediction(config.cycle, phases, generation, activations, sharing, self._loading_bytes)
        copies = self._saves.copies(config, phases)
        if sharing.ranks_per_node * copies + prediction.host > host_limit(config, self.machine.host_gib):
            return replace(prediction, missing_save_bytes=copies)
        for phase in phases.values():  # The copies are pinned before the first step.
            phase.host += copies
        return prediction

    def _base(self, config: Config, rehearsal: Rehearsal | None) -> _Base:
        """The placed holdings of a config; many of the tried configs have them in common."""
        optimizer = config.optimizer
        rows = tuple(tuple(row) if row is not None else None for _, row in config.memory.offload)
        key = (optimizer.place, optimizer.cpu_fraction, optimizer.overlap, optimizer.state_dtype, optimizer.grad_dtype)
        memory = config.memory.preset, config.memory.stream_base, rows
        whole = (*key, *memory, *config.forward_passes.items(), *config.rollout.partial, rehearsal)
        if (found := self._bases.get(whole)) is None:
            plan = plan_holdings(config, self.sharing.shards)
            parts = [part.sizes(config, rehearsal) for part in self._parts] + [self._generation.sizes(config)]
            # Gradients are a row even where none stay on the device.
            sizes = {
                name: size
                for part in parts
                for name, size in part.device.items()
                if size or plan.specs[name].exists_in is not None
            }
            resident = {name: size for part in parts for name, size in part.host.items()}
            host = sum(host_bytes_of(plan, HoldingBytes(sizes, resident)).values())
            paths = {
                name: on_device_by_phase(plan, name)
                for name in plan.names
                if name in sizes and plan.specs[name].exists_in is None and plan.is_ever_offloaded(name)
            }
            found = self._bases[whole] = _Base(plan, sizes, host, device_bytes_by_phase(plan, sizes), paths)
        return found


def host_limit(config: Config, host_gib: float) -> float:
    """Bytes of host memory that a run may pin on a host with so much free memory."""
    budget = config.memory.host_budget_gib
    return GIB * (HOST_SHARE * host_gib if budget is None else min(budget, host_gib))
