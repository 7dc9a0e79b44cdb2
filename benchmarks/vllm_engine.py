"""`rollout.engine: vllm`: GRPO steps of the Qwen3-1.7B shape with vLLM in the trainer's process, in sleep mode between
generations and then awake throughout, beside the paged engine without exact log-probs.

    PYTHONPATH=src:PEERS python benchmarks/vllm_engine.py [vllm] [paged]

16 prompts x 8 samples of 126 + 256 tokens. The learning rate is so large that log-probs of older weights would
be far from the trainer's; the differences are those of steps after an update. vLLM starts once: after step SLEEPING it
is left awake.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from peers import use_colocated_vllm

use_colocated_vllm()
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):  # of TRL; a run of ours has one process
    del os.environ[name]

import torch  # noqa: E402
from common import Row, add  # noqa: E402
from turns import my_turn  # noqa: E402

from ebbtide.algorithms.loop import train  # noqa: E402
from ebbtide.config import load  # noqa: E402
from ebbtide.report.report import Report  # noqa: E402
from ebbtide.rollout.vllm_engine import VllmEngine  # noqa: E402
from rollout import CONFIG, IS_TINY, TINY  # noqa: E402

SLEEPING, AWAKE, KV_GIB = 5, 5, 6
VLLM = [
    "rollout.engine=vllm",
    "rollout.vllm.memory_share=0.1",
    # With this vLLM does not measure free memory, which others that start meanwhile take and give back.
    f'rollout.vllm.args={{"kv_cache_memory_bytes": {KV_GIB << 30}}}',
]
CALLED = {"_load_weights": "weight update", "_run": "generation alone", "_sleep": "falls asleep"}
PHASES = ("generate", "logprob", "train", "step")


class Waiting(Report):
    """Waits for its turn where the run would begin, with everything built."""

    def begin(self, *given: Any) -> None:
        my_turn()
        super().begin(*given)


class Watch:
    """Measures what the engine does around its generations, and keeps vLLM awake after step `SLEEPING`."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {name: [] for name in CALLED}
        self._own = {name: getattr(VllmEngine, name) for name in self.seconds}

    def measured(self, name: str) -> Any:
        def call(engine: VllmEngine, *given: Any) -> Any:
            if name == "_sleep" and len(self.seconds["_load_weights"]) == SLEEPING:
                engine._settings = engine._settings.model_copy(update={"sleep_level": 0})
            _wait()
            began = time.perf_counter()
            found = self._own[name](engine, *given)
            _wait()
            self.seconds[name].append(time.perf_counter() - began)
            return found

        return call


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run(options: Sequence[str], steps: int) -> list[dict[str, float]]:
    """A run's lines of metrics.jsonl."""
    with tempfile.TemporaryDirectory() as folder:
        task = 'task.python={"object": "varied_task:Varied"}'
        fixed = [f"train.steps={steps}", f"run.folder={folder}/run", "report.samples_every=0", "checkpoint=null"]
        config = load(
            CONFIG,
            [
                *(TINY if IS_TINY else []),
                *fixed,
                "task.builtin=null",
                task,
                "model.scratch.tied=true",
                "optimizer.lr=1e-4",
                *options,
            ],
        )
        with Waiting(config, "benchmark") as report:
            train(config, report)
        return [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]


def rows_of(case: str, lines: Sequence[dict[str, float]]) -> list[Row]:
    def middle(name: str) -> float:
        return statistics.median(line.get(name, 0.0) for line in lines)

    return [
        Row(case, "whole step", middle("seconds"), "s"),
        *(Row(case, phase, middle(f"seconds/{phase}"), "s") for phase in PHASES),
        Row(case, "log-probs off the trainer's, mean", middle("mismatch"), "nats"),
        Row(case, "log-probs off, largest", max(line["mismatch_max"] for line in lines), "nats"),
    ]


def vllm() -> list[Row]:
    watch = Watch()
    replaced = {name: watch.measured(name) for name in watch.seconds}
    with patch.multiple(VllmEngine, **replaced):
        lines = run(VLLM, SLEEPING + AWAKE)
    rows = []
    for case, first, last in (
        ("engine vllm, sleep level 2", 1, SLEEPING),
        ("engine vllm, awake", SLEEPING + 1, SLEEPING + AWAKE),
    ):
        rows += rows_of(f"{case}, Qwen3-1.7B 16 x 8", lines[first:last])
        for name, called in (
            ("_load_weights", "weight update"),
            ("_run", "generation alone"),
            ("_sleep", "falls asleep"),
        ):
            # The first call of `_sleep` is at the end of the start.
            taken = watch.seconds[name][name == "_sleep" :][first:last]
            rows.append(Row(f"{case}, Qwen3-1.7B 16 x 8", called, statistics.median(taken), "s"))
    start = [
        Row("engine vllm, start", "until the first step begins", lines[0]["seconds_startup"], "s"),
        Row("engine vllm, start", "log-probs of the first step off the trainer's, mean", lines[0]["mismatch"], "nats"),
    ]
    return [*start, *rows]


def paged() -> list[Row]:
    lines = run(["rollout.exact=false"], SLEEPING)
    return rows_of("engine paged, not exact, Qwen3-1.7B 16 x 8", lines[1:])


def main() -> None:
    if sys.argv[1:] == ["paged"]:
        my_turn()  # before it takes memory: it starts soon
    for name in sys.argv[1:] or ["vllm", "paged"]:  # in this order, as vLLM's allocator needs torch's own as it was
        add("vllm_engine", {"vllm": vllm, "paged": paged}[name]())


if __name__ == "__main__":
    main()
