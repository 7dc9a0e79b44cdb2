"""`ebbtide plan`: the plan of a run on a machine that need not be this one. Needs no GPU, loads no weights, and imports
no torch, but for families that have to be traced."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ebbtide.config.parallel import ParallelConfig
from ebbtide.config.planner_keys import with_changes
from ebbtide.config.root import Config
from ebbtide.memory.plan import check_device_budget
from ebbtide.model.shape import Shape, with_lora
from ebbtide.parallel.costs import MeshShape, mesh_shape
from ebbtide.planner.fewer_gpus import note_fewer_gpus
from ebbtide.planner.holdings import plan_holdings
from ebbtide.planner.predict import Predictor
from ebbtide.planner.reward_models import reward_model_sizes
from ebbtide.planner.search import PlanResult, PlanSearch
from ebbtide.planner.shapes import frozen_shapes, plannable_shape
from ebbtide.planner.with_adapters import note_adapters
from ebbtide.policy.fused_costs import can_fuse
from ebbtide.system.machine import Machine, machine_for

HOPPER_GPUS = ("h100", "h200")


@dataclass(frozen=True)
class Hardware:
    """The hardware named on the command line; None stands for the usual value of that GPU."""

    gpu: str | None
    device_gib: float | None
    host_gib: float | None
    link: float | None
    """GB/s of a pinned copy over the host link."""
    network: float | None
    """GB/s from each GPU to other nodes."""
    gpus_per_node: int

    def sharing(self, parallel: ParallelConfig | None) -> MeshShape:
        return mesh_shape(parallel, size=None, node=self.gpus_per_node)

    def machine(self, config: Config) -> Machine:
        local_ranks = self.sharing(config.parallel).ranks_per_node
        return machine_for(self.gpu, self.device_gib, self.host_gib, self.link, self.network, local_ranks)


def _with_exact_decided(config: Config, hardware: Hardware, shape: Shape) -> Config:
    """The config with `rollout.exact` as a run would decide it (policy/exact.py), as far as that is known here."""
    if config.rollout.exact is not None:
        return config
    one = config.parallel is None and config.rollout.engine == "paged" and config.algorithm == "grpo"
    one = one and config.model.lora is None
    fused = can_fuse(shape, config.model.itemsize("cuda"), "cuda", 1)
    return with_changes(config, {"rollout.exact": one and fused and hardware.gpu in HOPPER_GPUS})


def plan_offline(config: Config, hardware: Hardware) -> tuple[PlanResult, Shape, Machine]:
    """The best plan for this config, with a note where fewer GPUs would be faster."""
    plan_holdings(config)
    machine = hardware.machine(config)
    check_device_budget(config.memory.budget_gib, machine.device_gib)
    shape = plannable_shape(config, "cuda")
    config = _with_exact_decided(config, hardware, shape)
    frozen, rewards = frozen_shapes(config, "cuda"), reward_model_sizes(config, "cuda")
    config.check_context(shape.context)

    def search(candidate: Config) -> PlanResult:
        machine = hardware.machine(candidate)
        itemsize, sharing = candidate.model.itemsize("cuda"), hardware.sharing(candidate.parallel)
        predictor = Predictor(
            with_lora(shape, candidate.model),
            machine,
            itemsize=itemsize,
            sharing=sharing,
            frozen=frozen,
            rewards=rewards,
        )
        return PlanSearch.for_config(predictor, candidate).choose(candidate)

    result = search(config)
    notes = [*note_fewer_gpus(config, result, search), *note_adapters(config, shape, result, search)]
    return replace(result, notes=notes), shape, machine
