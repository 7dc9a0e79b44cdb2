"""SFT, DPO and distillation on the Qwen3-1.7B shape with random weights: seconds by phase, tokens/s, peak, and how far
the plan was off. Beside SFT TRL's SFTTrainer, where TRL is installed: same model, texts, lengths and optimizer, bf16.

    python benchmarks/algorithms.py [sft] [trl] [dpo] [distill]

sft: 64 texts of 1,024 tokens per step. dpo: 32 pairs of 126 + 256 tokens per step, with the reference's log-probs
computed in each step. distill: a teacher of the 4B shape, 16 x 8 completions of 126 + 256 tokens per step, reverse KL
over the whole vocabulary.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import Row, beginning, kept, save

from ebbtide.algorithms.loop import train
from ebbtide.config import load
from ebbtide.model.load import load_model
from ebbtide.report.report import Report

GRPO = str(Path(__file__).parent / "configs" / "qwen3-1.7b.yaml")
STEPS = 5
TEXTS, LENGTH = 64, 1024
SHAPE = (
    "{architecture: qwen3, layers: 28, hidden: 2048, heads: 16, kv_heads: 8, head_dim: 128, mlp: 6144, context: 40960,"
    " vocabulary: 151936}"
)
TEACHER = (
    "{architecture: qwen3, layers: 36, hidden: 2560, heads: 32, kv_heads: 8, head_dim: 128, mlp: 9728, context: 40960,"
    " vocabulary: 151936}"
)
COMMON = f"device: cuda\nmodel: {{scratch: {SHAPE}}}\noptimizer: {{lr: 1.0e-6}}\ntrain: {{microbatch_tokens: 16384}}\n"
CONFIGS = {
    "sft": f"algorithm: sft\n{COMMON}data: {{train: DATA, batch_size: {TEXTS}, max_tokens: {LENGTH}}}\n",
    "dpo": f"algorithm: dpo\n{COMMON}data: {{train: DATA, batch_size: 32, max_tokens: 383}}\n"
    "loss: {reference: each_step}\n",
    "distill": f"algorithm: distill\n{COMMON}teacher: {{scratch: {TEACHER}}}\n"
    "task: {python: {object: 'varied_task:Varied'}}\n"
    "rollout: {prompts_per_step: 16, group_size: 8, max_prompt_tokens: 126, max_new_tokens: 256}\n",
}


def digits(count: int) -> str:
    return "".join(random.choices("0123456789", k=count))


def write_data(name: str, file: Path) -> None:
    """A file of random digits, each of which is one token; the end of text is one more."""
    random.seed(0)
    with file.open("w") as lines:
        for _ in range(4 * TEXTS):
            if name == "sft":
                row = {"text": digits(LENGTH - 1)}
            else:
                row = {"prompt": digits(126), "chosen": digits(256), "rejected": digits(256)}
            lines.write(json.dumps(row) + "\n")


def ours(name: str) -> list[Row]:
    label = f"Ebbtide {name}"
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_data(name, folder / "data.jsonl")
        (folder / "run.yaml").write_text(CONFIGS[name].replace("DATA", str(folder / "data.jsonl")))
        settings = [f"train.steps={STEPS}", f"run.folder={folder}/run", "report.samples_every=0", "checkpoint=null"]
        config = load(str(folder / "run.yaml"), settings)
        with Report(config, "benchmark") as report:
            train(config, report)
        lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        predicted = json.loads((folder / "run" / "plan.json").read_text())["phases"]
    timed: list[dict[str, float]] = [line for line in lines if line["step"] > 1]  # the first compiles and captures

    def middle(key: str) -> float:
        return statistics.median(line.get(key, 0.0) for line in timed)

    rows = [
        Row(label, "whole step", middle("seconds"), "s"),
        Row(label, "throughput", middle("tokens_per_second"), "tokens/s"),
        Row(label, "peak", max(line["peak_gib"] for line in timed), "GiB"),
        Row(label, "exposed", middle("seconds_exposed"), "s"),
    ]
    for phase in config.cycle:
        seconds, peak = middle(f"seconds/{phase}"), max(line[f"peak_gib/{phase}"] for line in timed)
        rows += [
            Row(label, f"{phase}", seconds, "s"),
            Row(label, f"{phase}, peak", peak, "GiB"),
            Row(label, f"{phase}, other", 100 * max(line[f"device_gib/{phase}/other"] for line in timed) / peak, "%"),
        ]
        if phase in predicted and phase != "score":
            plan = predicted[phase]
            rows.append(Row(label, f"{phase}, peak predicted", 100 * (plan["peak_gib"] / peak - 1), "% off"))
            if seconds > 0.05:
                rows.append(Row(label, f"{phase}, seconds predicted", 100 * (plan["seconds"] / seconds - 1), "% off"))
    return rows


def trl() -> list[Row]:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    loaded = load_model(load(GRPO))
    loaded.tokenizer.pad_token = loaded.tokenizer.pad_token or loaded.tokenizer.eos_token
    begun: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            begun.append(time.perf_counter())

        def on_train_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            begun.append(time.perf_counter())

    random.seed(0)
    with tempfile.TemporaryDirectory() as folder:
        settings = SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=16,  # 16,384 tokens at a time, as ours
            gradient_accumulation_steps=TEXTS // 16,
            max_length=LENGTH,
            packing=True,
            max_steps=STEPS,
            bf16=True,
            gradient_checkpointing=False,
            learning_rate=1e-6,
            report_to=[],
            save_strategy="no",
        )
        trainer = SFTTrainer(
            model=loaded.model,
            args=settings,
            train_dataset=Dataset.from_dict({"text": [digits(LENGTH - 1) for _ in range(TEXTS * (STEPS + 1))]}),
            processing_class=loaded.tokenizer,
            callbacks=[Clock()],
        )
        torch.cuda.reset_peak_memory_stats()
        trainer.train()
    taken = statistics.median([later - earlier for earlier, later in itertools.pairwise(begun)][1:])
    return [
        Row("TRL sft", "whole step", taken, "s"),
        Row("TRL sft", "throughput", TEXTS * LENGTH / taken, "tokens/s"),
        Row("TRL sft", "peak", torch.cuda.max_memory_allocated() / 2**30, "GiB"),
    ]


def main() -> None:
    for name in sys.argv[1:] or ["sft", "trl", "dpo", "distill"]:
        rows = trl() if name == "trl" else ours(name)
        save("algorithms", [*kept("algorithms", beginning(rows[0].case)), *rows])


if __name__ == "__main__":
    main()
