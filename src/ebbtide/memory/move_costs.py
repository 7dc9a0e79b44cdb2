"""Where each holding is in each phase, by `memory.offload`, and what moving it costs."""

from __future__ import annotations

from collections.abc import Mapping

from ebbtide.memory.costs import HoldingBytes, PhaseCost
from ebbtide.memory.plan import AFTER_STEP, HoldingName, HoldingSpec, Phase, Plan
from ebbtide.system.machine import Rates


def on_device_by_phase(plan: Plan, name: HoldingName) -> dict[Phase, bool]:
    """Phase -> whether a holding is on the device in it, in every step after the first."""
    if not plan.is_ever_offloaded(name):
        return dict.fromkeys(plan.cycle, True)
    on_device, found = True, {}
    for phase in (*plan.cycle, *plan.cycle):
        if plan.is_offloaded(phase, name):
            on_device = False
        elif name in plan.to_fetch(phase):
            on_device = True
        found[phase] = on_device
    return found


def device_bytes_by_phase(plan: Plan, sizes: Mapping[HoldingName, int]) -> dict[Phase, dict[str, int]]:
    """Phase -> bytes of each holding on the device, in the phases in which it exists."""
    paths = {name: on_device_by_phase(plan, name) for name in sizes}
    found: dict[Phase, dict[str, int]] = {}
    for phase in plan.phases:
        on: dict[str, int] = {}
        for name, size in sizes.items():
            spec = plan.specs[name]
            after_step = paths[name][plan.cycle[-1]] and not plan.is_offloaded(phase, name)
            on_device = paths[name][phase] if phase in plan.cycle else after_step or phase in spec.needed_in
            exists_in = spec.exists_in
            if on_device and (exists_in is None or phase in exists_in):
                on[name] = size
        found[phase] = on
    return found


def host_bytes_of(plan: Plan, sizes: HoldingBytes) -> dict[HoldingName, int]:
    """Holding -> bytes of host memory: what lives there, and what is ever offloaded, which is pinned once and stays.
    Holdings that do not exist in all phases, such as gradients, do not count: between steps there are none."""
    found = dict(sizes.host)
    for name, size in sizes.device.items():
        if size and plan.specs[name].exists_in is None and plan.is_ever_offloaded(name):
            found[name] = found.get(name, 0) + size
    return found


def add_move_costs(
    spec: HoldingSpec, on: Mapping[Phase, bool], size: int, phases: Mapping[Phase, PhaseCost], rates: Rates
) -> None:
    """Adds the bytes and exposed seconds of a holding's moves to the phases. An offload is hidden behind the phase that
    starts it; a fetch is exposed if its own phase needs the holding, and otherwise hidden behind that phase."""
    cycle = list(on)
    for place, phase in enumerate(cycle):
        before = on[cycle[place - 1]]
        if before and not on[phase]:
            if not spec.frozen:  # What never changes has its copy on the host already.
                phases[phase].moved += size
        elif on[phase] and not before:
            phases[phase].moved += size
            taken = size / rates.link_in
            late = taken if phase in spec.needed_in else max(0.0, taken - phases[phase].seconds)
            phases[phase].exposed += late
            phases[phase].seconds += late
    for phase in AFTER_STEP:
        if phase in phases and phase in spec.needed_in and not on[cycle[-1]]:
            phases[phase].moved += size
            phases[phase].exposed += size / rates.link_in
            phases[phase].seconds += size / rates.link_in


def add_offload_wait(
    plan: Plan,
    sizes: Mapping[HoldingName, int],
    paths: Mapping[HoldingName, Mapping[Phase, bool]],
    phases: Mapping[Phase, PhaseCost],
    budget: int,
    rates: Rates,
) -> None:
    """Adds the exposed seconds of offloads when a step begins: they are hidden behind its first phase, unless that
    phase needs the memory at once."""
    first, last = plan.cycle[0], plan.cycle[-1]
    leaving = sum(
        sizes[name] for name, on in paths.items() if on[last] and not on[first] and not plan.specs[name].frozen
    )
    if phases[first].peak + leaving > budget:
        phases[first].exposed += leaving / rates.link_out
        phases[first].seconds += leaving / rates.link_out
