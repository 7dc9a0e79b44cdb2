"""vLLM on what rollout.py generates, with a user's defaults: it compiles, captures CUDA graphs and caches prefixes.

    python benchmarks/rollout_vllm.py 1.7B|0.6B [--kv-gib 60]

GRPO's samples are n = 8 of a prompt, with the log-prob of each sampled token; those of `lengths` have none, as in
nano-vllm's benchmark. `--kv-gib`: its KV cache; without it vLLM measures free memory, which others that start meanwhile
take and give back. Cached prefixes are dropped before each repeat, so that all of them prefill. 1.7B alone has the
126 + 4,096 tokens.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from peers import saved_model, use_colocated_vllm

START = time.perf_counter()
use_colocated_vllm()

from common import Row, add  # noqa: E402
from rollout_work import Work, grpo_work, lengths_work, new_tokens, speeds  # noqa: E402
from turns import my_turn  # noqa: E402

LONGEST, GIB = 126 + 4096 + 130, 2**30


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shape", choices=["1.7B", "0.6B"])
    parser.add_argument("--kv-gib", type=float)
    given = parser.parse_args()

    model = saved_model(given.shape)
    from vllm import LLM

    llm = LLM(
        model,
        max_model_len=LONGEST,
        gpu_memory_utilization=0.05 if given.kv_gib else 0.9,
        kv_cache_memory_bytes=int(given.kv_gib * GIB) if given.kv_gib else None,
    )
    for work, logprobs in ((grpo_work(64, 4), 0), (lengths_work(32), None)):
        timed(llm, work, logprobs)
    started = time.perf_counter() - START
    my_turn()

    name, long = f"Qwen3-{given.shape}, vLLM 0.24", given.shape == "1.7B"
    rows = [Row(f"start, {name}", "until it has generated", started, "s")]
    cases: list[tuple[str, Work, int | None, int]] = [
        ("GRPO 16 x 8", grpo_work(16), 0, 2),
        ("GRPO 64 x 8", grpo_work(64), 0, 2),
        ("lengths of 100 to 1,024", lengths_work(), None, 1),
        *([("16 x 8 of 126 + 4,096", grpo_work(16, 4096), 0, 1)] if long else []),
    ]
    for case, work, logprobs, repeats in cases:
        rows += speeds(f"{case}, {name}", work, [timed(llm, work, logprobs) for _ in range(repeats)])
    add("rollout", rows)


def timed(llm: Any, work: Work, logprobs: int | None) -> float:
    """Seconds of a workload; `logprobs`: how many other tokens' log-probs are returned beside the sampled one's."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": request.prompt} for request, _ in work]
    params = [
        SamplingParams(
            n=len(request.seeds),
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            ignore_eos=True,
            logprobs=logprobs,
            detokenize=False,
        )
        for request, sampling in work
    ]
    if not llm.reset_prefix_cache():
        raise RuntimeError("vLLM's prefix cache is in use")
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    taken = time.perf_counter() - began
    assert sum(len(one.token_ids) for output in outputs for one in output.outputs) == new_tokens(work)
    return taken


if __name__ == "__main__":
    main()
