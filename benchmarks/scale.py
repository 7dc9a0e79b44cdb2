"""A step from 1 to 1,024 GPUs, as `ebbtide plan` computes it: no figure here was measured on more than one.

    python benchmarks/scale.py [weak] [strong] [ways] [few]

weak: 8 prompts for each GPU. strong: 1,024 prompts for all. ways: data, tensor and copies at one size. few: 2
prompts with samples of 15,872 tokens, for 64 GPUs. Elsewhere a prompt of 512 tokens has 8 samples of 1,024; H200s, 8
a node, 128 GiB of host memory for each, `memory.plan: auto`. Stages that are not named keep the figures of an
earlier run. docs/scale.md says what is in the model and what is not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from common import Row, beginning, kept, save

from ebbtide.config import load
from ebbtide.model.shape import find_shape
from ebbtide.model.workload import max_workload
from ebbtide.parallel.costs import mesh_shape
from ebbtide.planner.predict import Predictor
from ebbtide.planner.search import PlanResult, PlanSearch
from ebbtide.system.machine import machine_for
from ebbtide.system.units import GIB

CONFIG = str(Path(__file__).parent / "configs" / "qwen3-1.7b-planned.yaml")
SHAPES = {
    "1.7B": [],
    "8B": ["layers=36", "hidden=4096", "heads=32", "mlp=12288", "tied=false"],
    "32B": ["layers=64", "hidden=5120", "heads=64", "mlp=25600", "tied=false"],
    "30B-A3B": ["architecture=qwen3_moe", "layers=48", "heads=32", "kv_heads=4", "mlp=768",
                "experts=128", "experts_per_token=8", "tied=false"],
}  # fmt: skip
GPUS = (1, 8, 64, 256, 1024)
PROMPTS, SAMPLES, PROMPT, NEW = 8, 8, 512, 1024
FEW_GPUS, FEW_PROMPTS, FEW_NEW = 64, 2, 15872  # 16 long samples for 64 GPUs
NODE = 8
PHASES = ("generate", "train", "step")
WAYS: dict[str, list[tuple[int, list[str]]]] = {
    "8B": [
        (64, []),
        (64, ["parallel.replicate=8"]),
        (64, ["parallel.tensor=8"]),
        (1024, []),
        (1024, ["parallel.replicate=128"]),
        (1024, ["parallel.replicate=16"]),
        (1024, ["parallel.tensor=8"]),
    ],
    "32B": [
        (64, []),
        (64, ["parallel.replicate=8"]),
        (64, ["parallel.tensor=8"]),
        (1024, []),
        (1024, ["parallel.replicate=32"]),
        (1024, ["parallel.tensor=8"]),
        (1024, ["parallel.tensor=8", "parallel.replicate=16"]),
    ],
    "30B-A3B": [(64, []), (64, ["parallel.replicate=4"]), (1024, []), (1024, ["parallel.replicate=32"])],
}


def planned(shape: str, gpus: int, prompts: int, new: int, options: list[str]) -> PlanResult:
    """The plan that `ebbtide plan` makes."""
    rollout = {
        "prompts_per_step": prompts,
        "group_size": SAMPLES,
        "max_prompt_tokens": PROMPT,
        "max_new_tokens": new,
    }
    settings = [f"model.scratch.{one}" for one in SHAPES[shape]] + [
        f"rollout.{key}={value}" for key, value in rollout.items()
    ]
    config = load(CONFIG, [*settings, "checkpoint=null", f"parallel.gpus={gpus}", *options])
    shared = mesh_shape(config.parallel, None, NODE)
    machine = machine_for("h200", None, None, None, None, shared.ranks_per_node)
    predictor = Predictor(find_shape(config.model), machine, sharing=shared)
    return PlanSearch(predictor, max_workload(config), machine.device_gib, machine.host_gib).choose(config)


def predict_row(label: str, shape: str, gpus: int, prompts: int, options: list[str], new: int = NEW) -> list[Row]:
    """Plans one run, prints it as a row of the table, and returns the rows of the results file."""
    chosen = planned(shape, gpus, prompts, new, options)
    found = chosen.candidate.prediction
    if not chosen.fits:
        print(f"| {label.partition(': ')[2].replace(' 1 GPUs', ' 1 GPU')} | does not fit |", flush=True)
        return [Row(label, "fits", 0.0, "(1 = yes)")]
    seconds = {phase: found.phases[phase].seconds for phase in PHASES}
    communication = sum(phase.communication for phase in found.phases.values())
    exposed = sum(phase.exposed_communication for phase in found.phases.values())
    tokens = prompts * SAMPLES * (PROMPT + new) / found.seconds / gpus
    held = found.phases["step"].device
    state = sum(held.get(name, 0) for name in ("weights", "grads", "master", "moments"))
    figures = {
        "whole step": (found.seconds, "s"),
        **{phase: (value, "s") for phase, value in seconds.items()},
        "talk": (communication, "s"),  # the names of the rows are those of earlier runs
        "talk exposed": (exposed, "s"),
        "tokens a second and GPU": (tokens, "tok/s"),
        "peak": (found.peak / GIB, "GiB"),
        "weights, gradients and optimizer": (state / GIB, "GiB"),
        "host of a node": (max(found.host, found.loading_bytes) / GIB, "GiB"),
    }
    cells = [
        f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if unit == "GiB" else f"{value:.2f}"
        for value, unit in figures.values()
    ]
    print(f"| {label.partition(': ')[2].replace(' 1 GPUs', ' 1 GPU')} | {' | '.join(cells)} |", flush=True)
    return [Row(label, f"computed: {name}", value, unit) for name, (value, unit) in figures.items()]


def heading(what: str) -> None:
    columns = ("whole step, s", *PHASES, "comm.", "exposed", "tok/s/GPU", "peak, GiB", "held, GiB", "node's host, GiB")
    print(f"\n| {what} | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")


def scaled(stage: str, prompts: Callable[[int], int]) -> Iterator[list[Row]]:
    heading(stage)
    rows: list[Row] = []
    for shape in SHAPES:
        for gpus in GPUS:
            rows += predict_row(f"{stage}: {shape}, {gpus:,} GPUs", shape, gpus, prompts(gpus), [])
    yield rows


def ways() -> Iterator[list[Row]]:
    heading("ways")
    rows: list[Row] = []
    for shape, tried in WAYS.items():
        for gpus, options in tried:
            named = ", ".join(one.removeprefix("parallel.") for one in options) or "data alone"
            rows += predict_row(f"ways: {shape}, {gpus:,} GPUs, {named}", shape, gpus, PROMPTS * gpus, options)
    yield rows


def few() -> Iterator[list[Row]]:
    heading("few")
    rows: list[Row] = []
    for shape in ("8B", "32B"):
        for tensor in (1, 2, 4, 8):
            label = f"few: {shape}, {FEW_GPUS} GPUs, tensor={tensor}"
            rows += predict_row(label, shape, FEW_GPUS, FEW_PROMPTS, [f"parallel.tensor={tensor}"], FEW_NEW)
    yield rows


STAGES: dict[str, Callable[[], Iterator[list[Row]]]] = {
    "weak": lambda: scaled("weak", lambda gpus: PROMPTS * gpus),
    "strong": lambda: scaled("strong", lambda gpus: 1024),
    "ways": ways,
    "few": few,
}


def main() -> None:
    for name in sys.argv[1:] or list(STAGES):
        others = kept("scale", beginning(f"{name}:"))
        for rows in STAGES[name]():
            save("scale", [*others, *rows])


if __name__ == "__main__":
    main()
