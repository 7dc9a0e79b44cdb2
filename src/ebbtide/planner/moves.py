"""Where holdings are in each phase, as `memory.away` has it, and what moving them costs."""

from __future__ import annotations

from collections.abc import Mapping

from ebbtide.memory.plan import NEEDS, Name, Phase, Plan
from ebbtide.planner.foretold import CYCLE, Foretold
from ebbtide.planner.machine import Rates


def path(plan: Plan, name: Name) -> dict[Phase, bool]:
    """Phase -> whether a holding is on the device in it, once round and round again."""
    if not plan.ever_away(name):
        return dict.fromkeys(CYCLE, True)
    here, found = True, {}
    for phase in (*CYCLE, *CYCLE):
        if plan.place(phase, name) == "away":
            here = False
        elif name in plan.fetched(phase):
            here = True
        found[phase] = here
    return found


def places(plan: Plan, sizes: Mapping[Name, int]) -> dict[Phase, dict[str, int]]:
    """Phase -> bytes on the device of each holding. Gradients are there in train and step only."""
    paths = {name: path(plan, name) for name in sizes}
    found: dict[Phase, dict[str, int]] = {}
    for phase in (*CYCLE, "save", "evaluate"):
        on: dict[str, int] = {}
        for name, size in sizes.items():
            after_a_step = paths[name]["step"] and plan.place(phase, name) != "away"
            here = paths[name][phase] if phase in CYCLE else after_a_step
            if here and (name != "grads" or phase in ("train", "step")):
                on[name] = size
        found[phase] = on
    return found


def move(name: Name, on: Mapping[Phase, bool], size: int, phases: Mapping[Phase, Foretold], rates: Rates) -> None:
    """Out when a phase wants it away, behind that phase; in ahead of its use where the phase before lets it, else while compute waits."""
    for place, phase in enumerate(CYCLE):
        before = on[CYCLE[place - 1]]
        if before and not on[phase]:
            if name != "reference":  # which never changes: leaving copies nothing
                phases[phase].moved += size
        elif on[phase] and not before:
            phases[phase].moved += size
            taken = size / rates.link_in
            late = taken if name in NEEDS[phase] else max(0.0, taken - phases[phase].seconds)
            phases[phase].exposed += late
            phases[phase].seconds += late


def make_room(sizes: Mapping[Name, int], paths: Mapping[Name, Mapping[Phase, bool]], generate: Foretold, budget: int, rates: Rates) -> None:
    """What leaves for generate does so behind it, unless its memory is wanted at once."""
    leaving = sum(sizes[name] for name, on in paths.items() if on["step"] and not on["generate"] and name != "reference")
    if generate.peak + leaving > budget:
        generate.exposed += leaving / rates.link_out
        generate.seconds += leaving / rates.link_out
