"""Forward and backward with the output head: fused blocks beside transformers' own, these compiled, and these with
Liger's kernels, in one process.

    python benchmarks/train.py [382] [1024] [4k] [0.6b] [4b] [moe] [135m] [135m-2] [presets] [accuracy] [--ours]

Qwen3 shapes with random weights, 16,384 tokens packed of so many each (382: 126 + 256, as in a GRPO step), of which
the last 67% are predicted; `4k`: 4,096 tokens; `135m`: the SmolLM2-135M shape, 512 sequences of 52 + 8 at once, as a
run plans it, and `135m-2` in two micro-batches. All have the same attention and the same head. `presets`:
`memory.activations` on the work of `382`, of both kinds of blocks, gradients compared with keep's bit by bit.
`accuracy`: log-probs and gradients against float32. `--ours` leaves the compiled blocks and Liger out. Stages that are
not named keep the figures of an earlier run.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import Row, kept, save, seconds

from ebbtide.config import load
from ebbtide.memory.residency import Residency
from ebbtide.model.load import layers_of, load_model
from ebbtide.planner.holdings import plan_holdings
from ebbtide.policy.attention import PACKED, use_attention
from ebbtide.policy.datum import Datum
from ebbtide.policy.fuse import own_forwards
from ebbtide.policy.packing import pack
from ebbtide.policy.policy import Policy
from ebbtide.system.torch_internals import allow_deterministic_matmuls
from ebbtide.worker import seed_everything

CONFIG = str(Path(__file__).parent / "configs" / "qwen3-1.7b.yaml")
GIB = 2**30


def shape(**sizes: object) -> list[str]:
    return [f"model.scratch.{name}={value}" for name, value in sizes.items()]


SMALL = shape(hidden=1024, mlp=3072)  # the 0.6B shape
LARGE = shape(layers=36, hidden=2560, heads=32, mlp=9728)  # 4B
MOE = shape(architecture="qwen3_moe", layers=8, heads=32, kv_heads=4, mlp=768, experts=128, experts_per_token=8)
TINY = shape(architecture="llama", layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, mlp=1536, vocabulary=49152)
STAGES: dict[str, tuple[str, list[str], int, tuple[int, int]]] = {
    "382": ("1.7B, 16,384 tokens of 382", [], 16384, (126, 256)),
    "1024": ("1.7B, 16,384 tokens of 1,024", [], 16384, (338, 686)),
    "4k": ("1.7B, 4,096 tokens of 382", [], 4096, (126, 256)),
    "0.6b": ("0.6B, 16,384 tokens of 382", SMALL, 16384, (126, 256)),
    "4b": ("4B, 16,384 tokens of 382", LARGE, 16384, (126, 256)),
    "moe": ("MoE, 16,384 tokens of 382", MOE, 16384, (126, 256)),
    "135m": ("135M, 30,720 tokens of 60", TINY, 30720, (52, 8)),
    "135m-2": ("135M, 2 x 15,360 tokens of 60", TINY, 15360, (52, 8)),
}


class Bench:
    """One model and its packed tokens."""

    def __init__(self, options: list[str], tokens: int, lengths: tuple[int, int], *, fused: bool = True) -> None:
        seed_everything(0, deterministic=False)
        self.config = load(CONFIG, options)
        self.policy = Policy(load_model(self.config), self.config)
        self.model = self.policy.model
        if fused:
            self.policy.fuse_blocks(print)
            assert self.policy._fused is not None, "a figure of fused blocks must be of fused blocks"
        prompt, completion = lengths
        generator = torch.Generator().manual_seed(1)

        def some(count: int) -> list[int]:
            # Not token 0: its embedding is zero, and norms of zero multiply gradients by 1,000 each.
            return torch.randint(1, 200, (count,), generator=generator).tolist()

        count = max(1, round(tokens / sum(lengths)))
        data = [Datum.completion(some(prompt), some(completion)) for _ in range(count)]
        (self.batch,) = pack(data, budget=count * sum(lengths), device=self.policy.device)

    def forget(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None

    def once(self) -> None:
        """A forward and backward, whose gradients are left."""
        self.forget()
        with use_attention(self.model, PACKED):
            logprobs, _ = self.policy._logprobs(self.batch, temperature=1.0)
            logprobs.sum().backward()

    def grads(self) -> dict[str, torch.Tensor]:
        self.once()
        return {name: one.grad for name, one in self.model.named_parameters() if one.grad is not None}

    def measured(self, case: str, around: AbstractContextManager[Any], times: int = 1) -> list[Row]:
        """Milliseconds of so many forwards and backwards, and the peak above the weights and their gradients."""

        def work() -> None:
            for _ in range(times):
                self.once()

        with around:
            self.forget()
            base = torch.cuda.memory_allocated()
            began = time.perf_counter()
            work()
            torch.cuda.synchronize()
            first = time.perf_counter() - began
            torch.cuda.reset_peak_memory_stats()
            taken = seconds(work, repeats=7, warm_up=2)
            peak = torch.cuda.max_memory_allocated() - base
        self.forget()
        rows = [
            Row(case, "forward and backward", 1000 * taken, "ms"),
            Row(case, "peak above the weights", peak / GIB, "GiB"),
            Row(case, "first call", first, "s"),
        ]
        print(*(f"{row.value:.4g} {row.unit}" for row in rows), case, sep="  ", flush=True)
        return rows


def ours(name: str) -> Iterator[Row]:
    """Fused blocks, and transformers' own of the same model."""
    label, bench, times = begun(name, fused=True)
    yield from bench.measured(f"{label}, fused", nullcontext(), times)
    yield from bench.measured(f"{label}, transformers' own", own_forwards(bench.model), times)


def peer(name: str, kind: str) -> Iterator[Row]:
    label, bench, times = begun(name, fused=False)
    try:
        PEERS[kind](bench.model)
        yield from bench.measured(f"{label}, {kind}", nullcontext(), times)
    except Exception as error:  # noqa: BLE001 - a peer that does not run is a result
        print(f"{label}, {kind}: {type(error).__name__}: {str(error)[:300]}", flush=True)


def begun(name: str, *, fused: bool) -> tuple[str, Bench, int]:
    """A stage's label, its model, and how often a forward and backward runs."""
    label, options, tokens, lengths = STAGES[name]
    return label, Bench(options, tokens, lengths, fused=fused), 2 if name == "135m-2" else 1


def compile_blocks(model: Any) -> None:
    torch._dynamo.reset()
    for block in layers_of(model) or ():
        block.compile(dynamic=False)


def use_liger(model: Any) -> None:
    """Liger's norms, rotary embeddings and gates in a model; the head stays ours."""
    from liger_kernel import transformers as liger

    family = model.config.model_type
    apply: Callable[..., None] = getattr(liger, f"apply_liger_kernel_to_{family}")
    apply(model=model, fused_linear_cross_entropy=False)


PEERS: dict[str, Callable[[Any], None]] = {"compiled": compile_blocks, "Liger": use_liger}


def presets() -> Iterator[Row]:
    _, options, tokens, lengths = STAGES["382"]
    wanted: dict[str, torch.Tensor] = {}
    kinds = [(preset, fused) for fused in (True, False) for preset in ("keep", "balanced", "recompute", "offload")]
    for preset, fused in kinds[: 4 if "--ours" in sys.argv else None]:
        count = round(tokens / sum(lengths)) * sum(lengths)
        more = [f"memory.activations.preset={preset}", f"train.microbatch_tokens={count}"]
        bench, label = Bench([*options, *more], tokens, lengths, fused=fused), STAGES["382"][0]
        label += "" if fused else ", transformers' own"
        wanted = {} if preset == "keep" else wanted
        with Residency(plan_holdings(bench.config), torch.device("cuda", 0)) as residency:
            bench.policy.place_activations(residency, {}, note=print)
            around = bench.policy._activations or nullcontext()
            yield from bench.measured(f"{label}, {preset}", around)
            torch.use_deterministic_algorithms(True)  # attention's backward adds in any order otherwise
            with around:
                found = bench.grads()
            torch.use_deterministic_algorithms(False)
            wanted = wanted or {name: grad.clone() for name, grad in found.items()}
            same = all(torch.equal(grad, wanted[name]) for name, grad in found.items())
            yield Row(f"{label}, {preset}", "gradients identical to keep", float(same), "(1 = yes)")
            print(f"    the same bits: {same}", flush=True)
        del bench, found
        free()


def accuracy() -> Iterator[Row]:
    """Errors of log-probs and gradients in bfloat16 against float32, of both kinds of blocks, of a smaller model."""
    small = [*SMALL, "model.scratch.layers=8", "model.scratch.vocabulary=32768"]
    bench = Bench(small, 4096, (126, 256))
    exact = Bench([*small, "model.dtype=float32"], 4096, (126, 256), fused=False)
    with torch.no_grad():
        for theirs, ours in zip(exact.model.parameters(), bench.model.parameters(), strict=True):
            theirs.copy_(ours)
    right, right_logprobs = exact.grads(), logprobs_of(exact)
    for kind, around in (("fused", nullcontext()), ("transformers' own", own_forwards(bench.model))):
        with around:
            found = bench.grads()
            off = [(grad.float() - right[name]).norm() / right[name].norm() for name, grad in found.items()]
            logprobs = logprobs_of(bench)
        errors, case = torch.stack(off), f"8 layers of 0.6B in bfloat16, {kind}"
        apart = (logprobs.float() - right_logprobs.float()).abs()
        yield Row(case, "gradients off float32, mean", 100 * errors.mean().item(), "%")
        yield Row(case, "gradients off float32, largest", 100 * errors.max().item(), "%")
        yield Row(case, "log-probs off float32, mean", apart.mean().item(), "nats")
        yield Row(case, "log-probs off float32, largest", apart.max().item(), "nats")


def logprobs_of(bench: Bench) -> torch.Tensor:
    with torch.no_grad():
        return bench.policy._logprobs(bench.batch, temperature=1.0)[0]


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    named = [one for one in sys.argv[1:] if one != "--ours"] or [*STAGES, "presets", "accuracy"]
    allow_deterministic_matmuls(torch.device("cuda", 0))
    whole: dict[str, Callable[[], Iterator[Row]]] = {"presets": presets, "accuracy": accuracy}
    jobs = [(name, whole.get(name) or partial(ours, name)) for name in named]
    if "--ours" not in sys.argv:
        # The last is Liger: it changes transformers' classes for the rest of the process.
        jobs += [
            (f"{name}, {kind}", partial(peer, name, kind)) for kind in PEERS for name in named if name not in whole
        ]
    for title, job in jobs:
        print(f"== {title}", flush=True)
        rows = list(job())
        free()
        done = {row.case for row in rows}
        save("train", [*kept("train", done.__contains__), *rows], prints=title == jobs[-1][0])


if __name__ == "__main__":
    main()
