"""A whole GRPO step, phase by phase: the Qwen3-1.7B shape with random weights, 16 prompts x 8 samples of 126 + 256
tokens, no KL. Beside it TRL's GRPOTrainer, where TRL is installed.

    python benchmarks/grpo_step.py [ebbtide] [0.6b] [tied] [8b] [away] [offload] [trl]

ebbtide: the optimizer on the device throughout. 0.6b: the same with the Qwen3-0.6B shape. tied: with the embedding as
the head, as Qwen's own and TRL's model. 8b: the Qwen3-8B shape with completions of 100 + 256 tokens, planned for a
budget of 79 GiB. away: the optimizer's state on the host in generate.
offload: the inputs of blocks on the host between forward and backward, the blocks made again. TRL has the same model,
prompts, lengths and optimizer, in bf16 with transformers' `generate`. beside_peers.py runs tied and 0.6b beside TRL
with vLLM colocated. Stages that are not named keep the figures of an earlier run.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import Row, beginning, kept, save
from turns import my_turn

from ebbtide.algorithms.loop import train
from ebbtide.config import load
from ebbtide.model.load import load_model
from ebbtide.parallel.comm import Comm
from ebbtide.report.report import Report

CONFIG = str(Path(__file__).parent / "configs" / "qwen3-1.7b.yaml")
PLANNED = str(Path(__file__).parent / "configs" / "qwen3-1.7b-planned.yaml")  # sets nothing that a plan may choose
SMALL = ["model.scratch.hidden=1024", "model.scratch.mlp=3072"]  # the 0.6B shape, without a tied head
LARGE = [  # the 8B shape
    *("model.scratch.layers=36", "model.scratch.hidden=4096", "model.scratch.heads=32", "model.scratch.mlp=12288"),
    *("rollout.max_prompt_tokens=100", "task.python.options.length=100", "memory.budget_gib=79"),
]
STEPS = 5
VARIED = ["task.builtin=null", "task.python.object=varied_task:Varied"]  # a reward that differs within groups
PHASES = ("generate", "score", "logprob", "train", "step")


def ours(label: str, options: list[str], config: str = CONFIG) -> list[Row]:
    lines = steps(options, config=config)
    timed = [line for line in lines if line["step"] > 1]  # the first compiles and captures

    def middle(name: str) -> float:
        return statistics.median(line.get(name, 0.0) for line in timed)

    return [
        Row(label, "whole step", middle("seconds"), "s"),
        *(Row(label, phase, middle(f"seconds/{phase}"), "s") for phase in PHASES),
        Row(label, "exposed", middle("seconds_exposed"), "s"),
        Row(label, "peak", max(line["peak_gib"] for line in timed), "GiB"),
        Row(label, "log-probs off the trainer's, mean", middle("mismatch"), "nats"),
        Row(label, "first step", lines[0]["seconds"], "s"),
    ]


def steps(options: list[str], comm: Comm | None = None, *, config: str = CONFIG) -> list[dict[str, float]]:
    """A run's lines of metrics.jsonl."""
    with tempfile.TemporaryDirectory() as folder:
        loaded = load(
            config,
            [
                f"train.steps={STEPS}",
                f"run.folder={folder}/run",
                "report.samples_every=0",
                "checkpoint=null",
                *VARIED,
                *options,
            ],
        )
        with Report(loaded, "benchmark") as report:
            train(loaded, report, comm=comm)
        return [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]


def trl() -> list[Row]:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    config = load(CONFIG)
    loaded = load_model(config)
    loaded.tokenizer.pad_token = loaded.tokenizer.pad_token or loaded.tokenizer.eos_token
    begun: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            begun.append(time.perf_counter())

        def on_train_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            begun.append(time.perf_counter())

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(completion) % 7) for completion in completions]

    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=8,
            num_generations=8,
            max_completion_length=256,
            max_steps=3,
            beta=0.0,
            bf16=True,
            gradient_checkpointing=False,
            learning_rate=1e-6,
            report_to=[],
            save_strategy="no",
            generation_kwargs={"eos_token_id": None},
        )
        prompts = ["".join(str((7 * place + number) % 10) for place in range(125)) + "=" for number in range(64)]
        trainer = GRPOTrainer(
            model=loaded.model,
            reward_funcs=reward,
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=loaded.tokenizer,
            callbacks=[Clock()],
        )
        torch.cuda.reset_peak_memory_stats()
        trainer.train()
    taken = [later - earlier for earlier, later in itertools.pairwise(begun)]
    return [
        Row("TRL", "whole step", statistics.median(taken[1:]), "s"),
        Row("TRL", "peak", torch.cuda.max_memory_allocated() / 2**30, "GiB"),
    ]


def main() -> None:
    my_turn()
    away = ['memory.offload={"generate": ["moments", "master", "grads"]}']
    stages: dict[str, tuple[str, Callable[[], list[Row]]]] = {
        "ebbtide": ("Ebbtide", lambda: ours("Ebbtide", [])),
        "0.6b": ("0.6B", lambda: ours("0.6B", SMALL)),
        "tied": ("tied", lambda: ours("tied", ["model.scratch.tied=true"])),
        "8b": ("8B", lambda: ours("8B within 79 GiB", LARGE, PLANNED)),
        "away": ("optimizer away", lambda: ours("optimizer away in generate", away)),
        "offload": (
            "activations offloaded",
            lambda: ours("activations offloaded", ["memory.activations.preset=offload"]),
        ),
        "trl": ("TRL", trl),
    }
    for name in sys.argv[1:] or list(stages):
        begins, stage = stages[name]
        rows = stage()
        save("grpo_step", [*kept("grpo_step", beginning(begins)), *rows])


if __name__ == "__main__":
    main()
