"""What exact log-probs are worth: reward by step of runs of the recipe `gsm8k`, with `rollout.exact` and without.

    python benchmarks/gsm8k_exact.py exact=RUN,RUN corrected=RUN,RUN off=RUN,RUN [--steps 50] [--picture FILE.svg]

Each RUN is a folder with a metrics.jsonl, one per seed, of `ebbtide train gsm8k seed=N`: with `rollout.exact=true`;
with `rollout.exact=false loss.importance_sampling.high=2`; and with `rollout.exact=false`. The first `--steps` steps of
each are compared, and the accuracy after the last of them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path

from common import Row, save
from gsm8k import Run

NAMES = {"exact": "exact", "corrected": "not exact, corrected (TIS)", "off": "not exact"}
LAST = 10  # steps, over which the reward at the end is averaged


def first_steps(run: Run, steps: int) -> Run:
    """The run as it was after its first steps."""
    return Run(run.name, run.lines[: steps + 1])


def rewards(run: Run) -> list[float]:
    """The mean reward of each step."""
    return [float(line["reward"]) for line in run.lines[1:]]


def of_arm(name: str, runs: list[Run]) -> Iterator[Row]:
    ends = [statistics.mean(rewards(run)[-LAST:]) for run in runs]
    yield Row(name, "seeds", len(runs), "")
    yield Row(name, "steps", min(len(run.steps) for run in runs), "")
    yield Row(name, f"reward of the last {LAST} steps, mean", statistics.mean(ends), "")
    yield Row(name, f"reward of the last {LAST} steps, lowest", min(ends), "")
    yield Row(name, f"reward of the last {LAST} steps, highest", max(ends), "")
    accuracies = [100 * run.accuracies[-1] for run in runs if run.accuracies]
    if accuracies:
        yield Row(name, "test accuracy at the end, mean", statistics.mean(accuracies), "%")
        yield Row(name, "test accuracy at the end, lowest", min(accuracies), "%")
        yield Row(name, "test accuracy at the end, highest", max(accuracies), "%")
    lines = [line for run in runs for line in run.lines[1:]]
    yield Row(name, "mismatch, mean", statistics.mean(line["mismatch"] for line in lines), "nats")
    yield Row(name, "mismatch, largest", max(line["mismatch_max"] for line in lines), "nats")
    for step in range(LAST, min(len(run.steps) for run in runs) + 1, LAST):
        until = [statistics.mean(rewards(run)[step - LAST : step]) for run in runs]
        yield Row(name, f"reward of steps {step - LAST + 1} to {step}", statistics.mean(until), "")


def draw(arms: dict[str, list[Run]], file: Path) -> None:
    """The reward by step: a thin line for each seed, a thick one for their mean."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 3.8), layout="constrained")
    for number, (name, runs) in enumerate(arms.items()):
        curves, colour = [rewards(run) for run in runs], f"C{number}"
        for curve in curves:
            axis.plot(range(1, len(curve) + 1), curve, color=colour, linewidth=0.5, alpha=0.5)
        middle = [statistics.mean(values) for values in zip(*curves, strict=False)]
        axis.plot(range(1, len(middle) + 1), middle, color=colour, linewidth=2, label=NAMES[name])
    axis.set(xlabel="step", ylabel="mean reward")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", nargs="+", metavar="NAME=RUN,RUN")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    arms = {}
    for one in given.arms:
        name, _, folders = one.partition("=")
        if name not in NAMES:
            parser.error(f"`{name}` is not one of {', '.join(NAMES)}")
        arms[name] = [first_steps(Run.read(name, Path(folder)), given.steps) for folder in folders.split(",")]
    save("gsm8k_exact", [row for name, runs in arms.items() for row in of_arm(NAMES[name], runs)])
    if given.picture:
        draw(arms, given.picture)


if __name__ == "__main__":
    main()
