"""Adapters (LoRA), and a base in 8 or 4 bits.

    python benchmarks/lora.py [products] [base] [tiles] [decode [1.7B] [8B]] [budget [CASE ..]]

products: the products of each group of layers with the same input, alone, with adapters of rank 32 by our kernels, and
with the same in torch, for the Qwen3-1.7B and 8B shapes. base: products of few rows with a base in bfloat16, float8 and
int4, and what it takes to make numbers of codes. tiles: those products with other tiles, of which `tile_of` in
model/quantized_kernels.py is to choose the fastest. decode: tokens a second of 16 prompts x 8 samples of 126 + 256
tokens with exact log-probs, without adapters, with some, and with each base. budget: GRPO steps of 16 x 8 x (100 + 256)
tokens with adapters of rank 32, planned (`memory.plan: auto`) under a budget that the allocator enforces; of the cases
that are named, such as 8B-int4. Weights are random. Stages that are not named keep the figures of an earlier run.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import plan
import torch
from common import Row, beginning, kept, save, seconds
from exact import MODELS, captured
from rollout_work import grpo_work, timed
from turns import my_turn

from ebbtide.checkpoint.initial_model import load_initial
from ebbtide.config import load
from ebbtide.errors import UserError
from ebbtide.model import adapter_kernels, quantized_kernels
from ebbtide.model.linear import linear
from ebbtide.model.load import pick_device
from ebbtide.model.lora import adapted_layers
from ebbtide.model.quantize import Quantized, dequantize, quantize, quantized_linear
from ebbtide.model.quantized_kernels import Tile
from ebbtide.policy.policy import Policy
from ebbtide.rollout.paged.engine import PagedEngine
from ebbtide.system.allocator import use_expandable_segments
from ebbtide.system.gpu import processors
from ebbtide.system.machine import save_rates
from ebbtide.system.side_stream import begin_beside
from ebbtide.system.torch_internals import without_split_k
from ebbtide.system.units import GIB

SHAPES = {
    "1.7B": [],
    "8B": ["layers=36", "hidden=4096", "heads=32", "mlp=12288", "tied=false"],
    "14B": ["layers=40", "hidden=5120", "heads=40", "mlp=17408", "tied=false"],
    "32B": ["layers=64", "hidden=5120", "heads=64", "mlp=25600", "tied=false"],
}
MATRICES = {
    "1.7B": {"qkv": (4096, 2048), "output": (2048, 2048), "gate and up": (12288, 2048), "down": (2048, 6144)},
    "8B": {"qkv": (6144, 4096), "output": (4096, 4096), "gate and up": (24576, 4096), "down": (4096, 12288)},
}
BUDGETS = {
    "1.7B-bfloat16": ("1.7B", None, 120),  # These two are what TRL's are beside.
    "8B-bfloat16-120": ("8B", None, 120),
    "8B-bfloat16": ("8B", None, 20),
    "8B-bfloat16-18": ("8B", None, 18),  # Its plan streams the base.
    "8B-float8": ("8B", "float8", 14),
    "8B-int4": ("8B", "int4", 10),
    "8B-int4-8": ("8B", "int4, embeddings too", 8),
    "14B-int4": ("14B", "int4", 14),
    "14B-int4-embeddings": ("14B", "int4, embeddings too", 14),
    "32B-int4": ("32B", "int4", 28),
}
TILES = {
    32: [Tile(32, 64, 4, 3), Tile(32, 64, 4, 5), Tile(32, 128, 8, 3), Tile(16, 64, 4, 5)],
    128: [
        *(Tile(128, 64, 4, 3), Tile(128, 64, 4, 5), Tile(128, 128, 8, 2), Tile(128, 128, 8, 3)),
        *(Tile(64, 64, 4, 3), Tile(64, 64, 4, 5), Tile(64, 128, 8, 3)),
    ],
}  # of a quantized base's products of so many rows
RANK, CHANNELS = "model.lora.rank=32", 32


def settings(shape: str, *more: str) -> list[str]:
    return [*(f"model.scratch.{option}" for option in SHAPES[shape]), *more]


class Group:
    """Layers with the same input, and their adapters; several times, as a pass reads each weight once: more than the L2
    cache holds."""

    def __init__(self, depth: int, widths: list[int]) -> None:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

        self.count = max(1, min(12, 2**27 // (depth * sum(widths))))
        self._starts = [sum(widths[:number]) for number in range(len(widths))]
        self._weights = [normal(sum(widths), depth) for _ in range(self.count)]
        self._firsts = [normal(CHANNELS * len(widths), depth) for _ in range(self.count)]
        self._seconds = [[normal(width, CHANNELS) for width in widths] for _ in range(self.count)]

    @torch.no_grad()
    def alone(self, x: torch.Tensor) -> None:
        for weight in self._weights:
            linear(x, weight)

    @torch.no_grad()
    def ours(self, x: torch.Tensor) -> None:
        for weight, first, seconds_of in zip(self._weights, self._firsts, self._seconds, strict=True):
            low, join = begin_beside(partial(adapter_kernels.shrink, x, first), x.device)
            found = linear(x, weight)
            join()
            adapter_kernels.expand(found, low, seconds_of, self._starts, 1.0)

    @torch.no_grad()
    def in_torch(self, x: torch.Tensor) -> None:
        for weight, first, seconds_of in zip(self._weights, self._firsts, self._seconds, strict=True):
            found, lows = linear(x, weight), linear(x, first).split(CHANNELS, 1)
            for second, start, low in zip(seconds_of, self._starts, lows, strict=True):
                found[:, start : start + len(second)].addmm_(low, second.t(), alpha=1.0)


def products() -> Iterator[list[Row]]:
    found: list[Row] = []
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
                        taken = seconds(captured(partial(work, x), 5)) / 5 / group.count
                    found.append(Row(f"products: {model}, {name}, {rows:,} rows", kind, 1e6 * taken, "us"))
        yield found


def base() -> Iterator[list[Row]]:
    rows: list[Row] = []
    with torch.no_grad(), without_split_k():
        for shape, matrices in MATRICES.items():
            for name, (width, depth) in matrices.items():
                weight = torch.randn(width, depth, device="cuda").bfloat16()
                bases = {kind: quantize(weight, kind) for kind in ("float8", "int4")}
                label = f"base: {shape}, {name}"
                for count in (16, 64, 128, 256):
                    x = torch.randn(count, depth, device="cuda").bfloat16()
                    ways: dict[str, Callable[[], object]] = {"bfloat16": partial(linear, x, weight)}
                    ways |= {kind: partial(quantized_linear, x, [base]) for kind, base in bases.items()}
                    rows += [Row(f"{label}, {count} rows", kind, _graphed(way), "us") for kind, way in ways.items()]
                    _check(x, bases)
                for kind, base in bases.items():
                    taken = _graphed(partial(dequantize, base, torch.bfloat16))
                    moved = 2 * weight.numel() + sum(one.nbytes for one in base)
                    rows += [
                        Row(label, f"numbers of {kind}", taken, "us"),
                        Row(label, f"numbers of {kind}, moved", moved / taken / 1e6, "TB/s"),
                    ]
            yield rows


def tiles() -> Iterator[list[Row]]:
    rows: list[Row] = []
    with torch.no_grad(), without_split_k():
        for name, (width, depth) in MATRICES["8B"].items():
            weight = torch.randn(width, depth, device="cuda").bfloat16()
            for kind, base in {kind: quantize(weight, kind) for kind in ("float8", "int4")}.items():
                for count, candidates in TILES.items():
                    x = torch.randn(count, depth, device="cuda").bfloat16()
                    wanted = linear(x, dequantize(base, torch.bfloat16))
                    chosen = quantized_kernels.tile_of(count, width, processors(x.device))
                    for tile in dict.fromkeys((chosen, *candidates)):
                        out = torch.empty_like(wanted)
                        taken = _graphed(partial(quantized_kernels.linear, x, *base, bias=None, out=out, tile=tile))
                        if not torch.equal(out, wanted):
                            print(f"{kind}, {count} rows, {tile}: other bits", flush=True)
                        tried = "x".join(map(str, tile)) + (", chosen" if tile == chosen else "")
                        rows.append(Row(f"tiles: 8B, {name}, {kind}, {count} rows", tried, taken, "us"))
            yield rows


def _check(x: torch.Tensor, bases: dict[str, Quantized]) -> None:
    """Compares products with those of the numbers, before they are timed."""
    for kind, base in bases.items():
        wanted = linear(x, dequantize(base, torch.bfloat16))
        if not torch.equal(quantized_linear(x, [base]), wanted):
            off = (quantized_linear(x, [base]).float() - wanted.float()).abs().max() / wanted.float().abs().max()
            print(f"{kind}: other bits with {len(x)} rows of {x.shape[1]}, by {float(off):.2g}", flush=True)


def _graphed(work: Callable[[], object], times: int = 20) -> float:
    """Microseconds of `work` in a CUDA graph, as in decoding, with no input in the cache."""
    for _ in range(3):
        work()
    flushed = torch.empty(2**26, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            flushed.zero_()
            work()
    both = seconds(graph.replay)
    alone = torch.cuda.CUDAGraph()
    with torch.cuda.graph(alone):
        for _ in range(times):
            flushed.zero_()
    return 1e6 * (both - seconds(alone.replay)) / times


def decode(shapes: Sequence[str]) -> Iterator[list[Row]]:
    """In turns, so that all cases have the same machine."""
    rows: list[Row] = []
    work = grpo_work(16)
    cases = {"no adapters": [], "rank 8": ["model.lora.rank=8"], "rank 32": [RANK]}
    cases |= {f"rank 32, {kind}": [RANK, f"model.base={kind}"] for kind in ("float8", "int4")}
    for shape in shapes:
        with without_split_k():
            engines = {name: _engine(settings(shape, *options)) for name, options in cases.items()}
            taken: dict[str, list[float]] = {name: [] for name in engines}
            for turn in range(4):
                for name, engine in engines.items():
                    found = timed(engine, work)
                    if turn:  # The first compiles and captures.
                        taken[name].append(found)
        for name, times in taken.items():
            label, middle = f"decode: {shape}, {name}", statistics.median(times)
            rows += [
                Row(label, "tokens a second", 16 * 8 * 256 / middle, "tok/s"),
                Row(label, "of that without adapters", 100 * statistics.median(taken["no adapters"]) / middle, "%"),
            ]
        del engines
        yield rows


def _engine(options: list[str]) -> PagedEngine:
    """An engine for a model whose adapters add something."""
    config = load(plan.CONFIG, options)
    loaded = load_initial(config, pick_device("cuda"))
    for layer in adapted_layers(loaded.model).values():
        layer.lora_B.data.normal_(std=0.02)
    Policy(loaded, config).fuse_blocks(print)  # As in a run: it lets weights follow each other.
    return PagedEngine(loaded, 128)


def _label(case: str) -> str:
    shape, base, budget = BUDGETS[case]
    return f"budget: {shape}, {base or 'bfloat16'}, {budget} GiB"


def budgets(cases: list[str]) -> Iterator[list[Row]]:
    rows: list[Row] = []
    for case in cases:
        (shape, base, budget), label = BUDGETS[case], _label(case)
        options = settings(
            shape, *plan.ALWAYS, *plan.PLAIN, RANK, "rollout.max_prompt_tokens=100",
            "task.python.options={length: 100}", "optimizer.lr=1e-5",
            *([f"model.base={base.partition(',')[0]}", f"model.base_embeddings={',' in base}"] if base else []),
        )  # fmt: skip
        try:
            rows += plan.planned_step(label, options, budget)
        except (UserError, RuntimeError) as error:
            print(f"{label}: {error}", flush=True)
            rows.append(Row(label, "failed", 1.0, "(1 = yes)"))
        yield rows


def _measures(stage: str, cases: list[str], shapes: Sequence[str]) -> Callable[[str], bool]:
    """Which cases of the table a stage measures."""
    if stage == "budget":
        return {_label(case) for case in cases}.__contains__
    return beginning(tuple(f"decode: {shape}," for shape in shapes) if stage == "decode" else (stage,))


def main() -> None:
    use_expandable_segments()  # as `ebbtide train` does
    my_turn()
    named = sys.argv[1:]
    cases = [one for one in named if one in BUDGETS] or [*BUDGETS]
    shapes = [one for one in ("1.7B", "8B") if one in named] or ["1.7B", "8B"]
    stages: dict[str, Callable[[], Iterator[list[Row]]]] = {
        "products": products,
        "base": base,
        "tiles": tiles,
        "decode": partial(decode, shapes),
        "budget": partial(budgets, cases),
    }
    for name in [one for one in named if one in stages] or list(stages):
        if name == "budget":
            total = torch.cuda.get_device_properties(0).total_memory / GIB
            save_rates(torch.cuda.get_device_name(), total, plan.measured_rates()[0])
        others = kept("lora", _measures(name, cases, shapes))
        for rows in stages[name]():
            save("lora", [*others, *rows])


if __name__ == "__main__":
    main()
