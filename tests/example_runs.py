"""Runs on files of examples: their config, their data, and what comes of them."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from conftest import TINY, merged
from ebbtide.algorithms.loop import train
from ebbtide.checkpoint.resume import find_checkpoint
from ebbtide.checkpoint.store import list_checkpoints
from ebbtide.config.root import Config
from ebbtide.config.roots import validate_config
from ebbtide.report.report import Report

# What a clock or the allocator says, not the seed.
MEASURED = ("seconds", "tokens_per_second", "peak_gib", "reserved_gib", "device_gib", "host_gib", "moved_gib", "mfu")
BASE = {name: TINY[name] for name in ("device", "model", "train", "optimizer")}
DATA = {"held_out_rows": 6, "batch_size": 8, "max_tokens": 32}
SAVES = {"every": 2, "keep": 9, "keep_best": 0, "async_save": False}

Run = tuple[list[dict[str, Any]], dict[str, torch.Tensor]]
"""(metrics without what is measured, weights)."""


def write_rows(file: Path, rows: list[Any]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def digits(count: int = 30) -> list[dict[str, str]]:
    """Prompts with completions of several lengths."""
    return [{"prompt": f"{i:03d}=", "completion": f"{i:03d}" * (1 + i % 3)} for i in range(count)]


def preferences(count: int = 30) -> list[dict[str, str]]:
    """Pairs: a copy is better than a reversal."""
    return [
        {"prompt": f"{i:03d}=", "chosen": f"{i:03d}" * (1 + i % 2), "rejected": f"{i:03d}"[::-1] * (1 + i % 3)}
        for i in range(count)
    ]


def config_of(algorithm: str, changes: dict[str, Any]) -> Config:
    return validate_config(merged({**BASE, "algorithm": algorithm}, {"checkpoint": None, **changes}))


def run(config: Config, resumed: Any = None, rehearsal: Any = None) -> Run:
    with Report(config, "test", resumed=resumed) as report:
        weights = train(config, report, rehearsal).model.state_dict()
        lines = (report.folder.path / "metrics.jsonl").read_text().splitlines()
    metrics = [{k: v for k, v in json.loads(line).items() if not k.startswith(MEASURED)} for line in lines]
    return metrics, weights


def same(one: Run, other: Run) -> bool:
    return one[0] == other[0] and all(torch.equal(weight, other[1][name]) for name, weight in one[1].items())


def resumes_to_the_bit(algorithm: str, folder: Path, changes: dict[str, Any], steps: int = 5) -> None:
    """A run that was killed after its second checkpoint, and went on, is the run that never stopped."""
    whole = {**changes, "train.steps": steps, "checkpoint": SAVES, "evaluate": {"every": 2, "problems": 4}}
    straight = run(config_of(algorithm, {**whole, "run.folder": str(folder / "straight")}))
    stopped = {**whole, "run.folder": str(folder / "stopped")}
    run(config_of(algorithm, stopped))
    for saved in list_checkpoints(folder / "stopped" / "checkpoints"):
        if saved.step > 4:
            shutil.rmtree(saved.path)
    again = config_of(algorithm, {**stopped, "resume": "auto"})
    resumed = find_checkpoint(again, print)
    assert resumed is not None
    assert resumed.step == 4
    assert same(run(again, resumed), straight)
