"""The recipe `gsm8k` in TRL with vLLM colocated: the same model, prompts, order, samples, lengths, loss and
optimizer.

    python benchmarks/gsm8k_trl.py FOLDER [--sleep] [--rows 32] [--share 0.3] [KEY=VALUE ...]

KEY=VALUE are settings of the recipe, as `ebbtide train gsm8k` takes them (`model.path=...`, `task.file.train=...`,
`train.steps=...`, `seed=...`). FOLDER gets a metrics.jsonl with the keys that Ebbtide's has, to compare them line by
line. Weights are float32 with bf16 autocast, so that small updates are not rounded away; Ebbtide has float32
masters. `--sleep` turns vLLM's sleep mode on; `--rows` are the samples of a micro-batch; `--share` is vLLM's part of
the GPU.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from peers import use_colocated_vllm

START = time.perf_counter()
use_colocated_vllm()

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from vllm import SamplingParams  # noqa: E402

from ebbtide.config import load  # noqa: E402
from ebbtide.config.algorithms.grpo import GrpoConfig  # noqa: E402
from ebbtide.tasks.build import build_task  # noqa: E402
from ebbtide.tasks.sampler import Sampler  # noqa: E402
from ebbtide.tasks.scorers import gsm8k  # noqa: E402
from ebbtide.tasks.task import Problem  # noqa: E402

GIB = 2**30
LOGGED = {  # TRL's name -> ours
    "reward": "reward",
    "loss": "loss",
    "entropy": "entropy",
    "grad_norm": "grad_norm",
    "completions/mean_length": "completion_tokens",
    "completions/clipped_ratio": "truncated",
    "frac_reward_zero_std": "groups_without_signal",
    "clip_ratio/region_mean": "clip_fraction",
}


def main() -> None:
    given = arguments()
    config = load("gsm8k", given.settings)
    assert isinstance(config, GrpoConfig)
    assert config.task is not None
    problems = build_task(config.task, config.seed).problems()
    given.folder.mkdir(parents=True, exist_ok=True)
    order = Sampler(problems.train, config.seed).draw(config.train.steps * config.rollout.prompts_per_step)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32),
        reward_funcs=score,
        args=settings(config, given),
        train_dataset=Dataset.from_list([{"prompt": one.messages, "answer": one.answer} for one in order]),
        processing_class=tokenizer,
    )
    trainer.add_callback(Log(trainer, config, problems.held_out, given.folder, sleeps=given.sleep))
    trainer.train()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("settings", nargs="*")
    parser.add_argument("--sleep", action="store_true")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--share", type=float, default=0.3)
    return parser.parse_intermixed_args()


def settings(config: GrpoConfig, given: argparse.Namespace) -> Any:
    rollout, optimizer, loss = config.rollout, config.optimizer, config.loss
    samples = rollout.prompts_per_step * rollout.group_size
    # "linear" of transformers ends at 0; the recipe's end is `final_lr_fraction`: a polynomial of power 1 ends there.
    schedule: dict[str, Any] = {"lr_scheduler_type": "constant_with_warmup"}
    if optimizer.schedule == "linear":
        end = {"lr_end": optimizer.lr * optimizer.final_lr_fraction, "power": 1.0}
        schedule = {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": end}
    return GRPOConfig(
        output_dir=str(given.folder / "trl"),
        max_steps=config.train.steps,
        seed=config.seed,
        per_device_train_batch_size=given.rows,
        gradient_accumulation_steps=samples // given.rows,
        num_generations=rollout.group_size,
        max_completion_length=rollout.max_new_tokens,
        shuffle_dataset=False,
        temperature=rollout.temperature,
        beta=0.0,
        epsilon=loss.clip_low,
        epsilon_high=loss.clip_high,
        loss_type="dapo",  # every token of the step counts alike, as the recipe's do
        scale_rewards="group",
        learning_rate=optimizer.lr,
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        adam_epsilon=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.clip_norm or 0.0,
        warmup_steps=optimizer.warmup_steps,
        optim="adamw_torch_fused",
        bf16=True,
        gradient_checkpointing=False,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_enable_sleep_mode=given.sleep,
        vllm_gpu_memory_utilization=given.share,
        vllm_max_model_length=rollout.max_prompt_tokens + rollout.max_new_tokens,
        vllm_importance_sampling_correction=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **schedule,
    )


def score(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    return [gsm8k(one[0]["content"], right) for one, right in zip(completions, answer, strict=True)]


class Log(TrainerCallback):  # type: ignore[misc]
    """Writes metrics.jsonl, and evaluates before the first step and whenever the recipe's run would."""

    def __init__(
        self, trainer: Any, config: GrpoConfig, held_out: list[Problem], folder: Path, *, sleeps: bool
    ) -> None:
        assert config.evaluate is not None
        self._trainer, self._config, self._every, self._sleeps = trainer, config, config.evaluate.every, sleeps
        self._held_out = held_out[: config.evaluate.problems]
        self._file = (folder / "metrics.jsonl").open("w")
        self._line: dict[str, Any] = {}

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._startup = {"seconds_startup": time.perf_counter() - START}
        self._write({"step": 0, **self._evaluate()})

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        torch.cuda.synchronize()
        free, whole = torch.cuda.mem_get_info()
        self._line = {
            **(self._startup if state.global_step == 1 else {}),
            "step": state.global_step,
            "seconds": time.perf_counter() - self._began,
            "peak_gib": torch.cuda.max_memory_allocated() / GIB,  # of torch's allocator, which vLLM's cache is part of
            "device_gib": (whole - free) / GIB,
        }
        if state.global_step % self._every == 0 or state.global_step == self._config.train.steps:
            self._line |= self._evaluate()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if self._line:
            self._write(self._line | {ours: float(logs[name]) for name, ours in LOGGED.items() if name in logs})
            self._line = {}

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        shown = {
            name: value for name, value in line.items() if name in ("step", "seconds", "reward", "evaluate/pass@1")
        }
        print("  ".join(f"{name} {value:.3f}" for name, value in shown.items()), flush=True)

    def _evaluate(self) -> dict[str, float]:
        """Greedy answers to the held-out problems, with the weights of now."""
        began, vllm = time.perf_counter(), self._trainer.vllm_generation
        vllm.sync_weights()
        if self._sleeps:
            vllm.llm.wake_up(tags=["kv_cache"])
        tokenizer = self._trainer.processing_class
        prompts = [
            {
                "prompt_token_ids": tokenizer.apply_chat_template(
                    one.messages, add_generation_prompt=True, return_dict=False
                )
            }
            for one in self._held_out
        ]
        greedy = SamplingParams(temperature=0.0, max_tokens=self._config.rollout.max_new_tokens)
        outputs = [one.outputs[0] for one in vllm.llm.generate(prompts, greedy, use_tqdm=False)]
        if self._sleeps:
            vllm.llm.sleep(level=2)
            vllm._llm_weights_sleeping = True
        right = [gsm8k(one.text, problem.answer) for one, problem in zip(outputs, self._held_out, strict=True)]
        return {
            "evaluate/pass@1": sum(right) / len(right),
            "evaluate/completion_tokens": sum(len(one.token_ids) for one in outputs) / len(outputs),
            "seconds/evaluate": time.perf_counter() - began,
        }


if __name__ == "__main__":
    main()
