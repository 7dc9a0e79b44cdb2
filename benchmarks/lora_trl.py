"""GRPO steps with adapters of rank 32 in TRL with PEFT, and with vLLM colocated: what `lora.py budget` is beside.

    python benchmarks/lora_trl.py [1.7B] [8B] [--sleep]

16 prompts x 8 samples of 100 + 256 tokens, random weights, so that completions never end early; bf16, adapters in all
linear layers, no KL. `--sleep` turns vLLM's sleep mode on. Rows are added to results/lora.json.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from peers import SHAPES, random_model, use_colocated_vllm

START = time.perf_counter()
use_colocated_vllm(29518)

from common import Row, beginning, kept, save  # noqa: E402

GIB, STEPS, SAMPLES, ROWS = 2**30, 5, 128, 16


def main() -> None:
    named = [one for one in sys.argv[1:] if one in SHAPES] or ["1.7B", "8B"]
    if len(named) == 1:
        measure(named[0], sleeps="--sleep" in sys.argv)
        return
    for name in named:  # Each in a process of its own: vLLM does not give its memory back.
        subprocess.run([sys.executable, __file__, name, *(["--sleep"] * ("--sleep" in sys.argv))], check=False)


def measure(name: str, *, sleeps: bool) -> None:
    import torch
    from datasets import Dataset  # type: ignore[import-not-found]
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

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
        model = random_model(name, Path(folder))
        settings = GRPOConfig(
            output_dir=f"{folder}/out",
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=SAMPLES // ROWS,
            num_generations=8,
            max_completion_length=256,
            max_steps=STEPS,
            beta=0.0,
            bf16=True,
            gradient_checkpointing=name == "8B",  # Without it the 8B shape and vLLM do not fit beside each other.
            learning_rate=1e-5,
            optim="adamw_torch_fused",
            model_init_kwargs={"dtype": "bfloat16"},
            use_vllm=True,
            vllm_mode="colocate",
            vllm_enable_sleep_mode=sleeps,
            vllm_gpu_memory_utilization=0.3,
            vllm_max_model_length=512,
            generation_kwargs={"ignore_eos": True},
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        prompts = ["".join(str((7 * place + number) % 10) for place in range(99)) + "=" for number in range(64)]
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            peft_config=LoraConfig(r=32, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
            callbacks=[Clock()],
        )
        started = time.perf_counter() - START
        trainer.train()
    taken = [later - earlier for earlier, later in itertools.pairwise(begun)]
    label = f"TRL 1.16 + PEFT + vLLM 0.24{', sleep mode' if sleeps else ''}: {name}"
    rows = [
        Row(label, "seconds a step", statistics.median(taken[2:]), "s"),
        Row(label, "peak of the allocator", max(peak for peak, _ in peaks), "GiB"),
        Row(label, "memory in use on the device after a step", max(used for _, used in peaks), "GiB"),
        Row(label, "start-up", started, "s"),
    ]
    save("lora", [*kept("lora", beginning(label)), *rows])


if __name__ == "__main__":
    main()
