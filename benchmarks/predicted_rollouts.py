"""Seconds of generation as the planner predicts them for an H200, beside what rollout.py measured there. Runs anywhere.

    python benchmarks/predicted_rollouts.py

The constants in rollout/generation_costs.py are fitted to these workloads.
"""

from __future__ import annotations

import json
import statistics

from common import RESULTS, Row, save
from rollout_work import Work, grpo_work, lengths_work

from ebbtide.model.shape import Shape
from ebbtide.model.workload import Workload
from ebbtide.parallel.rank_model import RankModel
from ebbtide.rollout.generation_costs import GenerationCosts
from ebbtide.system.machine import machine_for

HEADS = (16, 8, 128)
SHAPES = {
    "0.6B": Shape("qwen3", 28, 1024, *HEADS, 3072, 151936, tied=True),
    "1.7B": Shape("qwen3", 28, 2048, *HEADS, 6144, 151936, tied=True),
    "experts": Shape("qwen3_moe", 12, 2048, *HEADS, 768, 151936, tied=False, experts=32, experts_per_token=4),
}
CASES: dict[str, tuple[str, Work]] = {
    **{f"GRPO {n} x 8, Qwen3-{shape}": (shape, grpo_work(n)) for shape in ("0.6B", "1.7B") for n in (16, 64)},
    **{f"lengths of 100 to 1,024, Qwen3-{shape}": (shape, lengths_work()) for shape in ("0.6B", "1.7B")},
    "16 x 8 of 126 + 4,096, Qwen3-1.7B": ("1.7B", grpo_work(16, 4096)),
    "experts, 16 x 8": ("experts", grpo_work(16)),
}


def workload(work: Work) -> Workload:
    news = [sampling.max_new_tokens for _, sampling in work]
    prompt = statistics.mean(len(request.prompt) for request, _ in work)
    return Workload(len(work), len(work[0][0].seeds), prompt, statistics.mean(news), max(news), max(news))


def main() -> None:
    found = json.loads((RESULTS / "rollout.json").read_text())
    measured = {row["case"]: row["value"] for row in found["rows"] if row["metric"] == "seconds"}
    machine, rows = machine_for("h200", None, 128, None), []
    for case, (shape, work) in CASES.items():
        sequences = sum(len(request.seeds) for request, _ in work)
        predicted = GenerationCosts(RankModel(SHAPES[shape], machine)).seconds(workload(work), sequences)
        rows += [
            Row(case, "predicted", predicted, "s"),
            Row(case, "measured", measured[case], "s"),
            Row(case, "predicted off measured", 100 * (predicted / measured[case] - 1), "%"),
        ]
    save("predicted_rollouts", rows, gpu=found["gpu"], version=found["torch"])


if __name__ == "__main__":
    main()
