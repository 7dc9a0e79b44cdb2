"""GRPO steps in TRL with vLLM colocated, of the whole model or with adapters of rank 32 in all linear layers: what
`grpo_step.py` and `lora.py budget` are beside.

    python benchmarks/trl_steps.py [1.7B] [8B] [--lora] [--sleep] [--kv-gib 8] [--steps 5]

16 prompts x 8 samples of 126 + 256 tokens (with `--lora` 100 + 256), random weights, so that completions never end
early; bf16, no KL. `--sleep` turns vLLM's sleep mode on. `--kv-gib`: vLLM's KV cache; without it vLLM takes what it
finds free of its share, which it measures wrongly while others start. Rows are added to results/grpo_step.json, or
lora.json.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from typing import Any

from peers import saved_model, use_colocated_vllm

START = time.perf_counter()
use_colocated_vllm()

from common import Row, add  # noqa: E402
from turns import my_turn  # noqa: E402

GIB, SAMPLES, ROWS = 2**30, 128, 16


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shapes", nargs="*")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--sleep", action="store_true")
    parser.add_argument("--kv-gib", type=float)
    parser.add_argument("--steps", type=int, default=5)
    given = parser.parse_intermixed_args()
    shapes = given.shapes or ["1.7B", "8B"]
    if len(shapes) == 1:
        measure(shapes[0], given)
        return
    for name in shapes:  # Each in a process of its own: vLLM does not give its memory back.
        subprocess.run(
            [sys.executable, __file__, name, *(one for one in sys.argv[1:] if one not in shapes)], check=False
        )


def measure(name: str, given: argparse.Namespace) -> None:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation import vllm_generation

    if given.kv_gib:
        vllm_generation.LLM = partial(vllm_generation.LLM, kv_cache_memory_bytes=int(given.kv_gib * GIB))

    begun: list[float] = []
    peaks: list[tuple[float, float]] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            begun.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            free, whole = torch.cuda.mem_get_info()
            peaks.append((torch.cuda.max_memory_allocated() / GIB, (whole - free) / GIB))

        def on_train_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            begun.append(time.perf_counter())

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(sum(map(ord, completion)) % 7) for completion in completions]

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        settings = GRPOConfig(
            output_dir=f"{folder}/out",
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=SAMPLES // ROWS,
            num_generations=8,
            max_completion_length=256,
            max_steps=given.steps,
            beta=0.0,
            bf16=True,
            gradient_checkpointing=name == "8B",  # Without it the 8B shape and vLLM do not fit beside each other.
            learning_rate=1e-5,
            optim="adamw_torch_fused",
            model_init_kwargs={"dtype": "bfloat16"},
            use_vllm=True,
            vllm_mode="colocate",
            vllm_enable_sleep_mode=given.sleep,
            vllm_gpu_memory_utilization=0.05 if given.kv_gib else 0.3,
            vllm_max_model_length=512,
            generation_kwargs={"ignore_eos": True},
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        length = 99 if given.lora else 125
        prompts = ["".join(str((7 * place + number) % 10) for place in range(length)) + "=" for number in range(64)]
        adapters = LoraConfig(r=32, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        trainer = GRPOTrainer(
            model=saved_model(name),
            reward_funcs=reward,
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            peft_config=adapters if given.lora else None,
            callbacks=[Clock()],
        )
        started = time.perf_counter() - START
        my_turn()
        trainer.train()
    taken = [later - earlier for earlier, later in itertools.pairwise(begun)]
    kind = "TRL 1.16 + PEFT + vLLM 0.24" if given.lora else "TRL 1.16 + vLLM 0.24"
    label = f"{kind}{', sleep mode' if given.sleep else ''}: {name}"
    rows = [
        Row(label, "seconds a step", statistics.median(taken[2:]), "s"),
        Row(label, "peak of the allocator", max(peak for peak, _ in peaks), "GiB"),
        Row(label, "memory in use on the device after a step", max(used for _, used in peaks), "GiB"),
        Row(label, "start-up", started, "s"),
    ]
    add("lora" if given.lora else "grpo_step", rows)


if __name__ == "__main__":
    main()
