"""Where each holding is in each phase, by `memory.offload`, and what moving it costs."""

from __future__ import annotations

from collections.abc import Mapping

from ebbtide.memory.plan import PHASE_NEEDS, HoldingName, Phase, Plan
from ebbtide.planner.prediction import CYCLE, PhaseCost
from ebbtide.system.machine import Rates


def on_device_by_phase(plan: Plan, name: HoldingName) -> dict[Phase, bool]:
    """Phase -> whether a holding is on the device in it, in every step after the first."""
    if not plan.is_ever_offloaded(name):
        return dict.fromkeys(CYCLE, True)
    on_device, found = True, {}
    for phase in (*CYCLE, *CYCLE):
        if plan.place(phase, name) == "away":
            on_device = False
        elif name in plan.to_fetch(phase):
            on_device = True
        found[phase] = on_device
    return found


def device_bytes_by_phase(plan: Plan, sizes: Mapping[HoldingName, int]) -> dict[Phase, dict[str, int]]:
    """Phase -> bytes of each holding on the device. Gradients exist in train and step only."""
    paths = {name: on_device_by_phase(plan, name) for name in sizes}
    found: dict[Phase, dict[str, int]] = {}
    for phase in (*CYCLE, "save", "evaluate"):
        on: dict[str, int] = {}
        for name, size in sizes.items():
            after_step = paths[name]["step"] and plan.place(phase, name) != "away"
            on_device = paths[name][phase] if phase in CYCLE else after_step
            if on_device and (name != "grads" or phase in ("train", "step")):
                on[name] = size
        found[phase] = on
    return found


def add_move_costs(
    name: HoldingName, on: Mapping[Phase, bool], size: int, phases: Mapping[Phase, PhaseCost], rates: Rates
) -> None:
    """Adds the bytes and exposed seconds of a holding's moves to the phases. An offload is hidden behind the phase that
    starts it; a fetch is exposed if its own phase needs the holding, and otherwise hidden behind that phase."""
    for place, phase in enumerate(CYCLE):
        before = on[CYCLE[place - 1]]
        if before and not on[phase]:
            if name != "reference":  # The reference never changes: offloading it copies nothing.
                phases[phase].moved += size
        elif on[phase] and not before:
            phases[phase].moved += size
            taken = size / rates.link_in
            late = taken if name in PHASE_NEEDS[phase] else max(0.0, taken - phases[phase].seconds)
            phases[phase].exposed += late
            phases[phase].seconds += late


def add_offload_wait(
    sizes: Mapping[HoldingName, int],
    paths: Mapping[HoldingName, Mapping[Phase, bool]],
    generate: PhaseCost,
    budget: int,
    rates: Rates,
) -> None:
    """Adds the exposed seconds of offloads before generate: they are hidden behind it, unless generate needs the memory
    at once."""
    leaving = sum(
        sizes[name] for name, on in paths.items() if on["step"] and not on["generate"] and name != "reference"
    )
    if generate.peak + leaving > budget:
        generate.exposed += leaving / rates.link_out
        generate.seconds += leaving / rates.link_out
