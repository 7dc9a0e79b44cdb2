"""What exact log-probs (`rollout.exact`) cost, and that they are exact.

    python benchmarks/exact.py [matmuls] [attention] [steps] [lengths] [minibatches] [fifty]

matmuls: products of few rows without split-K, beside cuBLAS's choice: whether they have the bits of the product of
8,192 rows, and microseconds, for the shapes of Qwen models. attention: the forward over packed sequences beside
torch's flash kernel. steps: GRPO steps of the Qwen3-1.7B shape with 16 x 8 and 64 x 8 samples of 126 + 256 tokens, and
of the 0.6B shape with 16 x 8, with exact log-probs and without, in turns; and how far the sampler's are from the
trainer's. lengths: generation of nano-vllm's lengths (256 prompts of 100 to 1,024 tokens with as many new ones), on and
off in turns. minibatches: two updates per step, with the recorded log-probs as the old ones, beside a forward that
computes them. fifty: 50 steps, for the largest mismatch of all. Weights are random. Stages that are not named keep the
figures of an earlier run.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import torch
from common import Row, kept, save, seconds
from grpo_step import CONFIG, SMALL, steps
from rollout_work import lengths_work, timed

from ebbtide.config import load
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.model.attention_kernels import attend_packed
from ebbtide.model.linear import linear
from ebbtide.model.load import load_model
from ebbtide.rollout.paged.engine import PagedEngine
from ebbtide.system.torch_internals import flash_forward, without_split_k

MODELS = {  # hidden, query heads, key heads, channels, MLP
    "0.5B": (896, 14, 2, 64, 4864),
    "0.6B": (1024, 16, 8, 128, 3072),
    "1.7B": (2048, 16, 8, 128, 6144),
    "4B": (2560, 32, 8, 128, 9728),
    "8B": (4096, 32, 8, 128, 12288),
}
VOCABULARY, MANY = 151936, 8192
ROWS = (1, 16, 32, 64, 128, 256, 512)
TURNS = 2


def captured(work: Callable[[], object], times: int = 20) -> Callable[[], object]:
    """So many calls as a CUDA graph: what they take of the device alone."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            work()
    return graph.replay


@torch.no_grad()
def products(
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], x: torch.Tensor, weights: list[torch.Tensor]
) -> None:
    for weight in weights:
        multiply(x, weight)


def matmuls() -> Iterator[Row]:
    for model, (hidden, heads, kv_heads, channels, mlp) in MODELS.items():
        shapes = {
            "qkv": (hidden, (heads + 2 * kv_heads) * channels),
            "output": (heads * channels, hidden),
            "gate and up": (hidden, 2 * mlp),
            "down": (mlp, hidden),
            "head": (hidden, VOCABULARY),
        }
        for name, (depth, width) in shapes.items():
            # Several weights in turn, as a pass reads each of them once: more than the L2 cache holds.
            count = max(1, min(12, 2**27 // (depth * width)))
            weights = [torch.randn(width, depth, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
            x = torch.randn(MANY, depth, device="cuda", dtype=torch.bfloat16)
            for rows in ROWS:
                few, case = x[:rows].contiguous(), f"{model}, {name}, {rows} rows"
                kinds = (("cuBLAS", nullcontext, torch.nn.functional.linear), ("ours", without_split_k, linear))
                for kind, around, multiply in kinds:
                    with around(), torch.no_grad():
                        many = multiply(x, weights[0])
                        same = (multiply(few, weights[0]) == many[:rows]).float().mean().item()
                        taken = seconds(captured(partial(products, multiply, few, weights))) / 20 / count
                    yield Row(case, f"{kind}, time", 1e6 * taken, "us")
                    yield Row(case, f"{kind}, the bits of {MANY:,} rows", 100 * same, "%")
            del weights, x, many


def attention() -> Iterator[Row]:
    for model, (_, heads, kv_heads, channels, _) in MODELS.items():
        for length in (382, 1024, 4096):
            count = round(16384 / length)
            tokens = count * length
            query, key, value = (
                torch.randn(tokens, many, channels, device="cuda", dtype=torch.bfloat16)
                for many in (heads, kv_heads, kv_heads)
            )
            starts = torch.arange(0, tokens + 1, length, device="cuda", dtype=torch.int32)
            case, scale = f"{model}, {tokens:,} tokens of {length:,}", channels**-0.5
            given = {"starts": starts, "longest": length, "scale": scale, "window": (-1, 0)}
            flash: Callable[[], tuple[torch.Tensor, ...]] = partial(flash_forward, query, key, value, **given)
            exact = partial(attend_packed, query, key, value, starts, length, scale)
            (theirs, their_sums), (ours, our_sums) = flash(), exact()
            apart = (ours.float() - theirs.float()).norm() / theirs.float().norm()
            yield Row(case, "off flash", 100 * apart.item(), "%")
            yield Row(case, "log-sum-exp off flash, largest", (our_sums - their_sums).abs().max().item(), "nats")
            yield Row(case, "flash", 1e3 * seconds(flash), "ms")
            yield Row(case, "exact", 1e3 * seconds(exact), "ms")


def compared(case: str, options: list[str]) -> Iterator[Row]:
    """Steps with exact log-probs and without, in turns."""
    found: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    for _ in range(TURNS):
        for exact in (False, True):
            lines = steps([*options, f"rollout.exact={exact}".lower()])
            found[exact] += [line for line in lines if line["step"] > 1]  # the first compiles and captures
    for phase in ("", "generate", "logprob", "train"):
        name = f"seconds/{phase}" if phase else "seconds"
        off, on = (statistics.median(line.get(name, 0.0) for line in found[exact]) for exact in (False, True))
        yield Row(case, f"{phase or 'whole step'}, off", off, "s")
        yield Row(case, f"{phase or 'whole step'}, exact", on, "s")
        if off > 0.01:
            yield Row(case, f"{phase or 'whole step'}, exact over off", on / off, "x")
    for exact in (False, True):
        largest = max(line["mismatch_max"] for line in found[exact])
        yield Row(case, f"largest mismatch, {'exact' if exact else 'off'}", largest, "nats")


def whole_steps() -> Iterator[Row]:
    for model, sizes, prompts, count in (("1.7B", [], 16, 5), ("1.7B", [], 64, 3), ("0.6B", SMALL, 16, 5)):
        options = [*sizes, f"rollout.prompts_per_step={prompts}", f"train.steps={count}"]
        yield from compared(f"{model}, {prompts} x 8", options)


def lengths() -> Iterator[Row]:
    """Generation alone, with lengths that differ. Off is with split-K: log-probs are reduced as in training in any
    case."""
    loaded, work = load_model(load(CONFIG, [*SMALL, "model.scratch.tied=true"])), lengths_work()
    engines = {exact: PagedEngine(loaded, 256) for exact in (False, True)}  # Each captures its own kernels.
    found: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(TURNS + 1):
        for exact, engine in engines.items():
            with without_split_k() if exact else nullcontext():
                taken = timed(engine, work)
            if turn:  # the first compiles and captures
                found[exact].append(taken)
    case, off, on = "0.6B, lengths of 100 to 1,024", min(found[False]), min(found[True])
    yield Row(case, "generate, off", off, "s")
    yield Row(case, "generate, exact", on, "s")
    yield Row(case, "generate, exact over off", on / off, "x")


def minibatches() -> Iterator[Row]:
    """Two updates per step, with exact log-probs: the recorded ones as the old ones, or those of a forward pass."""
    case, options = "1.7B, 16 x 8, two updates per step", ["train.minibatches=2", "rollout.exact=true"]
    found: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    for _ in range(TURNS):
        for recorded in (False, True):
            with patch.object(GrpoConfig, "records_old_logprobs", recorded):
                lines = steps([*options, "deterministic=true"])
            found[recorded] += [line for line in lines if line["step"] > 1]
    for phase in ("", "logprob", "train"):
        name = f"seconds/{phase}" if phase else "seconds"
        for recorded, kind in ((False, "computed"), (True, "recorded")):
            taken = statistics.median(line.get(name, 0.0) for line in found[recorded])
            yield Row(case, f"{phase or 'whole step'}, {kind}", taken, "s")
    figures = ("loss", "grad_norm", "entropy", "clip_fraction", "reward")
    same = all(
        computed[name] == recorded[name]
        for computed, recorded in zip(found[False], found[True], strict=True)
        for name in figures
        if name in computed or name in recorded
    )
    yield Row(case, "losses and norms of gradients identical", float(same), "(1 = yes)")


def fifty() -> Iterator[Row]:
    lines = steps(["rollout.exact=true", "train.steps=50"])
    yield Row("1.7B, 50 steps", "steps", len(lines), "")
    yield Row("1.7B, 50 steps", "largest mismatch", max(line["mismatch_max"] for line in lines), "nats")


def main() -> None:
    stages: dict[str, Callable[[], Iterator[Row]]] = {
        "matmuls": matmuls,
        "attention": attention,
        "steps": whole_steps,
        "lengths": lengths,
        "minibatches": minibatches,
        "fifty": fifty,
    }
    for name in sys.argv[1:] or list(stages):
        rows = list(stages[name]())
        done = {row.case for row in rows}
        save("exact", [*kept("exact", done.__contains__), *rows])


if __name__ == "__main__":
    main()
