"""A GGUF file as small as can be, of any family."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFWriter

VOCABULARY, HIDDEN, HEADS, KV_HEADS, MLP = 48, 512, 4, 2, 96
HEAD = 128  # what transformers takes a head of qwen3 for: such a file does not tell it


def written(file: Path, architecture: str, *, tied: bool) -> Path:
    """A model of two blocks, of which there is only what a header needs."""
    writer = GGUFWriter(file, architecture)
    writer.add_block_count(2)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    if architecture == "llama":
        writer.add_rope_dimension_count(64)  # not what width and heads would give
    else:
        writer.add_key_length(HEAD)
    if architecture == "qwen3moe":
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(768)  # the default of transformers, which reads no other
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token {number}" for number in range(VOCABULARY)])
    writer.add_token_types([1] * VOCABULARY)
    for name in ["token_embd.weight"] + ["output.weight"] * (not tied):
        writer.add_tensor(name, np.zeros((VOCABULARY, HIDDEN), dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
