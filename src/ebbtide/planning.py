"""A run's own plan: made for the machine that it runs on before anything is loaded, held against what is measured, and asked when memory runs out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch

from ebbtide.batch import Sample
from ebbtide.config.model_path import locate
from ebbtide.config.tree import Cluster, Config, Rehearsal
from ebbtide.errors import UserError
from ebbtide.memory.arena import GIB
from ebbtide.memory.host import free_host_bytes
from ebbtide.memory.plan import PHASES, Phase, check_budget
from ebbtide.planner.choose import Chooser, Chosen, settings
from ebbtide.planner.machine import Machine, cpu_machine, peak_flops, this_machine
from ebbtide.planner.predict import Predictor
from ebbtide.planner.ranks import sharing
from ebbtide.planner.shape import Shape, find_shape, from_config
from ebbtide.planner.show import as_json, compared, misfit, on_the_command_line, words
from ebbtide.planner.work import Work, most_work
from ebbtide.policy.model import model_config, pick_dtype

T = TypeVar("T")

NEARLY = 0.9  # of what was there when memory ran out: what a better plan should do with


@dataclass(frozen=True)
class RunPlan:
    """Of one run on one machine."""

    asked: Config
    config: Config
    """With all that was chosen in it."""
    chosen: Chosen
    shape: Shape
    machine: Machine
    predictor: Predictor
    rehearsal: Rehearsal | None
    ranks: int = 1

    @property
    def budget_gib(self) -> float:
        return self.config.memory.budget_gib or self.machine.device_gib

    def words(self) -> list[str]:
        return words(self.chosen, self.asked, self.machine)

    def as_json(self) -> dict[str, Any]:
        return as_json(self.chosen, self.asked, self.shape, self.machine)

    def against(self, samples: Sequence[Sample], metrics: Mapping[str, float]) -> tuple[list[list[str]], list[str]]:
        """A step as it was sampled: predicted for those very lengths, and measured. (A table, what is far off by holding.)"""
        if not samples:
            return [], []
        rollout = self.config.rollout
        work = Work(
            prompts=max(1, len(samples) // rollout.samples),
            samples=rollout.samples,
            prompt=sum(len(sample.prompt.tokens) for sample in samples) / len(samples),
            new=sum(len(sample.completion.tokens) for sample in samples) / len(samples),
            longest=max(len(sample.completion.tokens) for sample in samples),
            most_new=rollout.max_new_tokens,
            trained=int(metrics.get("samples_trained", len(samples))),
        )
        foretold = self.predictor.of(self.config, work, int(self.budget_gib * GIB), self.rehearsal).phases
        measured = [phase for phase in PHASES if f"peak_gib/{phase}" in metrics]
        held: dict[Phase, dict[str, int]] = {}
        for phase in measured:
            start = f"device_gib/{phase}/"
            held[phase] = {key.removeprefix(start): int(value * GIB) for key, value in metrics.items() if key.startswith(start)}
        seconds = {phase: metrics[f"seconds/{phase}"] for phase in measured}
        return compared(foretold, seconds, {phase: int(metrics[f"peak_gib/{phase}"] * GIB) for phase in measured}, held)

    def mfu(self, samples: Sequence[Sample], seconds: float) -> float | None:
        """The share of the GPUs' peak that training on these samples reached in so many seconds; None where that peak is not known."""
        peak = peak_flops(self.machine.name)
        lengths = [(len(sample.prompt.tokens), len(sample.completion.tokens)) for sample in samples if sample.trained]
        if peak is None or not lengths or seconds <= 0:
            return None
        return self.config.train.epochs * self.shape.train_flops(lengths) / (seconds * peak * self.ranks)

    def view(self, phase: Phase | None) -> str:
        """When memory ran out in a phase, or before the first: what was foreseen, and what would do with less."""
        found = self.chosen.tried.prediction.phases.get(phase) if phase is not None else None
        said = [f"The plan foresaw {found.peak / GIB:.3g} GiB in {phase}"] if found is not None else []
        less = NEARLY * min(self.budget_gib, found.peak / GIB if found is not None else self.budget_gib)
        nearest = Chooser(self.predictor, most_work(self.config), less, self.machine.host_gib, self.rehearsal).nearest(self.config)
        if nearest is None:
            return ". ".join([*said, "No plan for this model and these lengths takes much less"])
        # The budget with them: else the cache would take what the others give up.
        changes = on_the_command_line([f"memory.budget_gib={less:.3g}", *settings(self.config, nearest.config)])
        return ". ".join([*said, f"The nearest plan with less: {changes} ({nearest.prediction.peak / GIB:.3g} GiB)"])


class World(Protocol):
    """The ranks of a run, as its plan sees them."""

    size: int
    here: int
    """On this machine."""

    def gathered(self, mine: T) -> list[T]:
        """What each rank has."""
        ...


def plan_run(config: Config, device: torch.device, rehearsal: Rehearsal | None, world: World) -> tuple[RunPlan | None, list[str]]:
    """The plan, and what a person should know; None where a plan has nothing to say: on a CPU without a budget, for other families. All ranks make the same."""
    on_cpu = device.type != "cuda"
    if on_cpu and config.memory.budget_gib is None:
        return None, []
    try:
        shape = _shape(config)
    except UserError as error:
        return None, [f"no plan: {error}"]
    if world.size > 1 and config.cluster is None:  # started by `torchrun`
        config = config.model_copy(update={"cluster": Cluster()})
    machine, here = _agreed(_machine(device, world.here), world)
    check_budget(config.memory.budget_gib, machine.device_gib)
    shared = sharing(config.cluster, world.size, here)
    predictor = Predictor(shape, machine, each=pick_dtype(config.model.dtype, device).itemsize, on_cpu=on_cpu, sharing=shared)
    chooser = Chooser(predictor, most_work(config), config.memory.budget_gib or machine.device_gib, machine.host_gib, rehearsal)
    chosen = chooser.choose(config)
    if not chosen.fits and config.memory.budget_gib is not None and config.memory.plan == "auto":
        raise UserError(misfit(chosen, config, machine))
    plan = RunPlan(config, chosen.tried.config, chosen, shape, machine, predictor, rehearsal, world.size)
    return plan, [f"plan: {line}" for line in plan.words()]


def _shape(config: Config) -> Shape:
    if config.model.path is not None and locate(config.model.path).gguf is not None:
        return find_shape(config.model)  # transformers takes seconds to read such a header
    return from_config(model_config(config).get_text_config().to_dict(), f"`model.path: {config.model.path}`")


def _machine(device: torch.device, here: int) -> Machine:
    if device.type != "cuda":
        return cpu_machine(free_host_bytes(), here)
    total = torch.cuda.get_device_properties(device).total_memory
    return this_machine(torch.cuda.get_device_name(device), total, free_host_bytes())


def _agreed(machine: Machine, world: World) -> tuple[Machine, int]:
    """What all ranks plan for, and so alike: the first one's machine, with the least memory that any has; and the most ranks on a node."""
    everyone = world.gathered((machine, world.here))
    first, machines = everyone[0][0], [one for one, _ in everyone]
    least = {name: min(getattr(one, name) for one in machines) for name in ("device_gib", "host_gib")}
    return replace(first, **least), max(here for _, here in everyone)
