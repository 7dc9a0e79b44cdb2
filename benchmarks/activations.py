"""Forward and backward of transformers' own blocks with activations kept, offloaded or made again, module by module:
seconds and peak memory. Models whose blocks are not fused run so; benchmarks/train.py has fused ones.

    python benchmarks/activations.py [16k] [4k] [64k] [moe]

The Qwen3-1.7B shape with random weights and no output head, 4,096, 16,384 and 65,536 tokens in sequences of 1,024,
and a Qwen3-MoE shape; beside it in the same process Hugging Face's gradient checkpointing, torch's `save_on_cpu`,
and TRL's `OffloadActivations` where it is installed. Gradients of every case are compared with `keep`, bit by bit.
Stages that are not named keep the figures of an earlier run.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from common import Row, kept, save

from ebbtide.config import load
from ebbtide.config.memory import ActivationsConfig
from ebbtide.memory.activations import ActivationOffloader
from ebbtide.memory.host import frozen_gc
from ebbtide.memory.residency import Residency
from ebbtide.model.load import blocks_of, decoder, load_model
from ebbtide.planner.holdings import plan_holdings
from ebbtide.policy.activation_plan import (
    ActivationFigures,
    PlacedBlocks,
    choose_activations,
    measure_figures,
    measure_saved_bytes,
    offload_capacity,
)
from ebbtide.policy.attention import PACKED, use_attention
from ebbtide.policy.block_activations import activation_names
from ebbtide.system.torch_internals import allow_deterministic_matmuls
from ebbtide.worker import seed_everything

CONFIG = str(Path(__file__).parent / "configs" / "qwen3-1.7b.yaml")
MOE = [
    "model.scratch.architecture=qwen3_moe",
    "model.scratch.layers=12",
    "model.scratch.experts=32",
    "model.scratch.experts_per_token=4",
    "model.scratch.mlp=768",
]
GIB = 2**30


class Bench:
    """One model and a number of tokens."""

    def __init__(self, options: list[str], tokens: int, label: str) -> None:
        allow_deterministic_matmuls(torch.device("cuda", 0))
        seed_everything(0, deterministic=True)
        self.config, self.tokens, self.label = load(CONFIG, options), tokens, label
        self.model = load_model(self.config).model
        self.blocks = blocks_of(self.model)
        self.placed = PlacedBlocks(self.blocks)
        self.grads: dict[str, torch.Tensor] = {}
        self.figures: ActivationFigures | None = None
        self.keeps = 0  # bytes above the weights at keep's peak
        self.base = torch.cuda.memory_allocated()
        generator = torch.Generator(device="cuda").manual_seed(1)
        # Not token 0: its embedding is zero, stays zero through every block, and norms of zero multiply gradients by
        # 1,000 each.
        self.ids = torch.randint(1, 200, (1, tokens), generator=generator, device="cuda")
        self.upstream = torch.randn(1, tokens, 2048, generator=generator, device="cuda", dtype=torch.bfloat16)

    @property
    def kept_bytes(self) -> int:
        """The gradients of `keep`, which are there to compare with."""
        return sum(grad.nbytes for grad in self.grads.values())

    def forward(self, tokens: int) -> torch.Tensor:
        length = min(1024, tokens)
        starts = torch.arange(0, tokens + 1, length, device="cuda", dtype=torch.int32)
        with use_attention(self.model, PACKED):
            found: torch.Tensor = decoder(self.model)(
                input_ids=self.ids[:, :tokens],
                position_ids=torch.arange(tokens, device="cuda")[None] % length,
                use_cache=False,
                cu_seq_lens_q=starts,
                cu_seq_lens_k=starts,
                max_length_q=length,
                max_length_k=length,
            ).last_hidden_state
        return found

    def probe(self, tokens: int, *, backward: bool = True) -> int:
        with use_attention(self.model, PACKED):
            found = self.forward(tokens)
            if backward:
                torch.autograd.grad(found.sum(), list(self.model.parameters()), allow_unused=True)
        return tokens

    def once(self, around: AbstractContextManager[Any]) -> float:
        for parameter in self.model.parameters():
            parameter.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        with around, use_attention(self.model, PACKED):
            self.forward(self.tokens).backward(self.upstream)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def measured(
        self, name: str, around: Callable[[], AbstractContextManager[Any]], repeats: int = 3, in_turns: bool = False
    ) -> list[Row]:
        """A case; `in_turns` with keeping everything, as a device's clock drifts."""
        case = f"{self.label}{self.tokens:,} tokens, {name}"
        seconds, peaks, keeping = [], [], []
        try:
            for _ in range(1 + repeats):
                if in_turns and self.keeps:
                    keeping.append(self.once(nullcontext()))
                seconds.append(self.once(around()))
                peaks.append(torch.cuda.max_memory_allocated())
        except torch.OutOfMemoryError:
            print(f"{case}: does not fit", flush=True)
            return [Row(case, "does not fit", 1.0, "(1 = yes)")]
        taken = statistics.median(seconds[1:])
        rows = [
            Row(case, "forward and backward", taken * 1000, "ms"),
            Row(case, "tokens a second", self.tokens / taken, "tok/s"),
            Row(case, "peak", (max(peaks[1:]) - self.kept_bytes) / GIB, "GiB"),
        ]
        activations = max(peaks[1:]) - self.base - self.kept_bytes
        if name == "keep":
            self.keeps = activations
        elif self.keeps:
            rows.append(Row(case, "peak above the weights, of keep's", 100 * activations / self.keeps, "%"))
        if keeping:
            rows.append(Row(case, "over keep, in turns", 100 * (taken / statistics.median(keeping[1:]) - 1), "%"))
        grads = {
            name: parameter.grad for name, parameter in self.model.named_parameters() if parameter.grad is not None
        }
        if name == "keep":
            self.grads = {name: grad.clone() for name, grad in grads.items()}
        elif self.grads:
            apart = [name for name, grad in grads.items() if not torch.equal(grad, self.grads[name])]
            rows.append(Row(case, "gradients identical to keep", float(not apart), "(1 = yes)"))
            if apart:
                worst = max((grads[name] - self.grads[name]).abs().max().item() for name in apart)
                print(
                    f"    {len(apart)} of {len(grads)} gradients differ, first {apart[0]}, by {worst:.3g}; finite:"
                    f" {all(g.isfinite().all() for g in grads.values())}"
                )
        print(*(f"{row.value:.4g} {row.unit}" for row in rows), case, sep="  ", flush=True)
        return rows

    def ours(self, name: str, config: ActivationsConfig, *, in_turns: bool = False) -> list[Row]:
        with Residency(plan_holdings(self.config), torch.device("cuda", 0)) as residency:
            self.figures = self.figures or measure_figures(
                ActivationsConfig(preset="balanced"), self.placed, self.probe, residency, self.tokens
            )
            figures = self.figures
            notes: list[str] = []
            choice = choose_activations(
                config,
                self.placed,
                figures,
                lambda some: measure_saved_bytes(self.placed, some, self.probe),
                notes.append,
            )
            reserved = offload_capacity(config, self.placed, choice, self.probe, self.tokens)
            parking = (
                ActivationOffloader(residency.allocate_host("activations", [reserved], pinned=True)[0], residency.mover)
                if reserved
                else None
            )
            held = self.placed.hooks(choice, parking, keep_last=config.keep_last, minimum=1024 * config.minimum_kib)
            repeats = 7 if in_turns else 3
            rows = self.measured(name, lambda: held, repeats, in_turns)
            parked, refused = parking.drain() if parking is not None else (0, 0)
            residency.mover.synchronize()
            exposed = residency.mover.drain().exposed / (1 + repeats)
            parked, refused = parked // (1 + repeats), refused // (1 + repeats)
            print(
                "   ",
                *notes,
                f"exposed {exposed:.3f} s, offloaded {parked / GIB:.1f} GiB, without room {refused / GIB:.1f} GiB",
                flush=True,
            )
            if name == "keep":
                case = f"{self.label}{self.tokens:,} tokens, saved by a block"
                rows += [Row(case, module, size / 1024, "KiB a token") for module, size in figures.saved.items()]
            return [
                *rows,
                Row(rows[0].case, "offloaded", parked / GIB, "GiB"),
                Row(rows[0].case, "exposed", exposed, "s"),
            ]


def gradient_checkpointing(model: Any) -> AbstractContextManager[Any]:
    class On:
        def __enter__(self) -> None:
            model.train()
            model.gradient_checkpointing_enable({"use_reentrant": False})

        def __exit__(self, *_: object) -> None:
            model.gradient_checkpointing_disable()
            model.eval()

    return On()


PRESETS: dict[str, dict[str, Any]] = {
    "keep": {},
    "keep, again": {},
    "preset recompute": {"preset": "recompute"},
    "preset offload": {"preset": "offload", "on_slow_link": "ignore"},
    "preset balanced": {"preset": "balanced"},
}


MIXES: list[dict[str, Any]] = [
    {"recompute": ["attn_norm", "qkv_linear", "mlp_norm", "mlp_fc2"]},
    {"recompute": ["qkv_linear", "mlp_norm", "mlp_fc2"], "offload": ["core_attn"]},
    {"recompute": ["qkv_linear", "mlp_norm", "mlp_fc2"], "offload": ["core_attn", "mlp_fc1"]},
]


def compare(
    tokens: int, options: list[str] | None = None, label: str = "", alone: bool = False, saved_on_cpu: bool = False
) -> Iterator[list[Row]]:
    """The rows of each case."""
    bench = Bench(options or [], tokens, label)
    with frozen_gc():
        yield from cases(bench, alone, saved_on_cpu)


def cases(bench: Bench, alone: bool, saved_on_cpu: bool) -> Iterator[list[Row]]:
    for name, settings in PRESETS.items():
        yield bench.ours(
            name, ActivationsConfig.model_validate(settings), in_turns=name in ("keep, again", "preset balanced")
        )
    for settings in MIXES if alone else ():
        name = ", ".join(f"{place} {' + '.join(names)}" for place, names in settings.items())
        yield bench.ours(name, ActivationsConfig.model_validate(settings | {"on_slow_link": "ignore"}), in_turns=True)
    yield bench.measured("Hugging Face gradient checkpointing", lambda: gradient_checkpointing(bench.model))
    try:
        from trl.models.activation_offloading import OffloadActivations
    except ImportError as error:
        print(f"TRL's OffloadActivations: not installed ({error})", flush=True)
    else:
        # it parks nearly all that keep keeps: more than this host has, where that does not fit on the device
        if bench.keeps:
            yield bench.measured(
                "TRL OffloadActivations", lambda: OffloadActivations(use_pin_memory=True, use_streams=True)
            )
    for name in activation_names(bench.blocks[0]) if alone else ():
        for place in ("offload", "recompute"):
            settings = {place: [name], "on_slow_link": "ignore"}
            if name == "attn_proj" and place == "offload":
                settings["offload"] = ["core_attn", "attn_proj"]
            if name == "block_input":
                if place == "recompute":
                    continue
                settings["recompute"] = ["attn_norm"]
            yield bench.ours(f"{place} {' + '.join(settings[place])}", ActivationsConfig.model_validate(settings))
    if saved_on_cpu:
        yield bench.measured(
            "save_on_cpu(pin_memory=True)", lambda: torch.autograd.graph.save_on_cpu(pin_memory=True), repeats=1
        )


STAGES: dict[str, dict[str, Any]] = {
    "16k": {"tokens": 16_384, "alone": True, "saved_on_cpu": True},
    "4k": {"tokens": 4_096},
    "64k": {"tokens": 65_536},
    "moe": {"tokens": 16_384, "options": MOE, "label": "MoE, "},
}

if __name__ == "__main__":
    for stage in sys.argv[1:] or list(STAGES):
        found: list[Row] = []
        try:
            for rows in compare(**STAGES[stage]):
                found += rows
        finally:  # also what was measured before Ctrl-C
            again = {row.case for row in found}
            save("activations", [*kept("activations", again.__contains__), *found])
