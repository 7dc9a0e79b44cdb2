"""What adapters (LoRA) cost: beside a matmul, and in generation.

    python benchmarks/adapters.py [products] [decode]

products: the products of each group of layers with the same input, alone, with adapters of rank 32 by our kernels, and
with the same in torch, for the Qwen3-1.7B and 8B shapes; microseconds of the device. decode: tokens a second of 16
prompts x 8 samples of 126 + 256 tokens with exact log-probs, without adapters and with such of ranks 8 and 32 on all
linear layers, in turns. Weights are random. Stages that are not named keep the figures of an earlier run.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
from common import Row, kept, save, seconds
from exact import MODELS, captured

from ebbtide.config import load
from ebbtide.config.model import LoraConfig
from ebbtide.model import adapter_kernels
from ebbtide.model.linear import linear
from ebbtide.model.load import LoadedModel, load_model
from ebbtide.model.lora import adapted_layers, add_adapters
from ebbtide.policy.policy import Policy
from ebbtide.rollout.engine import SamplingParams
from ebbtide.rollout.paged.engine import PagedEngine
from ebbtide.system.torch_internals import without_split_k
from rollout import CONFIG, grpo_work, timed

RANK, SCALE, TURNS, TIMES = 32, 1.0, 3, 5
LARGE = ["layers=36", "hidden=4096", "heads=32", "kv_heads=8", "head_dim=128", "mlp=12288"]


class Group:
    """Layers with the same input, and their adapters; several times, as a pass reads each weight once: more than the L2
    cache holds."""

    def __init__(self, depth: int, widths: list[int]) -> None:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

        self.count = max(1, min(12, 2**27 // (depth * sum(widths))))
        self._starts = [sum(widths[:number]) for number in range(len(widths))]
        self._weights = [normal(sum(widths), depth) for _ in range(self.count)]
        self._firsts = [normal(RANK * len(widths), depth) for _ in range(self.count)]
        self._seconds = [[normal(width, RANK) for width in widths] for _ in range(self.count)]

    @torch.no_grad()
    def alone(self, x: torch.Tensor) -> None:
        for weight in self._weights:
            linear(x, weight)

    @torch.no_grad()
    def ours(self, x: torch.Tensor) -> None:
        for weight, first, seconds_of in zip(self._weights, self._firsts, self._seconds, strict=True):
            adapter_kernels.add(linear(x, weight), x, first, seconds_of, self._starts, SCALE)

    @torch.no_grad()
    def in_torch(self, x: torch.Tensor) -> None:
        for weight, first, seconds_of in zip(self._weights, self._firsts, self._seconds, strict=True):
            found, lows = linear(x, weight), linear(x, first).split(RANK, 1)
            for second, start, low in zip(seconds_of, self._starts, lows, strict=True):
                found[:, start : start + len(second)].addmm_(low, second.t(), alpha=SCALE)


def products() -> Iterator[Row]:
    for model in ("1.7B", "8B"):
        hidden, heads, kv_heads, channels, mlp = MODELS[model]
        groups = {
            "qkv": (hidden, [heads * channels, kv_heads * channels, kv_heads * channels]),
            "output": (heads * channels, [hidden]),
            "gate and up": (hidden, [mlp, mlp]),
            "down": (mlp, [hidden]),
        }
        for name, (depth, widths) in groups.items():
            group = Group(depth, widths)
            for rows in (1, 16, 128, 512, 8192):
                x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
                for kind, work in (("alone", group.alone), ("ours", group.ours), ("torch", group.in_torch)):
                    with without_split_k():
                        taken = seconds(captured(partial(work, x), TIMES)) / TIMES / group.count
                    yield Row(f"{model}, {name}, {rows:,} rows", kind, 1e6 * taken, "us")


def engine_with(rank: int, options: list[str]) -> tuple[LoadedModel, PagedEngine]:
    """A model with adapters of this rank, or with none, and its engine."""
    config = load(CONFIG, [f"model.scratch.{option}" for option in options])
    loaded = load_model(config)
    if rank:
        add_adapters(loaded.model, LoraConfig(rank=rank), seed=0)
        for layer in adapted_layers(loaded.model).values():
            layer.lora_B.data.normal_(std=0.02)
    Policy(loaded, config).fuse_blocks(print)  # as in a run: it lets weights follow each other
    return loaded, PagedEngine(loaded, 128, exact=True)


def decode() -> Iterator[Row]:
    work = grpo_work(16, SamplingParams(256, ignore_eos=True))
    tokens = sum(len(request.seeds) * sampling.max_new_tokens for request, sampling in work)
    for model, options in (("1.7B", []), ("8B", LARGE)):
        with without_split_k():
            engines = {rank: engine_with(rank, options) for rank in (0, 8, 32)}
            found: dict[int, list[float]] = {rank: [] for rank in engines}
            for turn in range(TURNS + 1):
                for rank, (_, engine) in engines.items():
                    taken = timed(engine, work)
                    if turn:  # the first compiles and captures
                        found[rank].append(taken)
        for rank, times in found.items():
            case = f"decode, {model}, 16 x 8, {f'rank {rank}' if rank else 'no adapters'}"
            yield Row(case, "tokens a second", tokens / statistics.median(times), "tok/s")
            yield Row(case, "of that without", 100 * statistics.median(found[0]) / statistics.median(times), "%")
        del engines


def main() -> None:
    stages: dict[str, Callable[[], Iterator[Row]]] = {"products": products, "decode": decode}
    for name in sys.argv[1:] or list(stages):
        rows = list(stages[name]())
        done = {row.case for row in rows}
        save("adapters", [*kept("adapters", done.__contains__), *rows])


if __name__ == "__main__":
    main()
