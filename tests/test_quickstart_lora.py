"""The quickstart with adapters, on top of a short run of all weights: it learns, and its merged model answers alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ebbtide.algorithms.loop import train
from ebbtide.checkpoint.export import export
from ebbtide.checkpoint.initial import with_runs_as_models
from ebbtide.config import load
from ebbtide.model.load import load_model
from ebbtide.report.report import Report

SMALLER = ["task.builtin.options.digits=3", "task.size=800", "rollout.max_new_tokens=6", "rollout.prompts_per_step=16"]


def run(folder: Path, *changes: str):
    config = with_runs_as_models(load("quickstart", [f"run.folder={folder}", *SMALLER, *changes]), print)
    with Report(config, "test") as report:
        return train(config, report).model


@pytest.mark.slow
def test_quickstart_learns_with_adapters(tmp_path) -> None:
    run(tmp_path / "full", "train.steps=20", "evaluate=null")
    adapted = ["model.scratch=null", f"model.path={tmp_path}/full", "model.lora.rank=8", "optimizer.lr=2e-3"]
    model = run(tmp_path / "run", *adapted, "train.steps=45", "evaluate.every=45")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    before, after = (line["evaluate/reward"] for line in lines if "evaluate/reward" in line)
    assert before < 0.2
    assert after > before + 0.08  # 0.14 and 0.29

    export(tmp_path / "run", tmp_path / "merged", merge=True, say=print)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    tokenizer = load_model(load("quickstart")).tokenizer
    prompts = torch.tensor([tokenizer.encode(f"{digits}=") for digits in ("123", "907", "555", "840", "268")])
    answers = [one.generate(prompts, do_sample=False, max_new_tokens=6, pad_token_id=0) for one in (model, merged)]
    assert torch.equal(*answers)
    assert len({tuple(answer) for answer in answers[0][:, 4:].tolist()}) > 1
