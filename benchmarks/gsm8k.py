"""GSM8K with the recipe `gsm8k`: accuracy by step and by second of finished runs, ours beside TRL's.

    python benchmarks/gsm8k.py [--ours RUN ...] [--other NAME[=RUN] ...] [--trl RUN] [--timed RUN]
        [--alone NAME=STEP ...] [--gpu NAME --torch VERSION] [--picture FILE.svg]

Each RUN is a folder with a metrics.jsonl: of `ebbtide train gsm8k`, one per seed, or of benchmarks/gsm8k_trl.py.
`--other` are runs within a budget, or with adapters. Both may have shared a GPU (benchmarks/gsm8k_runs.sh), so their
seconds are left out, but for the median of the steps after STEP, if `--alone` names one after which a run had the GPU
for itself. `--trl` and `--timed`, which is one of ours, ran alone on one machine on one day. Runs that are not given,
and others without a folder, are kept from the results file. Seconds are those of steps, without evaluations; start-up
is what comes before the first step, and is added where said. `--gpu` and `--torch` say what the runs ran on, where that
is not this machine.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from common import RESULTS, Row, kept, save

ACCURACY, TRL, TIMED = "evaluate/pass@1", "TRL 1.16 + vLLM 0.24", "Ebbtide, alone, 160 steps"
FOLLOWED = {"completion_tokens": "tokens", "finished": "", "entropy": "nats", "groups_with_signal": ""}
SEEDS = 3
OURS, THEIRS = "#1f77b4", "#d62728"
OTHERS = ("#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f")


@dataclass(frozen=True)
class Run:
    """A finished run: its lines of metrics, from step 0."""

    name: str
    lines: list[dict[str, Any]]

    @staticmethod
    def read(name: str, folder: Path) -> Run:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return Run(name, lines)

    @staticmethod
    def stored(name: str) -> Run:
        """A run of which the results file has rows; the steps between two of them as if all had taken the same time."""
        rows = json.loads((RESULTS / "gsm8k.json").read_text())["rows"]
        found = {row["metric"]: row["value"] for row in rows if row["case"] == name}
        steps = round(found["steps"])
        passed = {step: found.get(f"seconds of {step} steps") for step in range(steps)}
        marks = {0: 0.0, **{step: value for step, value in passed.items() if value is not None}}
        marks[steps] = found.get("training", math.nan)  # Runs that shared a GPU have no seconds.
        taken = [0.0]
        for (before, began), (after, ended) in pairwise(marks.items()):
            taken += [(ended - began) / (after - before)] * (after - before)
        lines: list[dict[str, Any]] = []
        for step, seconds in enumerate(taken):
            accuracy = found.get(f"test accuracy after {step} steps")
            line = {"step": step, "seconds": seconds, "seconds_startup": found.get("start-up", math.nan)}
            line["peak_gib"] = found["peak of the allocator"]
            lines.append(line if accuracy is None else {**line, ACCURACY: accuracy / 100})
        return Run(name, lines)

    @property
    def start(self) -> float:
        """Seconds from the command to the first step, without the evaluation before it."""
        return float(self.lines[1]["seconds_startup"])

    @property
    def steps(self) -> list[float]:
        """Seconds of each step."""
        return [float(line["seconds"]) for line in self.lines[1:]]

    def curve(self) -> Iterator[tuple[int, float, float]]:
        """(step, seconds of training until then, accuracy) at each evaluation."""
        for line, passed in zip(self.lines, accumulate(self.steps, initial=0.0), strict=True):
            if ACCURACY in line:
                yield line["step"], passed, line[ACCURACY]

    @property
    def accuracies(self) -> list[float]:
        return [accuracy for _, _, accuracy in self.curve()]

    @property
    def peak_gib(self) -> float:
        return max(float(line["peak_gib"]) for line in self.lines[1:])

    def seconds_to(self, accuracy: float) -> float | None:
        """Seconds of training until an evaluation reaches this accuracy; None where none does."""
        return next((passed for _, passed, reached in self.curve() if reached >= accuracy), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", nargs="*", default=[], type=Path)
    parser.add_argument("--other", nargs="*", default=[], metavar="NAME[=RUN]")
    parser.add_argument("--trl", type=Path)
    parser.add_argument("--timed", type=Path)
    parser.add_argument("--alone", nargs="*", default=[], metavar="NAME=STEP")
    parser.add_argument("--gpu")
    parser.add_argument("--torch")
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    ours = [Run.read(f"Ebbtide, seed {number}", folder) for number, folder in enumerate(given.ours)]
    folders = {name: folder for name, _, folder in (one.partition("=") for one in given.other)}
    others = {name: Run.read(name, Path(folder)) for name, folder in folders.items() if folder}
    alone = {name: int(step) for name, _, step in (one.partition("=") for one in given.alone)}
    trl = Run.read(TRL, given.trl) if given.trl else Run.stored(TRL)
    timed = Run.read(TIMED, given.timed) if given.timed else Run.stored(TIMED)
    rows = [
        *(row for run in [*ours, *others.values()] for row in of_shared(run, alone.get(run.name))),
        *(row for run, is_new in ((trl, given.trl), (timed, given.timed)) if is_new for row in of_timed(run)),
        *(of_seeds(ours) if ours else ()),
        *compared(timed, trl),
    ]
    done = {row.case for row in rows}
    save("gsm8k", [*kept("gsm8k", done.__contains__), *rows], gpu=given.gpu, version=given.torch)
    if given.picture:
        seeds = ours or [Run.stored(f"Ebbtide, seed {number}") for number in range(SEEDS)]
        draw([*seeds, *(others.get(name) or Run.stored(name) for name in folders)], timed, trl, given.picture)


def of_shared(run: Run, alone: int | None) -> Iterator[Row]:
    for step, _, accuracy in run.curve():
        yield Row(run.name, f"test accuracy after {step} steps", 100 * accuracy, "%")
    yield Row(run.name, "steps", len(run.steps), "")
    yield Row(run.name, "peak of the allocator", run.peak_gib, "GiB")
    for name, unit in FOLLOWED.items():
        for when, lines in (("first", run.lines[1:11]), ("last", run.lines[-10:])):
            if found := [line[name] for line in lines if name in line]:
                yield Row(run.name, f"{name}, {when} ten steps", statistics.mean(found), unit)
    if alone is not None:
        yield Row(run.name, "step alone on the GPU, median", statistics.median(run.steps[alone:]), "s")


def of_timed(run: Run) -> Iterator[Row]:
    for step, passed, accuracy in run.curve():
        yield Row(run.name, f"test accuracy after {step} steps", 100 * accuracy, "%")
        yield Row(run.name, f"seconds of {step} steps", passed, "s")
    yield Row(run.name, "steps", len(run.steps), "")
    yield Row(run.name, "step, median", statistics.median(run.steps), "s")
    yield Row(run.name, "training", sum(run.steps), "s")
    yield Row(run.name, "start-up", run.start, "s")
    yield Row(run.name, "peak of the allocator", run.peak_gib, "GiB")


def of_seeds(runs: list[Run]) -> Iterator[Row]:
    ends, case = [100 * run.accuracies[-1] for run in runs], f"Ebbtide, {len(runs)} seeds"
    yield Row(case, "test accuracy, mean", statistics.mean(ends), "%")
    yield Row(case, "test accuracy, lowest", min(ends), "%")
    yield Row(case, "test accuracy, highest", max(ends), "%")
    for run in runs:
        last = run.accuracies[-3:]
        yield Row(case, f"last three evaluations lie within, {run.name[9:]}", 100 * (max(last) - min(last)), "points")


def compared(ours: Run, trl: Run) -> Iterator[Row]:
    """Seconds to the accuracy that TRL has at its end."""
    goal, case = trl.accuracies[-1], "to TRL's accuracy at its end"
    theirs, reached = sum(trl.steps), ours.seconds_to(goal)
    yield Row(case, TRL, theirs, "s")
    if reached is None:
        print(f"Ebbtide's timed run does not reach {100 * goal:.1f}%")
        return
    yield Row(case, "Ebbtide", reached, "s")
    yield Row(case, "Ebbtide's share", 100 * reached / theirs, "%")
    yield Row(case, "Ebbtide's share, with start-up", 100 * (reached + ours.start) / (theirs + trl.start), "%")


def draw(runs: list[Run], timed: Run, trl: Run, file: Path) -> None:
    """Two pictures side by side: all runs by step, and those that were alone on the GPU by second."""
    import matplotlib.pyplot as plt

    figure, (by_step, by_second) = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout="constrained")
    others = dict(zip([run.name for run in runs if not run.name.startswith("Ebbtide, seed")], OTHERS, strict=False))
    labelled: set[tuple[Any, str]] = set()
    for axis, place, shown in ((by_step, 0, [*runs, trl]), (by_second, 1, [timed, trl])):
        for run in shown:
            colour = others.get(run.name, THEIRS if run is trl else OURS)
            shared = f"Ebbtide, {SEEDS} seeds"
            label = run.name if run.name in others or run is trl else "Ebbtide" if run is timed else shared
            points = [(point[place], 100 * point[2]) for point in run.curve()]
            if not points:
                continue
            told = None if (axis, label) in labelled else label
            axis.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=3, label=told)
            labelled.add((axis, label))
    by_step.set(xlabel="step", ylabel="greedy test accuracy (%)")
    by_second.set(xlabel="seconds of training, alone on the GPU")
    for axis in (by_step, by_second):
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    figure.savefig(file, metadata={"Date": None})


if __name__ == "__main__":
    main()
