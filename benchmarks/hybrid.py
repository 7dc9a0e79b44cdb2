"""GRPO steps of families with layers of their own, beside a Qwen3 shape with the same bytes: 16 prompts x 8 samples of
100 + 256 tokens, random weights, no KL, planned for 120 GiB.

    python benchmarks/hybrid.py [qwen3.5] [gpt-oss]

qwen3.5: the Qwen3.5-2B shape, three of whose four layers are gated delta nets. gpt-oss: a mixture of experts with sinks
and alternating windows as gpt-oss has them, of a size whose whole training state fits into one GPU. Each runs in turn
with a Qwen3 shape that has as many layers, and an MLP so wide that both have about as many parameters.
Models that are not run keep the figures of an earlier run.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import plan
import torch
from common import Row, kept, save
from transformers import AutoConfig, AutoModelForCausalLM

from ebbtide.config import load
from ebbtide.model.load import load_model
from ebbtide.system.allocator import use_expandable_segments
from ebbtide.system.machine import save_rates
from ebbtide.system.units import GIB

BUDGET = 120.0  # GiB, of the 139 that an H200 has
LENGTHS = ["rollout.max_prompt_tokens=100", "task.python.options.length=100"]
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": (
        "qwen3_5_text",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "intermediate_size": 6144,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 12,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "intermediate_size": 2048,
            "num_local_experts": 16,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
    ),
}
DENSE: dict[str, Any] = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
COMMON = {"max_position_embeddings": 40960, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def parameters(family: str, shape: dict[str, Any]) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**COMMON, **shape}))
    return sum(weight.numel() for weight in model.parameters())


def alike(family: str, shape: dict[str, Any]) -> dict[str, Any]:
    """A Qwen3 shape with as many layers and about as many parameters."""
    layers, wanted = shape["num_hidden_layers"], parameters(family, shape)
    without = parameters("qwen3", {**DENSE, "num_hidden_layers": layers, "intermediate_size": 128})
    width = 128 + (wanted - without) // (3 * DENSE["hidden_size"] * layers)
    return {**DENSE, "num_hidden_layers": layers, "intermediate_size": width // 128 * 128}


def write(folder: Path, family: str, shape: dict[str, Any]) -> list[str]:
    """Writes a model with random weights, and returns the settings by which a run has it."""
    config = AutoConfig.for_model(family, **{**COMMON, **shape})
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    load_model(load(plan.PLANNED, ["model.scratch.layers=1", "device=cpu"])).tokenizer.save_pretrained(folder)
    return [f"model={json.dumps({'path': str(folder)})}", *LENGTHS]


def stage(name: str) -> Iterator[tuple[str, list[Row]]]:
    family, shape = SHAPES[name]
    for label, (kind, sizes) in {
        f"{name}: {family}": (family, shape),
        f"{name}: qwen3 of the same bytes": ("qwen3", alike(family, shape)),
    }.items():
        with tempfile.TemporaryDirectory() as folder:
            options = write(Path(folder), kind, sizes)
            rows = plan.planned_step(label, [*plan.ALWAYS, *plan.PLAIN, *options], BUDGET)
        yield label, [Row(label, "parameters", parameters(kind, sizes) / 1e9, "billion"), *rows]


def main() -> None:
    use_expandable_segments()  # as `ebbtide train` does
    total = torch.cuda.get_device_properties(0).total_memory / GIB
    save_rates(torch.cuda.get_device_name(), total, plan.measured_rates()[0])
    for name in sys.argv[1:] or list(SHAPES):
        for label, rows in stage(name):
            save("hybrid", [*kept("hybrid", label.__eq__), *rows])


if __name__ == "__main__":
    main()
