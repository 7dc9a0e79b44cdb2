"""A plan as people and as programs read it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from ebbtide.config.tree import Config
from ebbtide.memory.plan import HOST_SHARE, Phase
from ebbtide.planner.choose import Chosen, host_wanted, settings, usable
from ebbtide.planner.foretold import CYCLE, Foretold, Prediction
from ebbtide.planner.machine import GIB, Machine, Rates
from ebbtide.planner.shape import Shape

COLUMNS = ("weights", "reference", "master", "moments", "grads", "gathered", "kv_cache", "activations", "logits", "workspace")


def as_json(chosen: Chosen, asked: Config, shape: Shape, machine: Machine) -> dict[str, Any]:
    """`asked`: the config before anything was chosen."""
    prediction, generation = chosen.tried.prediction, chosen.tried.prediction.generation
    return {
        "machine": {"name": machine.name, "device_gib": machine.device_gib, "host_gib": machine.host_gib, "rates": machine.source},
        "ranks": asdict(prediction.sharing) if prediction.sharing.size > 1 else None,
        "parameters": shape.parameters,
        "budget_gib": asked.memory.budget_gib,
        "fits": chosen.fits,
        "lacks": chosen.lacks,
        "least_gib": chosen.least,
        "settings": settings(asked, chosen.tried.config),
        "words": words(chosen, asked, machine),
        "nearest": settings(asked, chosen.nearest.config) if chosen.nearest is not None else None,
        "fastest": settings(asked, chosen.fastest.config) if chosen.fastest is not None else None,
        "step_seconds": prediction.seconds if machine.timed and prediction.generates else None,
        "activations": prediction.activations.words(),
        "kv_blocks": generation.blocks,
        "kv_block_tokens": generation.block,
        "sequences_at_once": generation.at_once,
        "node_host_gib": prediction.host / GIB,
        "loading_host_gib": prediction.loading / GIB,
        "phases": {phase: _phase(foretold, machine.timed) for phase, foretold in prediction.phases.items()},
    }


def _phase(foretold: Foretold, timed: bool) -> dict[str, Any]:
    return {
        **({"seconds": foretold.seconds, "seconds_exposed": foretold.exposed} if timed else {}),
        **({"seconds_talking": foretold.talk, "seconds_talking_exposed": foretold.waited} if timed and foretold.talk else {}),
        "moved_gib": foretold.moved / GIB,
        "peak_gib": foretold.peak / GIB,
        "host_gib": foretold.host / GIB,
        "device_gib": {name: size / GIB for name, size in foretold.device.items()},
    }


def rows(prediction: Prediction) -> list[list[str]]:
    """A heading, then a row for each phase; columns in which nothing ever is are left out."""
    shown = [name for name in COLUMNS if any(phase.device.get(name) for phase in prediction.phases.values())]
    talks = prediction.sharing.size > 1
    lines = [["phase", "seconds", "exposed", *(["talk", "waited"] if talks else []), "peak GiB", *shown, "host", "moved"]]
    for name, phase in prediction.phases.items():
        times = [phase.seconds, phase.exposed, *([phase.talk, phase.waited] if talks else [])]
        lacking = name in ("generate", "evaluate") and not prediction.generates
        seconds = ["-" if lacking else f"{one:.2f}" for one in times]
        sizes = [phase.peak, *(phase.device.get(column, 0) for column in shown), phase.host, phase.moved]
        lines.append([name, *seconds, *(f"{size / GIB:.2f}" for size in sizes)])
    return lines


def words(chosen: Chosen, asked: Config, machine: Machine) -> list[str]:
    """What a person should know, in sentences."""
    prediction, generation = chosen.tried.prediction, chosen.tried.prediction.generation
    said = [_fit(chosen, machine, asked.memory.budget_gib) if chosen.fits else misfit(chosen, asked, machine)]
    for reason in chosen.reasons:
        costs = ""
        if machine.timed and reason.seconds is not None:
            much = f"{'costs' if reason.seconds > 0 else 'saves'} {abs(reason.seconds):.2f} s a step"
            costs = f"; it {much if abs(reason.seconds) >= 0.005 else 'costs nothing'}"
        said.append(f"{', '.join(f'`{line}`' for line in reason.settings)}: {reason.why}{costs}")
    if chosen.fits and not chosen.reasons:
        said.append("nothing had to be changed")
    if not chosen.fits and (taken := settings(asked, chosen.tried.config)):
        said.append(f"the plan that takes least: {on_the_command_line(taken)}")
    said.append(f"activations: {prediction.activations.words()}")
    if generation.blocks is not None:
        said.append(
            f"the cache has {generation.blocks:,} blocks of {generation.block} tokens{'' if generation.roomy else ', fewer than would be of use'}: {generation.at_once} sequences decode at once"
        )
    if prediction.waits_for:
        said.append(
            f"checkpoints are written while the loop waits: copies of what is on the device would take {number(prediction.waits_for / GIB)} GiB of host memory{' in each rank' if prediction.sharing.size > 1 else ''}, more than there is; how long the disk takes is not foretold"
        )
    if machine.timed and asked.rollout.engine != "paged" and asked.rollout.replay is None:
        said.append(f"seconds of generate are those of the paged engine: what `{asked.rollout.engine}` takes is not foretold")
    if generation.beside:
        said.append(f"a rank beside that only generates takes {generation.beside / GIB:.3g} GiB")
    said += [*_of_ranks(prediction, machine), *chosen.notes]
    if machine.timed:
        said.append(f"rates: {machine.source}")
    return said


def _of_ranks(prediction: Prediction, machine: Machine) -> list[str]:
    sharing, links = prediction.sharing, machine.links
    if sharing.size == 1:
        return []
    loading = f", and {number(prediction.loading / GIB)} before they begin, when each loads the whole model" if prediction.loading else ""
    said = [
        sharing.words(),
        f"the host of a node: {number(prediction.host / GIB)} GiB for its ranks{loading}",
    ]
    if machine.timed:
        talk, waited = (sum(getattr(prediction.phases[phase], name) for phase in CYCLE) for name in ("talk", "waited"))
        near = f"{links.near / 1e9:.3g} GB/s by {'NVLink' if links.bridged else 'the bus'}"
        far = f" and {links.far / 1e9:.3g} GB/s to other nodes" if sharing.size > sharing.here else ""
        said.append(
            f"ranks talk for {talk:.2f} s a step, {waited:.2f} s of it exposed, at {near}{far} (computed from data sheets: nothing measured them)"
        )
    return said


def _of(machine: Machine, budget_gib: float | None) -> str:
    return f"the budget of {budget_gib:g} GiB" if budget_gib is not None else f"the {machine.device_gib:.3g} GiB of the {machine.name}"


def _fit(chosen: Chosen, machine: Machine, budget_gib: float | None) -> str:
    prediction = chosen.tried.prediction
    takes = f"; a step takes about {prediction.seconds:.1f} s" if machine.timed else ""
    return f"fits into {_of(machine, budget_gib)}: the most is {prediction.peak / GIB:.3g} GiB, in {prediction.tightest}{takes}"


def misfit(chosen: Chosen, asked: Config, machine: Machine) -> str:
    """What there is too little of, and what would do."""
    prediction, budget = chosen.tried.prediction, asked.memory.budget_gib
    limit, of = budget if budget is not None else machine.device_gib, _of(machine, budget)
    peak, can = prediction.peak / GIB, usable(limit)
    taken_by: str = prediction.tightest
    if prediction.generation.beside > prediction.peak:
        peak, taken_by = prediction.generation.beside / GIB, "a rank that only generates"
    least = "the least that a plan takes in " if chosen.tried.changes else ""
    why = {
        "device": f"does not fit into {of}: {least}{taken_by} {'is' if least else 'takes'} {number(peak)} GiB, {number(peak - can)} more than the {number(can)} that can be filled",
        "cache": f"does not fit into {of}: generate has no room for the cache of one sample of {asked.rollout.max_prompt_tokens + asked.rollout.max_new_tokens:,} tokens",
        "host": f"does not fit: {number(prediction.host / GIB)} GiB of host memory are wanted{_here(prediction)}, more than {_host(asked, machine)}",
        "loading": f"does not fit: {number(prediction.loading / GIB)} GiB of host memory are wanted to load the model whole{_here(prediction)}, more than the {number(machine.host_gib)} that are free",
        None: "",
    }[chosen.lacks]
    if chosen.nearest is not None:
        return f"{why}{_left_alone(chosen, asked)}. {_advice(chosen, asked, machine)}"
    smaller = "; or lower `rollout.batch`" if asked.rollout.engine == "huggingface" and taken_by in ("generate", "evaluate") else ""
    return f"{why}{_limits(chosen, asked, machine)}{smaller}"


def _left_alone(chosen: Chosen, asked: Config) -> str:
    keys = chosen.by_hand if asked.memory.plan == "auto" else ()
    if not keys:
        return ""
    return f" ({', '.join(f'`{key}`' for key in keys)} {'was' if len(keys) == 1 else 'were'} left alone, as set by hand)"


def _advice(chosen: Chosen, asked: Config, machine: Machine) -> str:
    """What would fit, hand-set or not."""
    named = {"The nearest that fits": chosen.nearest, "the fastest": chosen.fastest}
    said = []
    for name, tried in named.items():
        if tried is not None:
            at = f", at {tried.prediction.seconds:.1f} s a step" if machine.timed else ""
            said.append(f"{name}: {on_the_command_line(settings(asked, tried.config))}{at}")
    return "; ".join(said)


def _limits(chosen: Chosen, asked: Config, machine: Machine) -> str:
    """Where nothing fits: the budget, and the host memory, with which something would."""
    least = f". No plan does with less than {_rounded_up(chosen.least)} GiB" if chosen.least is not None else ", whatever the plan"
    if chosen.more_host is None:
        return least
    host_budget = asked.memory.host_budget_gib
    wanted = host_wanted(chosen.more_host) / GIB
    here = f"under {_host(asked, machine)}" if host_budget is not None else f"on a host with {number(machine.host_gib)} GiB"
    changes = on_the_command_line(settings(asked, chosen.more_host.config))
    fits = f"this fits: {changes}" if changes else "it fits as it is set"
    return f"{least} {here}; with {_rounded_up(wanted)} GiB there, {fits}"


def on_the_command_line(changes: Iterable[str]) -> str:
    """As a shell takes them."""
    return " ".join(map(shlex.quote, changes))


def number(value: float) -> str:
    """With three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _rounded_up(gib: float) -> str:
    """So that as much as is shown is enough."""
    each = 10 ** (math.floor(math.log10(gib)) - 2)
    return number(math.ceil(gib / each - 1e-9) * each)


def _here(prediction: Prediction) -> str:
    return f" by the {prediction.sharing.here} ranks of a node" if prediction.sharing.size > 1 else ""


def _host(asked: Config, machine: Machine) -> str:
    budget = asked.memory.host_budget_gib
    return f"`memory.host_budget_gib` = {budget:g}" if budget is not None else f"{HOST_SHARE:.0%} of the host's {number(machine.host_gib)}"


def compared(
    foretold: Mapping[Phase, Foretold], seconds: Mapping[Phase, float], peaks: Mapping[Phase, int], held: Mapping[Phase, Mapping[str, int]]
) -> tuple[list[list[str]], list[str]]:
    """(a table of predicted against measured, sentences on phases whose peak is more than a tenth off, by holding)."""
    lines = [["phase", "seconds", "predicted", "peak GiB", "predicted", "off by"]]
    said = []
    for phase, mine in foretold.items():
        if phase not in seconds or not mine.peak or phase == "score":
            continue
        off = mine.peak / peaks[phase] - 1 if peaks[phase] else 0.0
        lines.append(
            [phase, f"{seconds[phase]:.2f}", f"{mine.seconds:.2f}", f"{peaks[phase] / GIB:.2f}", f"{mine.peak / GIB:.2f}", f"{off:+.0%}"]
        )
        if abs(off) > 0.1:
            said.append(_named(phase, mine, peaks[phase], held[phase]))
    return lines, said


def _named(phase: Phase, mine: Foretold, peak: int, held: Mapping[str, int]) -> str:
    """Where a prediction and what was measured part."""
    together = {name: mine.device.get(name, 0) - held.get(name, 0) for name in {*held} - {"other"}}
    rest = mine.peak - sum(mine.device.get(name, 0) for name in together) - (peak - sum(held.get(name, 0) for name in together))
    parts = {**together, "activations, cache and workspace": rest}
    listed = [
        f"{name} {size / GIB:+.2f}" for name, size in sorted(parts.items(), key=lambda part: -abs(part[1])) if abs(size) > 0.01 * peak
    ]
    return f"{phase} was predicted {(mine.peak - peak) / GIB:+.2f} GiB off: {', '.join(listed)}"


def plain_table(lines: list[list[str]]) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(f"{cell:<{widths[0]}}" if not column else f"{cell:>{widths[column]}}" for column, cell in enumerate(line))
        for line in lines
    )


def text(chosen: Chosen, asked: Config, shape: Shape, machine: Machine) -> str:
    """All of it, for a terminal."""
    rollout = asked.rollout
    ranks = chosen.tried.prediction.sharing.size
    header = (
        f"{shape.family}, {shape.parameters:,} parameters, on {f'{ranks} x ' if ranks > 1 else ''}{machine.name} with {machine.device_gib:.1f} GiB and {number(machine.host_gib)} GiB of host memory; "
        f"{rollout.prompts} x {rollout.samples} samples of at most {rollout.max_prompt_tokens} + {rollout.max_new_tokens} tokens"
    )
    title = [] if chosen.fits else ["the plan that takes least:" if chosen.tried.changes else "as it is set:"]
    lines = [header, "", *title, plain_table(rows(chosen.tried.prediction)), "", *words(chosen, asked, machine)]
    if chosen.nearest is not None:
        lines += ["", "the nearest that fits:", plain_table(rows(chosen.nearest.prediction))]
    elif chosen.fits and (found := settings(asked, chosen.tried.config)):
        lines += ["", f"to set it by hand: {on_the_command_line(found)}"]
    return "\n".join(lines)


def rates_text(rates: Rates) -> str:
    return (
        f"products {rates.matmul / 1e12:.0f} TFLOP/s, copies {rates.copy / 1e12:.2f} TB/s, link {rates.link_out / 1e9:.1f} GB/s out and "
        f"{rates.link_in / 1e9:.1f} in, CPU optimizer {rates.cpu_adam / 1e9:.1f} billion parameters/s, {rates.host_op / 1e3:.0f} thousand operations/s from Python"
    )
