"""A run folder as a run leaves it, made in no time; a server of its page; and the Chromium that looks at it."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ebbtide.config import load
from ebbtide.config.document import to_yaml
from ebbtide.report.page.serve import build_server

PHASES = {"generate": 0.8, "score": 0.1, "logprob": 0.3, "train": 1.2, "step": 0.2}
HOLDINGS = {"weights": 3.0, "grads": 1.5, "moments": 6.0, "other": 2.5}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def metrics_line(step: int) -> dict[str, Any]:
    line: dict[str, Any] = {
        "step": step,
        "reward": round(1 - 0.9**step, 4),
        "loss": -0.05 / step,
        "entropy": 2 / step,
        "samples": 4,
        "seconds": 2.6 + step / 100,
        "seconds_exposed": 0.05,
        "peak_gib": 13.0,
        "tokens_per_second": 1000.0,
    }
    for phase, seconds in PHASES.items():
        line[f"seconds/{phase}"] = seconds + step / 100
        line[f"seconds_exposed/{phase}"] = 0.05 if phase == "step" else 0.0
        line[f"peak_gib/{phase}"] = sum(HOLDINGS.values())
        line |= {f"device_gib/{phase}/{name}": gib for name, gib in HOLDINGS.items()}
        line[f"moved_gib/{phase}"] = 6.0 if phase == "step" else 0.0
    return line


def sample_line(step: int, number: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": step,
        "group": number // 2,
        "sample": number % 2,
        "prompt": f"What is {number} + {step}?",
        "answer": str(number + step),
        "completion": f"né {number + step}",
        "reward": number / 4,
        "parts": {"exact": number / 4},
        "advantage": number - 1.5,
        "finish": "stop",
        "tokens": 4,
        "failure": None,
        "failure_message": "",
        "token_chars": [1, 1, 1 + len(str(number + step)), 0],
        "logprobs": [-0.01, -3.0, -0.7, -0.2],
        **changes,
    }


def plan() -> dict[str, Any]:
    device = {"weights": 3.0, "grads": 1.5, "moments": 6.0, "kv_cache": 1.0, "activations": 1.2}
    phase = {
        "seconds": 0.7,
        "seconds_exposed": 0.0,
        "moved_gib": 0.0,
        "peak_gib": 12.7,
        "host_gib": 0.0,
        "device_gib": device,
    }
    return {
        "machine": {"name": "NVIDIA H200", "device_gib": 139.8, "host_gib": 125.0, "rates": "known figures for h200"},
        "budget_gib": 12.9,
        "fits": True,
        "words": ["The optimizer's moments stay on the device.", "Nothing <b>moves</b> while it generates."],
        "step_seconds": 2.3,
        "phases": dict.fromkeys(("generate", "train", "step"), phase),
    }


def start_line(step: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "step": step,
        "time": "2026-11-16T10:00:00+00:00",
        "ebbtide": "0.1.0",
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "torch": "2.11.0",
        "transformers": "5.17.0",
        "python": "3.12.3",
        "cuda": "13.0",
        "device": "NVIDIA H200",
        **changes,
    }


def append(file: Path, *lines: dict[str, Any]) -> None:
    with file.open("a") as opened:
        opened.writelines(json.dumps(line) + "\n" for line in lines)


def made_run(folder: Path, steps: int = 5, *changes: str, planned: bool = False) -> Path:
    """`changes`: of the quickstart's config."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(load("quickstart", [f"train.steps={steps}", *changes])))
    append(folder / "versions.jsonl", start_line())
    append(folder / "metrics.jsonl", {"step": 0, "evaluate/reward": 0.05, "seconds/evaluate": 0.2})
    append(folder / "metrics.jsonl", *map(metrics_line, range(1, steps + 1)))
    append(
        folder / "rollouts.jsonl", *(sample_line(step, number) for step in range(1, steps + 1) for number in range(4))
    )
    if planned:
        (folder / "plan.json").write_text(json.dumps(plan()))
    return folder


@contextmanager
def serving(*folders: Path) -> Iterator[int]:
    """The port of a server for these runs."""
    with build_server(folders, 0) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield running.server_address[1]
        finally:
            running.shutdown()
            thread.join()
