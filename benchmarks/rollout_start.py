"""From the shell to the first sampled token and the first finished step, of `ebbtide train` with a Qwen3-1.7B from a
folder on /dev/shm: 16 x 8 samples of 126 + 256 tokens.

    python benchmarks/rollout_start.py [RUNS]

The last of RUNS (2) finds all kernels in the cache. Rows are added to results/rollout.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import Row, add
from peers import saved_model

from rollout import CONFIG, IS_TINY, TINY

STEPS = 2


def run(case: str, model: list[str]) -> list[Row]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny = ["rollout.max_new_tokens=4", "rollout.prompts_per_step=2"] if IS_TINY else []
        options = [*tiny, *model, f"train.steps={STEPS}", f"run.folder={folder}/run", "report.samples_every=0"]
        command = [sys.executable, str(Path(__file__).parent / "first_token.py"), "train", CONFIG, *options]
        began = time.perf_counter()
        subprocess.run(
            [*command, "checkpoint=null", "task.builtin=null", "task.python.object=varied_task:Varied"],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=Path(__file__).parent,  # of the task
            env={**os.environ, "FIRST_TOKEN": str(folder / "first")},
        )
        whole = time.perf_counter() - began
        first, later = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
        token = float((folder / "first").read_text())
    return [
        Row(case, "until the first step begins", first["seconds_startup"], "s"),
        Row(case, "until the first tokens", token, "s"),
        Row(case, "until the first step is done", first["seconds_startup"] + first["seconds"], "s"),
        Row(case, "first step", first["seconds"], "s"),
        Row(case, "second step", later["seconds"], "s"),
        Row(case, f"until the command ends, {STEPS} steps", whole, "s"),
    ]


def main() -> None:
    # Paths are relative to the folder of the task.
    os.environ["PYTHONPATH"] = os.pathsep.join(str(Path(one).resolve()) for one in sys.path if Path(one).is_dir())
    model = TINY if IS_TINY else ["model.scratch=null", f"model.path={saved_model('1.7B')}"]
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    for number in range(runs):
        kernels = "kernels cached" if number else "as found"
        add("rollout", run(f"start, {kernels}: ebbtide train, Qwen3-1.7B", model))


if __name__ == "__main__":
    main()
