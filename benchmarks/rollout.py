"""Generation with the policy's own weights: tokens a second of the paged engine, with the model, the kernels and the
exact log-probs of a training run.

    python benchmarks/rollout.py [grpo-0.6b] [lengths-0.6b] [grpo-1.7b] [lengths-1.7b] [long-1.7b] [experts]
    python benchmarks/beside_peers.py            the first five, beside vLLM
    python benchmarks/rollout_families.py        every dense family, beside a Qwen3 of the same size
    python benchmarks/rollout_start.py           from the shell to the first token

grpo: 16 and 64 prompts x 8 samples of 126 + 256 tokens with log-probs, and how far these are from the trainer's.
lengths: 256 prompts of 100 to 1,024 tokens with as many new ones (nano-vllm's benchmark). long: 16 x 8 samples of
126 + 4,096 tokens. experts: 16 x 8 samples of a mixture of 32 experts. Weights are random and end tokens ignored, so
that the work is the same for all. The bound of a workload is the time to read weights and keys and values at 4.8 TB/s
and to multiply the prompts at 989 TFLOP/s, and nothing else. EBBTIDE_TINY=1 is for trying it on a CPU.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from common import Row, add
from rollout_work import Work, bound, grpo_work, lengths_work, speeds, timed
from turns import PIPES, my_turn

from ebbtide.config import load
from ebbtide.model.load import LoadedModel
from ebbtide.policy.datum import trajectory
from ebbtide.progress import no_progress
from ebbtide.report.null_report import NullReport
from ebbtide.rollout.paged.engine import PagedEngine
from ebbtide.worker import Worker

CONFIG = str(Path(__file__).parent / "configs" / "qwen3-1.7b.yaml")
SHAPES = {"1.7B": [], "0.6B": ["model.scratch.hidden=1024", "model.scratch.mlp=3072"]}
EXPERTS = [
    f"model.scratch.{option}"
    for option in ("architecture=qwen3_moe", "layers=12", "experts=32", "experts_per_token=4", "mlp=768")
]
TINY = [
    *("device=cpu", "model.scratch.layers=2", "model.scratch.hidden=64", "model.scratch.heads=4"),
    *("model.scratch.kv_heads=2", "model.scratch.head_dim=16", "model.scratch.mlp=96"),
]
IS_TINY = "EBBTIDE_TINY" in os.environ


class Notes(NullReport):
    """Prints what a run would note, such as why log-probs are not exact."""

    def note(self, text: str) -> None:
        print(f"  {text}", flush=True)

    warn = note


@contextmanager
def worker_of_run(
    options: Sequence[str], prompt: int, new: int, *, loaded: LoadedModel | None = None
) -> Iterator[tuple[Worker, PagedEngine]]:
    """What a training run builds, but for the optimizer: fused blocks with joined weights, and exact log-probs."""
    longest = [f"rollout.max_prompt_tokens={prompt}", f"rollout.max_new_tokens={new}"]
    config = load(CONFIG, [*options, *(TINY if IS_TINY else []), *longest, "memory.plan=manual", "checkpoint=null"])
    began = time.perf_counter()
    with Worker(config, Notes(Path("none")), rehearsal="none", loaded=loaded) as worker, worker.phase("generate"):
        assert isinstance(worker.engine, PagedEngine)
        print(f"  built in {time.perf_counter() - began:.1f} s, exact: {worker.config.rollout.exact}", flush=True)
        yield worker, worker.engine
    del worker
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def grpo(shape: str) -> list[Row]:
    new = 4 if IS_TINY else 256
    rows = []
    with worker_of_run([*SHAPES[shape], "model.scratch.tied=true"], 126, new) as (worker, engine):
        for prompts in (16, 64):
            label, work = f"GRPO {prompts} x 8, Qwen3-{shape}", grpo_work(prompts, new)
            timed(engine, grpo_work(prompts, 2))  # captures
            seconds = [timed(engine, work) for _ in range(2)]
            rows += speeds(label, work, seconds, bound(worker.loaded, work))
        off = mismatch(worker, engine, grpo_work(16, new))
        case = f"GRPO 16 x 8, Qwen3-{shape}, log-probs off the trainer's"
        rows += [Row(case, "largest", off.max().item(), "nats"), Row(case, "mean", off.mean().item(), "nats")]
    return rows


def mismatch(worker: Worker, engine: PagedEngine, work: Work) -> torch.Tensor:
    requests = [request for request, _ in work]
    groups = engine.generate(requests, work[0][1], no_progress)
    pairs = [(request, one) for request, group in zip(requests, groups, strict=True) for one in group]
    data = [trajectory(request.prompt, one.tokens, one.logprobs) for request, one in pairs]
    worker.policy.compute_logprobs("trained", data, no_progress)
    trained = torch.cat([torch.as_tensor(one.values["trained"]).cpu() for one in data])
    return (trained - torch.cat([torch.tensor(one.logprobs) for _, one in pairs])).abs()


def lengths(shape: str) -> list[Row]:
    longest = 8 if IS_TINY else 1024
    work = lengths_work(longest)
    with worker_of_run([*SHAPES[shape], "model.scratch.tied=true"], longest, longest) as (worker, engine):
        timed(engine, lengths_work(32))  # as many rows, and so the graphs of all batch sizes
        seconds = [timed(engine, work)]
        return speeds(f"lengths of 100 to 1,024, Qwen3-{shape}", work, seconds, bound(worker.loaded, work))


def long(shape: str) -> list[Row]:
    new = 8 if IS_TINY else 4096
    work = grpo_work(16, new)
    with worker_of_run([*SHAPES[shape], "model.scratch.tied=true"], 126, new) as (worker, engine):
        timed(engine, grpo_work(16, 2))
        return speeds(f"16 x 8 of 126 + 4,096, Qwen3-{shape}", work, [timed(engine, work)], bound(worker.loaded, work))


def experts() -> list[Row]:
    new = 4 if IS_TINY else 256
    work = grpo_work(16, new)
    with worker_of_run(EXPERTS, 126, new) as (worker, engine):
        timed(engine, grpo_work(16, 2))
        seconds = [timed(engine, work) for _ in range(2)]
        return speeds("experts, 16 x 8", work, seconds, bound(worker.loaded, work))


STAGES: dict[str, Callable[[], list[Row]]] = {
    "grpo-0.6b": partial(grpo, "0.6B"),
    "lengths-0.6b": partial(lengths, "0.6B"),
    "grpo-1.7b": partial(grpo, "1.7B"),
    "lengths-1.7b": partial(lengths, "1.7B"),
    "long-1.7b": partial(long, "1.7B"),
    "experts": experts,
}


def compile_kernels() -> None:
    """What a first process compiles, while others start."""
    for options in SHAPES.values():
        longest = 8 if IS_TINY else 1024
        with worker_of_run([*options, "model.scratch.tied=true"], longest, longest) as (_, engine):
            timed(engine, lengths_work(min(32, longest)))


def main() -> None:
    if PIPES in os.environ:
        compile_kernels()
        my_turn()
    for name in sys.argv[1:] or list(STAGES):
        began = time.perf_counter()
        rows = STAGES[name]()
        add("rollout", rows)
        print(f"{name}: {time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
