"""Renders a plan: as a text for people, and as JSON for programs (plan.json)."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from ebbtide.checkpoint.costs import describe_synchronous
from ebbtide.config.planner_keys import settings_diff
from ebbtide.config.root import Config
from ebbtide.memory.costs import WORKSPACE, PhaseCost
from ebbtide.memory.plan import HOST_SHARE, Phase
from ebbtide.model.shape import Shape
from ebbtide.planner.prediction import Prediction
from ebbtide.planner.search import PlanResult, required_host_bytes, usable_gib
from ebbtide.policy.model_costs import SAMPLING_PHASES
from ebbtide.system.machine import Machine, Rates
from ebbtide.system.units import gib


def as_json(chosen: PlanResult, requested: Config, shape: Shape, machine: Machine) -> dict[str, Any]:
    """The contents of plan.json. `requested`: the config before anything was chosen."""
    prediction, generation = chosen.candidate.prediction, chosen.candidate.prediction.generation
    return {
        "machine": {
            "name": machine.name,
            "device_gib": machine.device_gib,
            "host_gib": machine.host_gib,
            "rates": machine.source,
        },
        "ranks": asdict(prediction.sharing) if prediction.sharing.size > 1 else None,
        "parameters": shape.parameters,
        "budget_gib": requested.memory.budget_gib,
        "fits": chosen.fits,
        "bottleneck": chosen.bottleneck,
        "min_gib": chosen.min_gib,
        "settings": settings_diff(requested, chosen.candidate.config),
        "words": summarize(chosen, requested, machine),
        "nearest": settings_diff(requested, chosen.nearest.config) if chosen.nearest is not None else None,
        "fastest": settings_diff(requested, chosen.fastest.config) if chosen.fastest is not None else None,
        "step_seconds": prediction.seconds if machine.is_timed and prediction.can_generate else None,
        "activations": prediction.activations.describe(),
        "kv_blocks": generation.blocks,
        "kv_block_tokens": generation.block_tokens,
        "sequences_at_once": generation.concurrent,
        "node_host_gib": gib(prediction.host),
        "loading_host_gib": gib(prediction.loading_bytes),
        "phases": {name: _phase_json(phase, machine.is_timed) for name, phase in prediction.phases.items()},
    }


def _phase_json(phase: PhaseCost, timed: bool) -> dict[str, Any]:
    return {
        **({"seconds": phase.seconds, "seconds_exposed": phase.exposed} if timed else {}),
        **(
            {"seconds_communication": phase.communication, "seconds_communication_exposed": phase.exposed_communication}
            if timed and phase.communication
            else {}
        ),
        "moved_gib": gib(phase.moved),
        "peak_gib": gib(phase.peak),
        "host_gib": gib(phase.host),
        "device_gib": {name: gib(size) for name, size in phase.device.items()},
    }


def table_rows(prediction: Prediction) -> list[list[str]]:
    """The table of a plan: a heading, then a row for each phase. Columns that are 0 everywhere are left out."""
    rows = dict.fromkeys(name for phase in prediction.phases.values() for name, size in phase.device.items() if size)
    # Where a phase has other rows than those before it, these come last; workspace, which is no holding, after all.
    shown = sorted(rows, key=lambda name: name == WORKSPACE)
    several = prediction.sharing.size > 1
    communication = ["communication", "exposed\ncommunication"] if several else []
    sizes_heading = ["peak GiB", *shown, "host", "moved"]
    lines = [["phase", "seconds", "exposed\ntransfers", *communication, *sizes_heading]]
    for name, phase in prediction.phases.items():
        times = [phase.seconds, phase.exposed, *([phase.communication, phase.exposed_communication] if several else [])]
        unknown = name in SAMPLING_PHASES and not prediction.can_generate
        seconds = ["-" if unknown else f"{one:.2f}" for one in times]
        sizes = [phase.peak, *(phase.device.get(column, 0) for column in shown), phase.host, phase.moved]
        lines.append([name, *seconds, *(f"{gib(size):.2f}" for size in sizes)])
    return lines


def summarize(chosen: PlanResult, requested: Config, machine: Machine) -> list[str]:
    """The plan in sentences: whether it fits, what was changed and why, and notes."""
    prediction, generation = chosen.candidate.prediction, chosen.candidate.prediction.generation
    lines = [
        (
            _fit(chosen, machine, requested.memory.budget_gib)
            if chosen.fits
            else explain_misfit(chosen, requested, machine)
        )
    ]
    for reason in chosen.reasons:
        cost = ""
        if machine.is_timed and reason.seconds is not None:
            saves = f"; saves {-reason.seconds:.2f} s per step" if reason.seconds < 0 else ""
            cost = saves or f"; cost: {reason.seconds:+.2f} s per step"
            cost = cost if abs(reason.seconds) >= 0.005 else "; at no cost"
        lines.append(f"{', '.join(f'`{line}`' for line in reason.settings)}: {reason.why}{cost}")
    if chosen.fits and not chosen.reasons:
        lines.append("no settings were changed")
    if not chosen.fits and (changes := settings_diff(requested, chosen.candidate.config)):
        lines.append(f"the smallest plan: {to_arguments(changes)}")
    lines.append(f"activations: {prediction.activations.describe()}")
    if generation.blocks is not None:
        served = (
            f"all {generation.max_concurrent}"
            if generation.cache_is_full_size
            else f"{generation.concurrent} of {generation.max_concurrent}"
        )
        lines.append(
            f"KV cache: {generation.blocks:,} blocks of {generation.block_tokens} tokens, enough for {served} sequences"
            " at a time"
        )
    if prediction.missing_save_bytes:
        lines.append(
            describe_synchronous(
                format_number(gib(prediction.missing_save_bytes)),
                " in each rank" if prediction.sharing.size > 1 else "",
            )
            + "; disk write time is not included"
        )
    samples = requested.generates and requested.rollout.replay is None
    if machine.is_timed and samples and requested.rollout.engine != "paged":
        lines.append(
            f"seconds of generate are predicted for the paged engine; those of `{requested.rollout.engine}` are not"
            " predicted"
        )
    if generation.rollout_worker_bytes:
        lines.append(
            f"each rollout worker (a rank that only generates) needs {gib(generation.rollout_worker_bytes):.3g} GiB"
        )
    lines += [*_rank_lines(prediction, machine), *chosen.notes]
    if machine.is_timed:
        lines.append(f"rates: {machine.source}")
    return lines


def _rank_lines(prediction: Prediction, machine: Machine) -> list[str]:
    """Sentences on several ranks: how they share the model, a node's host memory, and their communication."""
    sharing, links = prediction.sharing, machine.links
    if sharing.size == 1:
        return []
    loading = (
        f", and {format_number(gib(prediction.loading_bytes))} GiB at start-up, when each rank loads a whole model"
        if prediction.loading_bytes
        else ""
    )
    lines = [
        sharing.summarize(),
        f"host memory of a node: {format_number(gib(prediction.host))} GiB for its ranks{loading}",
    ]
    if machine.is_timed:
        seconds = sum(prediction.phases[phase].communication for phase in prediction.cycle)
        exposed = sum(prediction.phases[phase].exposed_communication for phase in prediction.cycle)
        near = f"{links.near / 1e9:.3g} GB/s over {'NVLink' if links.has_nvlink else 'PCIe'}"
        far = f" and {links.far / 1e9:.3g} GB/s to other nodes" if sharing.size > sharing.ranks_per_node else ""
        lines.append(
            f"communication: {seconds:.2f} s per step, {exposed:.2f} s of it exposed, at {near}{far} (computed from"
            " data sheets, not measured)"
        )
    return lines


def _limit(machine: Machine, budget_gib: float | None) -> str:
    """The device memory that the plan has to fit into, in words."""
    return (
        f"the budget of {budget_gib:g} GiB"
        if budget_gib is not None
        else f"the {machine.device_gib:.3g} GiB of the {machine.name}"
    )


def _fit(chosen: PlanResult, machine: Machine, budget_gib: float | None) -> str:
    prediction = chosen.candidate.prediction
    time = f"; about {prediction.seconds:.1f} s per step" if machine.is_timed else ""
    return (
        f"fits into {_limit(machine, budget_gib)}: the peak is {gib(prediction.peak):.3g} GiB, in the"
        f" {prediction.peak_phase} phase{time}"
    )


def explain_misfit(chosen: PlanResult, requested: Config, machine: Machine) -> str:
    """What there is too little of, and which settings or how much memory would fit."""
    prediction, budget = chosen.candidate.prediction, requested.memory.budget_gib
    usable = usable_gib(budget if budget is not None else machine.device_gib)
    peak, user = gib(prediction.peak), f"the {prediction.peak_phase} phase"
    if prediction.generation.rollout_worker_bytes > prediction.peak:
        peak, user = gib(prediction.generation.rollout_worker_bytes), "a rollout worker (a rank that only generates)"
    why = {
        "device": (
            f"does not fit into {_limit(machine, budget)}: {user} needs {format_number(peak)}"
            f" GiB{' with the smallest plan' if chosen.candidate.changes else ''}, {format_number(peak - usable)}"
            f" more than the {format_number(usable)} usable"
        ),
        "cache": (
            f"does not fit into {_limit(machine, budget)}: the generate phase has no room for the KV cache of one"
            f" sample of {requested.max_sequence_tokens:,} tokens"
        ),
        "host": (
            f"does not fit: {format_number(gib(prediction.host))} GiB of host memory needed{_by_ranks(prediction)},"
            f" more than {_host_limit(requested, machine)}"
        ),
        "loading": (
            f"does not fit: {format_number(gib(prediction.loading_bytes))} GiB of host memory needed to load the whole"
            f" model{_in_ranks(prediction)}, more than the {format_number(machine.host_gib)} free"
        ),
        None: "",
    }[chosen.bottleneck]
    if chosen.nearest is not None:
        return f"{why}{_unchanged_keys(chosen, requested)}. {_advice(chosen, requested, machine)}"
    smaller = (
        ". Or lower `rollout.max_num_seqs`"
        if requested.rollout.engine == "huggingface" and user in ("the generate phase", "the evaluate phase")
        else ""
    )
    return f"{why}{_minimum(chosen, requested, machine)}{smaller}"


def _unchanged_keys(chosen: PlanResult, requested: Config) -> str:
    keys = chosen.by_hand if requested.memory.plan == "auto" else ()
    if not keys:
        return ""
    return (
        f" ({', '.join(f'`{key}`' for key in keys)} {'is' if len(keys) == 1 else 'are'} set by hand and"
        f" {'was' if len(keys) == 1 else 'were'} not changed)"
    )


def _advice(chosen: PlanResult, requested: Config, machine: Machine) -> str:
    """The settings that would fit, including changes to those made by hand."""
    named = {"Nearest settings that fit": chosen.nearest, "fastest settings that fit": chosen.fastest}
    lines = []
    for name, candidate in named.items():
        if candidate is not None:
            at = f", at {candidate.prediction.seconds:.1f} s per step" if machine.is_timed else ""
            lines.append(f"{name}: {to_arguments(settings_diff(requested, candidate.config))}{at}")
    return "; ".join(lines)


def _minimum(chosen: PlanResult, requested: Config, machine: Machine) -> str:
    """If nothing fits: the smallest budget of device memory, and the host memory, with which something would."""
    minimum = f"the minimum is {_rounded_up(chosen.min_gib)} GiB of device memory" if chosen.min_gib is not None else ""
    if chosen.with_more_host is None:
        return f". {minimum[0].upper()}{minimum[1:]}" if minimum else ", with any plan"
    wanted = _rounded_up(gib(required_host_bytes(chosen.with_more_host)))
    if requested.memory.host_budget_gib is not None:
        now = f"`memory.host_budget_gib` = {requested.memory.host_budget_gib:g}"
        more = f"`memory.host_budget_gib={wanted.replace(',', '')}`"
    else:
        now, more = f"{format_number(machine.host_gib)} GiB of host memory", f"{wanted} GiB of host memory"
    changes = to_arguments(settings_diff(requested, chosen.with_more_host.config))
    fits = f"these settings fit: {changes}" if changes else "the current settings fit"
    return f". With {now} {minimum or 'no plan fits'}. With {more} {fits}"


def to_arguments(changes: Iterable[str]) -> str:
    """The settings as arguments of a shell command."""
    return " ".join(map(shlex.quote, changes))


def format_number(value: float) -> str:
    """A number with three digits, or with all digits before the point."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _rounded_up(gib: float) -> str:
    """A number with three digits, rounded up so that the printed amount is enough."""
    each = 10 ** (math.floor(math.log10(gib)) - 2)
    return format_number(math.ceil(gib / each - 1e-9) * each)


def _by_ranks(prediction: Prediction) -> str:
    return f" by the {prediction.sharing.ranks_per_node} ranks of a node" if prediction.sharing.size > 1 else ""


def _in_ranks(prediction: Prediction) -> str:
    ranks = prediction.sharing.ranks_per_node
    return f" in each of the {ranks} ranks of a node" if ranks > 1 else ""


def _host_limit(requested: Config, machine: Machine) -> str:
    """The host memory that the plan has to fit into, in words."""
    budget = requested.memory.host_budget_gib
    return (
        f"`memory.host_budget_gib` = {budget:g}"
        if budget is not None
        else f"{HOST_SHARE:.0%} of the host's {format_number(machine.host_gib)} GiB"
    )


def compare(
    predicted: Mapping[Phase, PhaseCost],
    seconds: Mapping[Phase, float],
    peaks: Mapping[Phase, int],
    measured: Mapping[Phase, Mapping[str, int]],
) -> tuple[list[list[str]], list[str]]:
    """(a table of predicted against measured, sentences on phases whose peak is more than a tenth off, by holding)."""
    lines = [["phase", "seconds", "predicted", "peak GiB", "predicted", "off by"]]
    sentences = []
    for phase, cost in predicted.items():
        if phase not in seconds or not cost.peak or phase == "score":
            continue
        off = cost.peak / peaks[phase] - 1 if peaks[phase] else 0.0
        lines.append(
            [
                phase,
                f"{seconds[phase]:.2f}",
                f"{cost.seconds:.2f}",
                f"{gib(peaks[phase]):.2f}",
                f"{gib(cost.peak):.2f}",
                f"{off:+.0%}",
            ]
        )
        if abs(off) > 0.1:
            sentences.append(_explain_difference(phase, cost, peaks[phase], measured[phase]))
    return lines, sentences


def _explain_difference(phase: Phase, cost: PhaseCost, peak: int, measured: Mapping[str, int]) -> str:
    """How far the predicted peak of a phase is off, by row."""
    rows = {name: size for name, size in measured.items() if name != "other"}
    rows[WORKSPACE] = peak - sum(rows.values())
    parts = {name: cost.device.get(name, 0) - rows.get(name, 0) for name in {**cost.device, **rows}}
    listed = [
        f"{name} {gib(size):+.2f}"
        for name, size in sorted(parts.items(), key=lambda part: -abs(part[1]))
        if abs(size) > 0.01 * peak
    ]
    return f"the predicted peak of {phase} is off by {gib(cost.peak - peak):+.2f} GiB: {', '.join(listed)}"


def render_table(lines: list[list[str]]) -> str:
    """A table as text; the words of a heading may be stacked, separated by newlines."""
    stacked = [cell.split("\n") for cell in lines[0]]
    height = max(map(len, stacked))
    heading = [[([""] * (height - len(cell)) + cell)[row] for cell in stacked] for row in range(height)]
    printed = [*heading, *lines[1:]]
    widths = [max(len(line[column]) for line in printed) for column in range(len(stacked))]
    return "\n".join(
        "  ".join(
            f"{cell:<{widths[0]}}" if not column else f"{cell:>{widths[column]}}" for column, cell in enumerate(line)
        ).rstrip()
        for line in printed
    )


def render_plan(chosen: PlanResult, requested: Config, shape: Shape, machine: Machine) -> str:
    """The whole plan as a text for a terminal."""
    size = requested.step_size
    ranks = chosen.candidate.prediction.sharing.size
    adapters = f" and {shape.adapter_parameters:,} of adapters" if shape.lora is not None else ""
    where = f"{ranks} x {machine.name}" if ranks > 1 else machine.name
    header = (
        f"{shape.family}, {shape.parameters:,} parameters{adapters}, on {where} with {machine.device_gib:.1f} GiB and"
        f" {format_number(machine.host_gib)} GiB of host memory; {size.describe()}"
    )
    title = [] if chosen.fits else ["the smallest plan:" if chosen.candidate.changes else "with the current settings:"]
    lines = [
        header,
        "",
        *title,
        render_table(table_rows(chosen.candidate.prediction)),
        "",
        *summarize(chosen, requested, machine),
    ]
    if chosen.nearest is not None:
        lines += ["", "the nearest settings that fit:", render_table(table_rows(chosen.nearest.prediction))]
    elif chosen.fits and (changes := settings_diff(requested, chosen.candidate.config)):
        lines += ["", f"to set this plan by hand: {to_arguments(changes)}"]
    return "\n".join(lines)


def render_rates(rates: Rates) -> str:
    """The rates of a machine in one line."""
    return (
        f"matmuls {rates.matmul / 1e12:.0f} TFLOP/s, copies {rates.copy / 1e12:.2f} TB/s, host link"
        f" {rates.link_out / 1e9:.1f} GB/s out and {rates.link_in / 1e9:.1f} in, CPU optimizer"
        f" {rates.cpu_adam / 1e9:.1f} billion parameters/s, {rates.host_op / 1e3:.0f} thousand operations/s from Python"
    )
