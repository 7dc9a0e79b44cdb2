"""A tiny copy of any causal language model of transformers: a few layers with the real pattern of layer types, windows
of a few tokens, and weights so large that an ignored mask, cap, sink or state shows.

The config is transformers' own default for the type, shrunk by the names of its keys, with a few corrections where a
default is no real model's.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ebbtide.model.tokenizer import scratch_tokenizer

TOKENIZER = scratch_tokenizer(string.printable[:95])
ROWS, HIDDEN, HEADS, HEAD_DIM, WIDE, EXPERTS, WINDOW, CONTEXT = len(TOKENIZER), 64, 4, 16, 96, 4, 8, 128
SPREAD = 0.15
"""The deviation of the weights; norms, biases and other vectors are as far from their initial values."""

# The first expression found in a key decides how large its number may be.
SIZES: list[tuple[str, int]] = [
    (r"vocab", ROWS),
    (r"layer_ids|layer_idx|attn_idxs|moe_layers|token_id|every_n|interval|period|offset|cross_attention_layers", 10**9),
    (r"first_k_dense|num_dense_layers", 1),
    (r"sliding_window_pattern|max_window_layers|window_layers", 10**9),
    (
        r"window|chunk_size$|chunk_length|local_attention$|block_size|index_topk$|compress_rates|rel_extent"
        r"|floor_scale",
        WINDOW,
    ),
    (r"index_topk_blocks|index_n_heads|indexer_n_heads|indexer_kv_heads", 2),
    (r"original_max_position", 32),
    (r"max_position|positions|n_ctx|max_seq_len|context_length|max_length", CONTEXT),
    (r"topk_group", 1),
    (r"n_group$|num_expert_group|n_groups$|ngroups$|o_groups", 2),
    (r"experts_per_tok|top_k_experts|moe_k$|moe_topk", 2),
    (r"shared_experts", 1),
    (r"experts|zero_expert_num", EXPERTS),
    (r"key_value_heads|kv_heads|num_key_heads|query_groups", 2),
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads", 2 * HIDDEN // HEAD_DIM),
    (r"heads$|n_head$|heads_per_layer", HEADS),
    (r"global_head_dim", 2 * HEAD_DIM),
    (r"qk_head_dim", 2 * HEAD_DIM),
    (r"head_dim|head_size|headdim|d_head|kv_channels|dim_head|rotary_dim", HEAD_DIM),
    (r"d_state|state_size|rank|d_rel$|laurel|per_layer_input|router_hidden", 16),
    (r"mamba_d_ssm", 2 * HIDDEN),
    (r"intermediate|ffn|_ff$|inner|dff|feed_forward|mid_dim|mlp_dim", WIDE),
    (r"hidden|d_model|embd|emb_dim|embed|proj_dim|lru_width|^dim$|output_dim", HIDDEN),
    (r"buckets|max_distance|prompt_length|dim_model_base", 32),
    (r"image_size", 28),
    (r"ngram_vocab_size_base", 64),
]
# The same for other numbers: caps that tiny logits reach, and factors that are 1 by default, but in no real model.
FACTORS: list[tuple[str, float]] = [
    (r"drop|jitter", 0.0),
    (r"soft_?cap", 2.0),
    (r"attention_multiplier", 0.3),
    (r"logits_scaling|lm_head_multiplier", 1.7),
    (r"multipliers?$", 1.3),
]
TYPES_OF_LAYERS = ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types", "no_rope_layers")
NUMBERS_OF_LAYERS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks", "num_decoder_layers"),
    *("num_encoder_layers", "decoder_layers", "encoder_layers", "depth", "n_layers_decoder", "num_layers_per_stack"),
)
# What no checkpoint has, or what only transformers derives.
LEFT_OUT = {"transformers_version", "id2label", "label2id", "_name_or_path", "architectures", "dtype"}
SPECIAL = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 0, "is_decoder": True}

LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
MIXTURE = {"n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "n_shared_experts": 1}
PADDED = {"pad_token_id": 2}
# What the tiny copies of a type have instead: where a default is no real model's, or sizes depend on each other.
CORRECTIONS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"short_conv_kernel_size": 4},
    "bamba": {"num_hidden_layers": 3, "attn_layer_indices": [1]},
    "camembert": PADDED,
    "cohere_compass_text": {
        "layer_types": [SLIDING] * 3 + [FULL],
        "num_hidden_layers": 4,
        "rope_parameters": {SLIDING: {"rope_type": "default", "rope_theta": 1e4}, FULL: None},
    },
    "data2vec-text": PADDED,
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}, "num_key_value_heads": 2},
    "deepseek_v2": MIXTURE,
    "dots1": {**MIXTURE, "first_k_dense_replace": 1},
    "emu3_text_model": PADDED,
    "falcon_h1": {"mamba_d_head": HEAD_DIM},
    "gemma3n_text": {  # two shorter periods, of which the second has the keys and values of the first
        "num_hidden_layers": 6,
        "layer_types": [SLIDING, SLIDING, FULL] * 2,
        "intermediate_size": [WIDE] * 6,
        "activation_sparsity_pattern": [0.95] * 2 + [0.0] * 4,
        "num_kv_shared_layers": 3,
    },
    "gemma4_text": {  # the same
        "num_hidden_layers": 6,
        "layer_types": [SLIDING, SLIDING, FULL] * 2,
        "per_layer_config": {"02": {"head_dim": 2 * HEAD_DIM}, "05": {"head_dim": 2 * HEAD_DIM}},
        "num_kv_shared_layers": 3,
        "final_logit_softcapping": 2.0,
        **PADDED,
    },
    "gemma4_unified_text": PADDED,
    "granitemoehybrid": {"num_hidden_layers": 4, "layer_types": [LINEAR, LINEAR, FULL, LINEAR]},
    "hunyuan_v1_dense": {"head_dim": HEAD_DIM},
    "hunyuan_v1_moe": {"head_dim": HEAD_DIM, "num_experts": EXPERTS, "moe_topk": 2},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 2},
    "laguna": {"layer_types": [FULL, SLIDING]},
    "lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "conv", FULL, "conv"], "full_attn_idxs": None},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "conv", FULL, "conv"]},
    "mamba2": {"num_heads": 2 * HIDDEN // HEAD_DIM},
    "mellum": {"layer_types": [FULL, SLIDING]},
    "mimo_v2_flash": {"v_head_dim": HEAD_DIM // 2},
    "minimax_m3_vl_text": {
        "num_hidden_layers": 3,
        "layer_types": [FULL, "minimax_m3_sparse", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "ministral": {"head_dim": HEAD_DIM},
    "modernbert-decoder": PADDED,
    "nemotron": {"num_key_value_heads": 2},
    "phi3": {"original_max_position_embeddings": CONTEXT},
    "phi4_multimodal": {"original_max_position_embeddings": CONTEXT, "eos_token_id": [0]},
    "prophetnet": {**PADDED, "add_cross_attention": False},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD_DIM,
        "indexer_budget": WINDOW,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {**PADDED, "axial_pos_embds_dim": [HIDDEN // 2] * 2, "axial_pos_shape": [8, CONTEXT // 8]},
    "roberta": PADDED,
    "roberta-prelayernorm": PADDED,
    "xlm": {**PADDED, "causal": True},
    "xlm-roberta": PADDED,
    "xlm-roberta-xl": PADDED,
    "xmod": {**PADDED, "default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 5, "layers_block_type": [LINEAR, LINEAR, "hybrid", LINEAR, "hybrid"]},
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": [LINEAR, "hybrid", LINEAR, "hybrid"],
        "hybrid_layer_ids": [1, 3],
    },
    "zaya": {"layer_types": ["hybrid", "hybrid_sliding"], "sliding_window": WINDOW},
}
# Models of a type that compute what its default does not.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4_text, experts": (
        "gemma4_text",
        {"enable_moe_block": True, "num_experts": EXPERTS, "top_k_experts": 2, "moe_intermediate_size": WIDE},
    ),
    "gemma4_text, keys as values": (
        "gemma4_text",
        {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0},
    ),
    "granitemoehybrid, no Mamba": ("granitemoehybrid", {"layer_types": [FULL] * 4, "num_local_experts": 0}),
    "llama, dynamic rope": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, "max_position_embeddings": 32},
    ),
    "llama4_text, dense layers between": ("llama4_text", {"moe_layers": [1, 3], "interleave_moe_layer_step": 2}),
    "nemotron_h, dense": ("nemotron_h", {"layers_block_type": [LINEAR, "mlp", LINEAR, FULL], "num_hidden_layers": 4}),
    "phi3, longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * (HEAD_DIM // 2),
                "long_factor": [4.0] * (HEAD_DIM // 2),
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "qwen2, windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1, "layer_types": [FULL, SLIDING]},
    ),
}


def tiny_config(name: str, **changes: Any) -> PretrainedConfig:
    """The tiny config of a type or variant, with its parts if it has some."""
    kind, own = VARIANTS.get(name, (name, {}))
    return AutoConfig.for_model(kind, **{**_shrunk(AutoConfig.for_model(kind)), **own, **changes})


def tiny_model(name: str, **changes: Any) -> PreTrainedModel:
    """A model with random weights, the same ones each time, in float32."""
    torch.manual_seed(0)
    config = tiny_config(name, **changes)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += SPREAD * torch.randn_like(parameter)
        saved = model.state_dict()
        for name, buffer in model.named_buffers():
            if name in saved and "bias" in name:  # By these, some routers choose experts.
                buffer += SPREAD * torch.randn_like(buffer)
    return model


def _shrunk(config: PretrainedConfig) -> dict[str, Any]:
    found = {key: value for key, value in config.to_dict().items() if key not in LEFT_OUT}
    for key in config.sub_configs:
        part = getattr(config, key, None)
        if part is not None:
            found[key] = _shrunk(part)
    name = found.pop("model_type", "")
    layers = _layers(found)
    tiny: dict[str, Any] = {}
    for key, value in found.items():
        if key in config.sub_configs:
            tiny[key] = value
        elif key in NUMBERS_OF_LAYERS:
            tiny[key] = layers
        elif isinstance(value, list | tuple) and len(value) == getattr(config, "num_hidden_layers", None):
            tiny[key] = [_smaller(key, one) for one in value[:layers]]
        elif key == "per_layer_config":  # Heads of full attention are larger than others.
            tiny[key] = {
                number: {name: _smaller(f"global_{name}", one) for name, one in each.items()}
                for number, each in value.items()
                if int(number) < layers
            }
        elif key in SPECIAL:
            tiny[key] = SPECIAL[key]
        else:
            tiny[key] = _smaller(key, value)
    if "kv_lora_rank" in tiny:  # Every head has keys of its own, made of the latent ones.
        tiny["num_key_value_heads"] = HEADS
    if "attention_hidden_size" in tiny and "mamba_d_state" in tiny:  # Zamba attends to two concatenated inputs.
        tiny |= {"attention_hidden_size": 2 * HIDDEN, "attention_head_dim": 2 * HIDDEN // HEADS}
    return {**tiny, **CORRECTIONS.get(name, {})}


def _layers(found: Mapping[str, Any]) -> int:
    """The fewest layers, two or more, with each type that the config names."""
    lists = [found[key] for key in TYPES_OF_LAYERS if found.get(key)]
    kinds = list(zip(*lists, strict=False))
    return max(2, *(kinds.index(kind) + 1 for kind in set(kinds))) if kinds else 2


def _smaller(key: str, value: Any) -> Any:
    """The value of a key in a tiny config."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return min([value, *(limit for pattern, limit in SIZES if re.search(pattern, key))][:2])
    if isinstance(value, float):
        factor = next((factor for pattern, factor in FACTORS if re.search(pattern, key)), value)
        return factor if value == 1.0 or factor == 0.0 or value > factor > 1.9 else value
    if isinstance(value, list | tuple):
        return [_smaller(key, one) for one in value]
    if isinstance(value, Mapping):
        named = key.startswith("compress")  # Its keys are types of layers.
        return {name: _smaller(key if named else str(name), one) for name, one in value.items()}
    return value
