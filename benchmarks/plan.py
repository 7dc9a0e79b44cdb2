"""Predicted against measured: device peak and seconds of each phase, and plans for a budget that is lowered step by
step.

    python benchmarks/plan.py [rates] [fit] [test] [budget]

rates: what this machine can do. fit: the runs that the planner was fitted to. test: others, which nothing was fitted
to. budget: `memory.plan: auto` on the Qwen3-1.7B shape with `memory.budget_gib` from 120 down to the least that a plan
claims, under a limit that the allocator enforces. Random weights, so that completions never end early. Stages that are
not named keep the figures of an earlier run.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import torch
from common import Row, beginning, kept, save

from ebbtide.algorithms.loop import train
from ebbtide.calibrate import calibrate
from ebbtide.config import Config, load
from ebbtide.errors import UserError
from ebbtide.model.workload import max_workload
from ebbtide.planner.predict import Predictor
from ebbtide.planner.prediction import Prediction
from ebbtide.planner.shapes import plannable_shape
from ebbtide.report.report import Report
from ebbtide.system.allocator import use_expandable_segments
from ebbtide.system.machine import Rates, save_rates, this_machine
from ebbtide.system.units import GIB

CONFIG = str(Path(__file__).parent / "configs" / "qwen3-1.7b.yaml")
PLANNED = str(Path(__file__).parent / "configs" / "qwen3-1.7b-planned.yaml")  # sets nothing that a plan may choose
STEPS = 4
BUDGETS = (120, 70, 60, 50, 40, 24, 16, 10, 8, 7, 6.5, 6)  # GiB
PLAIN = [
    "rollout.prompts_per_step=16",
    "rollout.group_size=8",
    "rollout.max_prompt_tokens=126",
    "rollout.max_new_tokens=256",
]
ALWAYS = [
    "report.samples_every=0",
    "report.rollouts=false",
    "checkpoint=null",
    "task.builtin=null",
    "task.python.object=varied_task:Varied",
]
SHAPES = {
    "0.6B": ["hidden=1024", "mlp=3072"],
    "1.7B": [],
    "4B": ["layers=36", "hidden=2560", "heads=32", "mlp=9728"],
    "MoE": ["architecture=qwen3_moe", "layers=12", "experts=32", "experts_per_token=4", "mlp=768"],
}
PHASES = ("generate", "logprob", "train", "step")

Case = tuple[str, str, tuple[int, int, int, int], list[str]]
"""Shape, a name, (prompts, samples, tokens of a prompt, new tokens), settings."""

FIT: list[Case] = [
    ("0.6B", "device, keep, KL", (17, 6, 78, 236), ["train.microbatch_tokens=10240", "loss.kl.coefficient=0.01"]),
    ("0.6B", "streamed, recompute", (15, 8, 110, 250),
        ["optimizer.place=streamed", "memory.activations.preset=recompute", "train.minibatches=2"]),
    ("0.6B", "cpu, offload, long", (4, 6, 62, 1300),
        ["optimizer.place=cpu", "memory.activations.preset=offload", "train.microbatch_tokens=13312"]),
    ("1.7B", "device, balanced", (14, 7, 62, 240),
        ["memory.activations.preset=balanced", "train.microbatch_tokens=11264", "train.minibatches=2"]),
    ("1.7B", "streamed, keep, KL", (10, 8, 94, 214),
        ["optimizer.place=streamed", "train.microbatch_tokens=10240", "loss.kl.coefficient=0.01"]),
    ("1.7B", "cpu, recompute", (12, 8, 62, 234),
        ["optimizer.place=cpu", "memory.activations.preset=recompute", "train.microbatch_tokens=14336"]),
    ("1.7B", "half cpu, offload", (11, 8, 110, 226),
        ["optimizer.cpu_fraction=0.5", "memory.activations.preset=offload", "train.microbatch_tokens=9216"]),
    ("1.7B", "device away in generate, keep, long", (4, 5, 94, 1280),
        ["memory.offload.generate=[moments, master]", "train.microbatch_tokens=7168"]),
    ("4B", "device, balanced", (8, 7, 78, 200),
        ["memory.activations.preset=balanced", "train.microbatch_tokens=9216"]),
    ("4B", "streamed, recompute", (7, 8, 110, 186),
        ["optimizer.place=streamed", "memory.activations.preset=recompute"]),
    ("MoE", "device, offload", (11, 7, 62, 192),
        ["memory.activations.preset=offload", "train.microbatch_tokens=9216", "train.minibatches=2"]),
    ("MoE", "streamed, keep", (9, 8, 78, 180), ["optimizer.place=streamed", "train.microbatch_tokens=10240"]),
]  # fmt: skip
TEST: list[Case] = [
    ("0.6B", "device, balanced", (18, 6, 94, 228),
        ["memory.activations.preset=balanced", "train.microbatch_tokens=14336", "train.minibatches=2"]),
    ("0.6B", "streamed, keep, KL", (14, 8, 78, 262),
        ["optimizer.place=streamed", "loss.kl.coefficient=0.01", "train.microbatch_tokens=12288"]),
    ("0.6B", "cpu, recompute, long", (4, 7, 78, 1250),
        ["optimizer.place=cpu", "memory.activations.preset=recompute", "train.microbatch_tokens=14336"]),
    ("1.7B", "device, keep", (15, 6, 110, 222), ["train.microbatch_tokens=10240", "train.minibatches=2"]),
    ("1.7B", "streamed, offload", (11, 8, 78, 246),
        ["optimizer.place=streamed", "memory.activations.preset=offload", "train.microbatch_tokens=12288"]),
    ("1.7B", "cpu, balanced, KL", (12, 7, 94, 230),
        ["optimizer.place=cpu", "memory.activations.preset=balanced", "loss.kl.coefficient=0.01"]),
    ("1.7B", "half cpu, keep", (10, 9, 62, 238), ["optimizer.cpu_fraction=0.5", "train.microbatch_tokens=11264"]),
    ("1.7B", "device away in generate, recompute, long", (4, 6, 110, 1220),
        ["memory.offload.generate=[moments, master]", "memory.activations.preset=recompute",
        "train.microbatch_tokens=9216"]),
    ("4B", "device, offload", (7, 8, 94, 208), ["memory.activations.preset=offload", "train.microbatch_tokens=10240"]),
    ("4B", "streamed, keep", (8, 7, 110, 194), ["optimizer.place=streamed", "train.microbatch_tokens=7168"]),
    ("MoE", "device, recompute", (12, 6, 78, 196),
        ["memory.activations.preset=recompute", "train.microbatch_tokens=10240", "train.minibatches=2"]),
    ("MoE", "cpu, keep", (10, 8, 62, 186), ["optimizer.place=cpu", "train.microbatch_tokens=9216"]),
]  # fmt: skip


def settings(case: Case) -> list[str]:
    shape, _, (prompts, samples, prompt, new), options = case
    rollout = {"prompts_per_step": prompts, "group_size": samples, "max_prompt_tokens": prompt, "max_new_tokens": new}
    return [
        *ALWAYS,
        *(f"model.scratch.{option}" for option in SHAPES[shape]),
        *(f"rollout.{key}={value}" for key, value in rollout.items()),
        f"task.python.options={{length: {prompt}}}",
        *options,
    ]


def measured(config_options: list[str], file: str = CONFIG) -> tuple[Config, list[dict[str, float]]]:
    """The config as it ran, and the lines of its steps after the first, which compiles and captures."""
    gc.collect()
    torch.cuda.empty_cache()  # of the run before: each is to be as if alone
    with tempfile.TemporaryDirectory() as folder:
        config = load(file, [*config_options, f"train.steps={STEPS}", f"run.folder={folder}/run"])
        with Report(config, "benchmark") as report:
            train(config, report)
        config = load(f"{folder}/run/config.yaml")
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    return config, [line for line in lines if line["step"] > 1]


def predicted(config: Config, budget: int | None = None) -> Prediction:
    total = torch.cuda.get_device_properties(0).total_memory
    machine = replace(this_machine(torch.cuda.get_device_name(), total, 0), rates=measured_rates()[0])
    return Predictor(plannable_shape(config, "cuda"), machine).predict(config, max_workload(config), budget or total)


def planned_step(label: str, options: list[str], budget: float) -> list[Row]:
    """A step as the plan for `budget` GiB has it, beside what the plan foretold of it."""
    config, lines = measured([*options, "memory.plan=auto", f"memory.budget_gib={budget}"], PLANNED)
    foretold = predicted(config, int(budget * GIB))
    peak = max(line[f"peak_gib/{phase}"] for line in lines for phase in PHASES)
    rows = [
        Row(label, "seconds a step", statistics.median(line["seconds"] for line in lines), "s"),
        Row(label, "predicted", foretold.seconds, "s"),
        Row(label, "peak", peak, "GiB"),
        Row(label, "peak predicted", foretold.peak / GIB, "GiB"),
        Row(label, "peak off by", 100 * (foretold.peak / GIB / peak - 1), "%"),
        Row(label, "reserved", max(line[f"reserved_gib/{phase}"] for line in lines for phase in PHASES), "GiB"),
        Row(label, "mismatch, mean", statistics.median(line["mismatch"] for line in lines), "nats"),
        Row(label, "mismatch, most", max(line["mismatch_max"] for line in lines), "nats"),
    ]
    for phase in PHASES:
        found = [line[f"seconds/{phase}"] for line in lines if f"seconds/{phase}" in line]
        if found:
            mine = foretold.phases[phase]
            rows += [
                Row(label, f"{phase}: seconds", statistics.median(found), "s"),
                Row(label, f"{phase}: predicted", mine.seconds, "s"),
                Row(label, f"{phase}: peak", max(line[f"peak_gib/{phase}"] for line in lines), "GiB"),
                Row(label, f"{phase}: peak predicted", mine.peak / GIB, "GiB"),
            ]
    print(f"{label}: {foretold.activations.describe()}, {config.optimizer.place}", flush=True)
    return rows


@cache
def measured_rates() -> tuple[Rates, float]:
    """Of this very machine, as hosts of one kind of GPU differ; and the seconds that it took."""
    start = time.perf_counter()
    return calibrate(lambda *_: None)[2], time.perf_counter() - start


def compared(stage: str, cases: list[Case]) -> Iterator[list[Row]]:
    """The rows so far, after each case."""
    rows: list[Row] = []
    peaks, times, others = [], [], []
    for case in cases:
        label = f"{stage}: {case[0]}, {case[1]}"
        start = time.perf_counter()
        try:
            config, lines = measured(settings(case))
        except (RuntimeError, UserError):  # one that fails must not cost the others their figures
            traceback.print_exc()
            rows.append(Row(label, "failed", 1.0, "(1 = yes)"))
            continue
        foretold = predicted(config)
        for phase in PHASES:
            if f"seconds/{phase}" not in lines[0] or (phase == "logprob" and not foretold.phases["logprob"].seconds):
                continue
            seconds = statistics.median(line[f"seconds/{phase}"] for line in lines)
            peak = max(line[f"peak_gib/{phase}"] for line in lines)
            mine = foretold.phases[phase]
            off, late = 100 * (mine.peak / GIB / peak - 1), 100 * (mine.seconds / seconds - 1)
            peaks.append(abs(off))
            times.append(abs(late))
            others.append(max(100 * line[f"device_gib/{phase}/other"] / line[f"peak_gib/{phase}"] for line in lines))
            rows += [
                Row(label, f"{phase}: peak", peak, "GiB"),
                Row(label, f"{phase}: peak predicted", mine.peak / GIB, "GiB"),
                Row(label, f"{phase}: peak off by", off, "%"),
                Row(label, f"{phase}: seconds", seconds, "s"),
                Row(label, f"{phase}: seconds predicted", mine.seconds, "s"),
                Row(label, f"{phase}: seconds off by", late, "%"),
                Row(label, f"{phase}: in no row", others[-1], "%"),
            ]
            shown = {
                name[len(f"device_gib/{phase}/") :]: round(value, 2)
                for name, value in lines[-1].items()
                if name.startswith(f"device_gib/{phase}/")
            }
            print(
                f"{label:<45} {phase:<9} peak {peak:7.2f} predicted {mine.peak / GIB:7.2f} {off:+6.1f}%   seconds"
                f" {seconds:7.3f} predicted {mine.seconds:7.3f} {late:+6.1f}%   {shown}"
                f" { {name: round(size / GIB, 2) for name, size in mine.device.items()} }",
                flush=True,
            )
        print(f"    {time.perf_counter() - start:.1f} s, activations: {foretold.activations.describe()}", flush=True)
        yield rows
    for what, found in (("peaks", peaks), ("seconds", times)):
        if found:
            rows += [
                Row(f"{stage}: all", f"{what}, median off by", statistics.median(found), "%"),
                Row(f"{stage}: all", f"{what}, most off by", max(found), "%"),
                Row(f"{stage}: all", f"{what}, compared", len(found), ""),
            ]
    if others:
        rows.append(Row(f"{stage}: all", "in no row, most of a peak", max(others), "%"))
    yield rows


def budgets() -> Iterator[list[Row]]:
    """`memory.plan: auto` under a budget that the allocator enforces, lowered until no plan claims to fit."""
    rows: list[Row] = []
    for budget in BUDGETS:
        label = f"budget: {budget} GiB"
        options = [*ALWAYS, *PLAIN, "memory.plan=auto", f"memory.budget_gib={budget}"]
        try:
            config, lines = measured(options, PLANNED)
        except UserError as error:
            refused = "does not fit" in str(error)
            rows.append(Row(label, "refused before it began" if refused else "failed", 1.0, "(1 = yes)"))
            print(f"{label}: {error}", flush=True)
        else:
            foretold = predicted(config, int(budget * GIB))
            seconds = statistics.median(line["seconds"] for line in lines)
            peak, reserved = (
                max(line[f"{kind}/{phase}"] for line in lines for phase in PHASES)
                for kind in ("peak_gib", "reserved_gib")
            )
            rows += [
                Row(label, "seconds a step", seconds, "s"),
                Row(label, "predicted", foretold.seconds, "s"),
                Row(label, "peak", peak, "GiB"),
                Row(label, "peak predicted", foretold.peak / GIB, "GiB"),
                Row(label, "reserved", reserved, "GiB"),
            ]
            chosen = (
                f"{config.optimizer.place}, {config.optimizer.cpu_share:g} on the CPU, {config.train.microbatch_tokens}"
                f" tokens, {foretold.activations.describe()}"
            )
            print(
                f"{label}: {seconds:.2f} s ({foretold.seconds:.2f}), peak {peak:.2f} ({foretold.peak / GIB:.2f}),"
                f" reserved {reserved:.2f}: {chosen}",
                flush=True,
            )
        yield rows


def rates() -> Iterator[list[Row]]:
    found, taken = measured_rates()
    yield [Row("rates", key, value, "/s") for key, value in asdict(found).items()] + [
        Row("rates", "measuring them", taken, "s")
    ]


STAGES: dict[str, Callable[[], Iterator[list[Row]]]] = {
    "rates": rates,
    "fit": lambda: compared("fit", FIT),
    "test": lambda: compared("test", TEST),
    "budget": budgets,
}


def main() -> None:
    use_expandable_segments()  # as `ebbtide train` does
    total = torch.cuda.get_device_properties(0).total_memory / GIB
    save_rates(torch.cuda.get_device_name(), total, measured_rates()[0])  # for the plans that runs make themselves
    for name in sys.argv[1:] or list(STAGES):
        others = kept("plan", beginning(name))
        for rows in STAGES[name]():
            save("plan", [*others, *rows])


if __name__ == "__main__":
    main()
