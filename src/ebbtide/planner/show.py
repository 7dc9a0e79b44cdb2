"""A plan as people and as programs read it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from ebbtide.config.tree import Config
from ebbtide.memory.plan import Phase
from ebbtide.planner.choose import HOST_SHARE, Chosen, settings, usable
from ebbtide.planner.machine import GIB, Machine, Rates
from ebbtide.planner.predict import Foretold, Prediction
from ebbtide.planner.shape import Shape

COLUMNS = ("weights", "reference", "master", "moments", "grads", "kv_cache", "activations", "logits", "workspace")


def as_json(chosen: Chosen, shape: Shape, machine: Machine, budget_gib: float | None) -> dict[str, Any]:
    prediction = chosen.tried.prediction
    return {
        "machine": {"name": machine.name, "device_gib": machine.device_gib, "host_gib": machine.host_gib, "rates": machine.source},
        "parameters": shape.parameters,
        "budget_gib": budget_gib,
        "fits": chosen.fits,
        "least_gib": chosen.least,
        "settings": settings(chosen.tried.changes),
        "words": words(chosen, machine, budget_gib),
        "nearest": settings(chosen.nearest.changes) if chosen.nearest is not None else None,
        "step_seconds": prediction.seconds if machine.timed else None,
        "activations": prediction.activations.words(),
        "kv_blocks": prediction.blocks,
        "kv_block_tokens": prediction.block,
        "sequences_at_once": prediction.at_once,
        "phases": {phase: _phase(foretold, machine.timed) for phase, foretold in prediction.phases.items()},
    }


def _phase(foretold: Foretold, timed: bool) -> dict[str, Any]:
    return {
        **({"seconds": foretold.seconds, "seconds_exposed": foretold.exposed} if timed else {}),
        "moved_gib": foretold.moved / GIB,
        "peak_gib": foretold.peak / GIB,
        "host_gib": foretold.host / GIB,
        "device_gib": {name: size / GIB for name, size in foretold.device.items()},
    }


def rows(prediction: Prediction) -> list[list[str]]:
    """A heading, then a row for each phase; columns in which nothing ever is are left out."""
    shown = [name for name in COLUMNS if any(phase.device.get(name) for phase in prediction.phases.values())]
    lines = [["phase", "seconds", "exposed", "peak GiB", *shown, "host", "moved"]]
    for name, phase in prediction.phases.items():
        sizes = [phase.peak, *(phase.device.get(column, 0) for column in shown), phase.host, phase.moved]
        lines.append([name, f"{phase.seconds:.2f}", f"{phase.exposed:.2f}", *(f"{size / GIB:.2f}" for size in sizes)])
    return lines


def words(chosen: Chosen, machine: Machine, budget_gib: float | None) -> list[str]:
    """What a person should know, in sentences."""
    prediction = chosen.tried.prediction
    tight = prediction.tightest
    limit = budget_gib if budget_gib is not None else machine.device_gib
    of = f"the budget of {limit:g} GiB" if budget_gib is not None else f"the {limit:.1f} GiB of the {machine.name}"
    said = []
    if chosen.fits:
        said.append(
            f"fits into {of}: the most is {prediction.peak / GIB:.1f} GiB, in {tight}; a step takes about {prediction.seconds:.1f} s"
        )
    else:
        said.append(_misfit(chosen, machine, limit, of))
    said += chosen.reasons if machine.timed else [reason.partition(";")[0] for reason in chosen.reasons]
    if chosen.fits and not chosen.reasons:
        said.append("nothing needs to move, to be streamed or to be made again")
    said.append(f"activations: {prediction.activations.words()}")
    said.append(f"the cache has {prediction.blocks:,} blocks of {prediction.block} tokens: {prediction.at_once} sequences decode at once")
    if machine.timed:
        said.append(f"rates: {machine.source}")
    return said


def _misfit(chosen: Chosen, machine: Machine, limit: float, of: str) -> str:
    prediction = chosen.tried.prediction
    tight, over = prediction.tightest, prediction.peak / GIB - usable(limit)
    if over > 0:
        said = f"does not fit into {of}: {tight} takes {prediction.peak / GIB:.1f} GiB, {over:.1f} more than the {usable(limit):.1f} that can be filled"
    elif prediction.host > machine.host_gib * GIB * HOST_SHARE:
        said = f"does not fit: {prediction.host / GIB:.1f} GiB of host memory are wanted, of {machine.host_gib:.0f}"
    else:
        said = f"does not fit into {of}: generate has room for a cache of {prediction.blocks * prediction.block:,} tokens, fewer than one sample may have"
    if chosen.nearest is not None:
        return f"{said}. The nearest that fits: {', '.join(settings(chosen.nearest.changes))}, at {chosen.nearest.prediction.seconds:.1f} s a step"
    return f"{said}. No plan does with less than {chosen.least:.1f} GiB"


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


def text(chosen: Chosen, config: Config, shape: Shape, machine: Machine) -> str:
    """All of it, for a terminal."""
    rollout, budget = config.rollout, config.memory.budget_gib
    header = (
        f"{shape.family}, {shape.parameters:,} parameters, on {machine.name} with {machine.device_gib:.1f} GiB; "
        f"{rollout.prompts} x {rollout.samples} samples of at most {rollout.max_prompt_tokens} + {rollout.max_new_tokens} tokens"
    )
    lines = [header, "", plain_table(rows(chosen.tried.prediction)), "", *words(chosen, machine, budget)]
    if chosen.tried.changes:
        lines += ["", f"to set it by hand: {' '.join(map(shlex.quote, settings(chosen.tried.changes)))}"]
    return "\n".join(lines)


def rates_text(rates: Rates) -> str:
    return (
        f"products {rates.matmul / 1e12:.0f} TFLOP/s, copies {rates.copy / 1e12:.2f} TB/s, link {rates.link_out / 1e9:.1f} GB/s out and "
        f"{rates.link_in / 1e9:.1f} in, CPU optimizer {rates.cpu_adam / 1e9:.1f} billion parameters/s, {rates.host_op / 1e3:.0f} thousand operations/s from Python"
    )
