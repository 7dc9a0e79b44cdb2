"""A run's own plan: made for its machine before anything is loaded, compared with what is measured, and consulted
when memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from ebbtide.config.model_path import locate
from ebbtide.config.parallel import ParallelConfig
from ebbtide.config.planner_keys import settings_diff
from ebbtide.config.root import Config
from ebbtide.config.train import Rehearsal
from ebbtide.errors import UserError
from ebbtide.memory.host import free_host_bytes
from ebbtide.memory.plan import Phase, check_device_budget
from ebbtide.model.families import UnknownFamilyError
from ebbtide.model.load import model_config
from ebbtide.model.shape import Shape, find_shape, from_config, with_lora
from ebbtide.model.workload import Workload, max_workload
from ebbtide.parallel.comm import Comm
from ebbtide.parallel.costs import mesh_shape
from ebbtide.planner.predict import Predictor
from ebbtide.planner.render import as_json, compare, explain_misfit, summarize, to_arguments
from ebbtide.planner.reward_models import reward_model_sizes
from ebbtide.planner.search import PlanResult, PlanSearch
from ebbtide.planner.shapes import frozen_shapes, plannable_shape
from ebbtide.rollout.batch import Sample
from ebbtide.system.machine import Machine, cpu_machine, peak_flops, this_machine
from ebbtide.system.units import GIB, gib

T = TypeVar("T")

OOM_TARGET = 0.9  # Advice after an out-of-memory error is a plan that needs this fraction of what was available.


@dataclass(frozen=True)
class RunPlan:
    """The plan of one run on one machine."""

    requested: Config
    """The config before anything was chosen."""
    config: Config
    """The config with everything that was chosen."""
    result: PlanResult
    shape: Shape
    machine: Machine
    predictor: Predictor
    rehearsal: Rehearsal | None
    ranks: int = 1

    @property
    def budget_gib(self) -> float:
        """The device memory that the run may use."""
        return self.config.memory.budget_gib or self.machine.device_gib

    def summary(self) -> list[str]:
        """The plan in sentences."""
        return summarize(self.result, self.requested, self.machine)

    def as_json(self) -> dict[str, Any]:
        """The contents of plan.json."""
        return as_json(self.result, self.requested, self.shape, self.machine)

    def compare(
        self, samples: Sequence[Sample], lengths: Sequence[tuple[int, int]], metrics: Mapping[str, float]
    ) -> tuple[list[list[str]], list[str]]:
        """(a table, sentences on what is far off): a step predicted for the sequences that it had, compared with what
        was measured. `lengths`: (tokens without loss, tokens with loss) of each sequence that was trained on."""
        if not samples and not lengths:
            return [], []
        group_size, longest = self.config.step_size.samples, self.config.step_size.new_tokens
        found = [(len(sample.prompt.tokens), len(sample.completion.tokens)) for sample in samples] or lengths
        work = Workload(
            prompts=max(1, len(found) // group_size),
            samples=group_size,
            prompt_tokens=sum(before for before, _ in found) / len(found),
            new_tokens=sum(new for _, new in found) / len(found),
            longest=max(new for _, new in found),
            max_new_tokens=longest,
            trained=len(lengths),
            together=self.config.packed_together,
        )
        predicted = self.predictor.predict(self.config, work, int(self.budget_gib * GIB), self.rehearsal).phases
        measured = [phase for phase in predicted if f"peak_gib/{phase}" in metrics]
        held: dict[Phase, dict[str, int]] = {}
        for phase in measured:
            start = f"device_gib/{phase}/"
            held[phase] = {
                key.removeprefix(start): int(value * GIB) for key, value in metrics.items() if key.startswith(start)
            }
        seconds = {phase: metrics[f"seconds/{phase}"] for phase in measured}
        return compare(predicted, seconds, {phase: int(metrics[f"peak_gib/{phase}"] * GIB) for phase in measured}, held)

    def mfu(self, lengths: Sequence[tuple[int, int]], seconds: float) -> float | None:
        """Model FLOPs utilization: the fraction of the GPUs' peak that training on sequences of (tokens without loss,
        tokens with loss) reached in so many seconds; None if the peak is not known."""
        peak = peak_flops(self.machine.name)
        if peak is None or not lengths or seconds <= 0:
            return None
        return self.config.train.epochs * self.shape.train_flops(lengths) / (seconds * peak * self.ranks)

    def oom_advice(self, phase: Phase | None) -> str:
        """Advice when memory ran out in a phase (None: before the first): what was predicted, and the nearest plan that
        needs less."""
        found = self.result.candidate.prediction.phases.get(phase) if phase is not None else None
        sentences = [f"The plan predicted {gib(found.peak):.3g} GiB in {phase}"] if found is not None else []
        less = OOM_TARGET * min(self.budget_gib, gib(found.peak) if found is not None else self.budget_gib)
        nearest = PlanSearch(
            self.predictor, max_workload(self.config), less, self.machine.host_gib, self.rehearsal
        ).nearest(self.config)
        if nearest is None:
            return ". ".join([*sentences, "No plan for this model and these lengths needs much less"])
        # The advice includes a budget: otherwise the KV cache would use what the other holdings give up.
        changes = to_arguments([f"memory.budget_gib={less:.3g}", *settings_diff(self.config, nearest.config)])
        return ". ".join(
            [*sentences, f"The nearest plan that needs less: {changes} ({gib(nearest.prediction.peak):.3g} GiB)"]
        )


def plan_run(
    config: Config, device: torch.device, rehearsal: Rehearsal | None, comm: Comm, note: Callable[[str], None]
) -> RunPlan | None:
    """Makes the plan of a run and notes it. There is no plan (None) on a CPU without a budget, and for families that
    cannot be planned. All ranks make the same plan."""
    on_cpu = device.type != "cuda"
    if on_cpu and config.memory.budget_gib is None:
        return None
    try:
        shape = _shape(config, device.type)
        frozen, rewards = frozen_shapes(config, device.type), reward_model_sizes(config, device.type)
    except UserError as error:
        note(f"no plan: {error}")
        return None
    if comm.size > 1 and config.parallel is None:  # The ranks were started by `torchrun`.
        config = config.model_copy(update={"parallel": ParallelConfig()})
    machine, local_size = _agree(_machine(device, comm.local_size), comm)
    check_device_budget(config.memory.budget_gib, machine.device_gib)
    shared = mesh_shape(config.parallel, comm.size, local_size)
    predictor = Predictor(
        shape,
        machine,
        itemsize=config.model.itemsize(device.type),
        on_cpu=on_cpu,
        sharing=shared,
        frozen=frozen,
        rewards=rewards,
    )
    if shape.is_traced:
        try:
            predictor.resolve_activations(config)
        except UserError as error:  # A run may have more of `memory.activations` than a trace knows.
            note(f"no plan: {error}")
            return None
    chosen = PlanSearch.for_config(predictor, config, rehearsal).choose(config)
    if not chosen.fits and config.memory.budget_gib is not None and config.memory.plan == "auto":
        raise UserError(explain_misfit(chosen, config, machine))
    plan = RunPlan(config, chosen.candidate.config, chosen, shape, machine, predictor, rehearsal, comm.size)
    for line in plan.summary():
        note(f"plan: {line}")
    return plan


def _shape(config: Config, device_type: str) -> Shape:
    """The shape of the model that will be loaded, by the description of its family or by a trace."""
    try:
        return model_shape(config)
    except UnknownFamilyError:
        return plannable_shape(config, device_type)


def model_shape(config: Config) -> Shape:
    """The shape of the model that will be loaded, of a family that is described."""
    if config.model.path is not None and locate(config.model.path).gguf is not None:
        return find_shape(config.model)  # transformers takes seconds to read the header of a GGUF file.
    found = from_config(model_config(config).get_text_config().to_dict(), f"`model.path: {config.model.path}`")
    return with_lora(found, config.model)


def _machine(device: torch.device, local_size: int) -> Machine:
    if device.type != "cuda":
        return cpu_machine(free_host_bytes(), local_size)
    total = torch.cuda.get_device_properties(device).total_memory
    return this_machine(torch.cuda.get_device_name(device), total, free_host_bytes())


def _agree(machine: Machine, comm: Comm) -> tuple[Machine, int]:
    """(the machine, the ranks of a node) that all ranks plan for: rank 0's machine with the smallest memory that any
    rank has, and the largest number of ranks on a node."""
    everyone = comm.all_gather((machine, comm.local_size))
    first, machines = everyone[0][0], [one for one, _ in everyone]
    smallest = {name: min(getattr(one, name) for one in machines) for name in ("device_gib", "host_gib")}
    return replace(first, **smallest), max(local_size for _, local_size in everyone)
