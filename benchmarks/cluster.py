"""What it costs to run on ranks: the GRPO step of benchmarks/grpo_step.py in one process, and on one rank under
FSDP2, in turns. And in one process in which kernels have run on four more streams, as FSDP2 has them on several
ranks.

    python benchmarks/cluster.py

Each run has a process of its own, as a user's has.
"""

from __future__ import annotations

import statistics
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import torch
from common import Row, save
from grpo_step import PHASES, steps
from torch.distributed import HashStore

from ebbtide.config.parallel import ParallelConfig
from ebbtide.parallel.comm import DistributedComm

TURNS = 2
ALONE, SHARDED, BESIDE = "one process", "one rank under FSDP2", "one process, four more streams"


def main() -> None:
    found: dict[str, list[dict[str, float]]] = {ALONE: [], SHARDED: [], BESIDE: []}
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as anew:
        for _ in range(TURNS):
            for case in found:
                found[case] += anew.submit(run, case).result()[1:]  # the first compiles and captures
    rows = [row for case, lines in found.items() for row in _rows(case, lines)]
    figures = {(row.case, row.metric): row.value for row in rows}
    for case, metric in ((SHARDED, "whole step"), (SHARDED, "peak"), (BESIDE, "generate")):
        rows.append(Row(case, f"{metric}, more", 100 * (figures[case, metric] / figures[ALONE, metric] - 1), "%"))
    save(Path(__file__).stem, rows)


def run(case: str) -> list[dict[str, float]]:
    if case == BESIDE:
        for _ in range(4):
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.zeros(1, device="cuda").add_(1)
    if case != SHARDED:
        return steps([])
    with DistributedComm(
        ParallelConfig(), torch.device("cuda"), HashStore(), rank=0, size=1, timeout=timedelta(minutes=10)
    ) as ranks:
        return steps([], ranks)


def _rows(case: str, lines: list[dict[str, float]]) -> list[Row]:
    def middle(name: str) -> float:
        return statistics.median(line[name] for line in lines)

    return [
        Row(case, "whole step", middle("seconds"), "s"),
        *(Row(case, phase, middle(f"seconds/{phase}"), "s") for phase in PHASES),
        Row(case, "peak", max(line["peak_gib"] for line in lines), "GiB"),
        Row(case, "steps", len(lines), ""),
    ]


if __name__ == "__main__":
    main()
