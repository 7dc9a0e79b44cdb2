"""GSM8K with the recipe `gsm8k`: accuracy by step and by second of finished runs, ours beside TRL's.

    python benchmarks/gsm8k.py --ours RUN [RUN ...] [--trl RUN] [--other NAME=RUN ...] [--picture FILE.svg]

Each RUN is a folder with a metrics.jsonl: of `ebbtide train gsm8k`, one per seed, or of benchmarks/gsm8k_trl.py. The
first of `--ours` is the one that is timed: it ran on the machine and on the day of TRL's. `--other` are runs within a
budget, or with adapters. Without `--trl` the curve of an earlier run of TRL is kept, whose steps are drawn as if each
had taken the same time. Seconds are those of steps, without evaluations; start-up is what comes before the first step,
and is added where said. benchmarks/gsm8k_runs.sh makes the runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from common import RESULTS, Row, kept, save

ACCURACY, TRL = "evaluate/pass@1", "TRL 1.16 + vLLM 0.24"
COLOURS = {"Ebbtide": "#1f77b4", TRL: "#d62728"}
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
        """A run of which the results file has rows; its steps as if each had taken the same time."""
        rows = json.loads((RESULTS / "gsm8k.json").read_text())["rows"]
        found = {row["metric"]: row["value"] for row in rows if row["case"] == name}
        steps = round(found["steps"])
        lines: list[dict[str, Any]] = []
        for step in range(steps + 1):
            accuracy = found.get(f"test accuracy after {step} steps")
            line = {"step": step, "seconds": found["training"] / steps, "seconds_startup": found["start-up"]}
            line["peak_gib"] = found["peak of the allocator"]
            lines.append(line if accuracy is None else {**line, ACCURACY: accuracy / 100})
        return Run(name, lines)

    def until(self, step: int) -> Run:
        """The beginning of this run."""
        return Run(self.name, self.lines[: step + 1])

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
        return max(line["peak_gib"] for line in self.lines[1:])

    def seconds_to(self, accuracy: float) -> float | None:
        """Seconds of training until an evaluation reaches this accuracy; None where none does."""
        return next((passed for _, passed, reached in self.curve() if reached >= accuracy), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", nargs="+", type=Path, required=True)
    parser.add_argument("--trl", type=Path)
    parser.add_argument("--other", nargs="*", default=[], metavar="NAME=RUN")
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    ours = [Run.read("Ebbtide", folder) for folder in given.ours]
    trl = Run.read(TRL, given.trl) if given.trl else Run.stored(TRL)
    others = [Run.read(name, Path(folder)) for name, _, folder in (one.partition("=") for one in given.other)]
    measured = [ours[0], *([trl] if given.trl else []), *others]
    rows = [*(row for run in measured for row in of_run(run)), *of_seeds(ours), *compared(ours[0], trl)]
    done = {row.case for row in rows}
    save("gsm8k", [*kept("gsm8k", done.__contains__), *rows])
    if given.picture:
        draw([*ours, trl, *others], given.picture)


def of_run(run: Run) -> Iterator[Row]:
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
    last = [max(run.accuracies[-3:]) - min(run.accuracies[-3:]) for run in runs]
    yield Row(case, "last three evaluations lie within", 100 * max(last), "points")


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


def draw(runs: list[Run], file: Path) -> None:
    """Both curves in one picture: by step and by second."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout="constrained")
    named: set[str] = set()
    more = dict(zip(dict.fromkeys(run.name for run in runs if run.name not in COLOURS), OTHERS, strict=False))
    colours = {**COLOURS, **more}
    for run in runs:
        for axis, place in zip(axes, (0, 1), strict=True):
            points = [(point[place], 100 * point[2]) for point in run.curve()]
            label = None if run.name in named else run.name
            axis.plot(*zip(*points, strict=True), color=colours[run.name], marker="o", markersize=3, label=label)
        named.add(run.name)
    axes[0].set(xlabel="step", ylabel="greedy accuracy on the 1,319 test problems (%)")
    axes[1].set(xlabel="seconds of training")
    for axis in axes:
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(file, metadata={"Date": None})


if __name__ == "__main__":
    main()
