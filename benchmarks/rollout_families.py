"""Generation of every dense family beside a Qwen3 that reads as many bytes a token.

    python benchmarks/rollout_families.py [FAMILY ...]

Random models of 12 layers with hidden 2,048, an MLP of 6,144, 16 heads on 8, 128 channels and 65,536 tokens; 16
prompts x 8 samples of 126 + 256 tokens, which is less than every window (4,096). Weights without the head's and keys
and values are the same bytes for all, but for norms and biases (the difference is a row). Rows are added to
results/rollout.json.
"""

from __future__ import annotations

import gc
import sys
import time
from typing import Any

import torch
from common import Row, add
from rollout_work import bound, grpo_work, new_tokens, timed, weight_numbers
from transformers import AutoConfig, AutoModelForCausalLM

from ebbtide.model.families import FAMILIES
from ebbtide.model.load import LoadedModel
from ebbtide.model.tokenizer import scratch_tokenizer
from ebbtide.system.transformers_internals import attention_implementation
from rollout import IS_TINY, worker_of_run

SIZES: dict[str, Any] = {
    "num_hidden_layers": 12,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 65536,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "pad_token_id": None,
}
TINY = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
TWIN = "qwen3"
# What a family's real models have and its config's defaults do not.
OWN: dict[str, dict[str, Any]] = {
    "exaone4": {"sliding_window_pattern": 4},
    "gemma2": {"query_pre_attn_scalar": 128},
    "gemma3_text": {"query_pre_attn_scalar": 128},
    "granite": {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 1 / 128,
        "logits_scaling": 8.0,
    },
    "phi3": {"original_max_position_embeddings": 8192},
    "phi3, Phi-4 mini": {"original_max_position_embeddings": 8192, "partial_rotary_factor": 0.75},
}
DENSE = [name for name, family in FAMILIES.items() if not family.sparse]
NAMES = [*DENSE, "phi3, Phi-4 mini", *(name for name in ("gemma2", "cohere2") if name not in FAMILIES)]


def random_family(name: str) -> LoadedModel:
    kind, device = name.partition(",")[0], "cpu" if IS_TINY else "cuda"
    sizes = {**SIZES, **(TINY | {"num_key_value_heads": 2} if IS_TINY else {})}
    config = AutoConfig.for_model(kind, **{**sizes, **OWN.get(name, {})})
    torch.manual_seed(0)
    with torch.device(device):
        dtype = torch.float32 if IS_TINY else torch.bfloat16
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    return LoadedModel(model, scratch_tokenizer(None), attention_implementation(model.config))


def measure(name: str) -> tuple[float, int, list[Row]]:
    """(tokens a second, bytes of weights that a step reads, rows)."""
    new, case = 4 if IS_TINY else 256, f"family {name}"
    loaded = random_family(name)
    # No sizes of the config are used, but for plans: the model is given.
    with worker_of_run([], 126, new, loaded=loaded) as (worker, engine):
        work = grpo_work(2 if IS_TINY else 16, new, vocabulary=60_000)
        timed(engine, grpo_work(2 if IS_TINY else 16, 2, vocabulary=60_000))
        taken = min(timed(engine, work) for _ in range(2))
        fused = engine.is_fused
        read = 2 * weight_numbers(loaded)
        rows = [
            Row(case, "tokens a second", new_tokens(work) / taken, "tok/s"),
            Row(case, "of the bound", 100 * bound(loaded, work) / taken, "%"),
            Row(case, "fused", float(fused), "(1 = yes)"),
            Row(case, "exact", float(bool(worker.config.rollout.exact)), "(1 = yes)"),
        ]
    return new_tokens(work) / taken, read, rows


def main() -> None:
    speed, bytes_read, rows = measure(TWIN)
    failed = []
    add("rollout", rows)
    for name in sys.argv[1:] or [name for name in NAMES if name != TWIN]:
        began = time.perf_counter()
        try:
            own, read, rows = measure(name)
        except Exception as error:  # noqa: BLE001 (others go on)
            print(f"family {name}: {type(error).__name__}: {' '.join(str(error).split())[:400]}", flush=True)
            failed.append(name)
            continue
        finally:
            gc.collect()
        case = f"family {name}"
        rows += [
            Row(case, "of its Qwen3 twin", 100 * own / speed, "%"),
            Row(case, "weights off the twin's", 100 * (read / bytes_read - 1), "%"),
        ]
        add("rollout", rows)
        print(f"family {name}: {time.perf_counter() - began:.1f} s", flush=True)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
