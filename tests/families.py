"""Tiny models of families that do something of their own between tokens, with weights large enough that it matters."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ebbtide.model.load import LoadedModel
from ebbtide.model.tokenizer import scratch_tokenizer

TOKENIZER = scratch_tokenizer("0123456789=")
WINDOW = 5
SHAPE = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 16,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
OF: dict[str, dict[str, Any]] = {
    "qwen2_moe": {**EXPERTS, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "phimoe": {**EXPERTS, "sliding_window": WINDOW},
    "minimax_m3_vl_text": {
        **EXPERTS,
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_block_size": 4,
        "index_topk_blocks": 2,
        "index_n_heads": 2,
        "index_head_dim": 8,
    },
    "gemma2": {**MIXED, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "doge": {},
    "llama4_text": {
        **EXPERTS,
        "num_hidden_layers": 3,
        "attention_chunk_size": WINDOW,
        "intermediate_size_mlp": 48,
        "no_rope_layers": [1, 0, 1],
        "floor_scale": 4,
        "attn_scale": 0.5,
    },
    "gpt_oss": {**EXPERTS, **MIXED},
    "mimo_v2_flash": {**EXPERTS, **MIXED, "v_head_dim": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1},
    "zaya": {**EXPERTS, "num_experts_per_tok": 1, "router_hidden_size": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "bloom": {},
    "phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16},
    "llama": {"rope_parameters": DYNAMIC, "max_position_embeddings": 16},
    "diffllama": {},
    "jetmoe": {**EXPERTS, "kv_channels": 8},
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": MIXED["layer_types"] * 2,
        "sliding_window": WINDOW,
        "num_kv_shared_layers": 2,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": len(TOKENIZER),
    },
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": MIXED["layer_types"] * 2,
        "sliding_window": WINDOW,
        "num_kv_shared_layers": 2,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "vocab_size_per_layer_input": len(TOKENIZER),
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
    },
    "deepseek_v3": {
        **EXPERTS,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 4,
    },
}


def family_model(name: str, dtype: torch.dtype = torch.float32, spread: float = 0.15, **changes: Any) -> LoadedModel:
    config = AutoConfig.for_model(name, **{**SHAPE, **OF[name], **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for parameter in model.parameters():
        parameter.data += spread * torch.randn_like(parameter)
    return LoadedModel(model, TOKENIZER, model.config._attn_implementation)


def own_logprobs(loaded: LoadedModel, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """By transformers' own forward of this sequence alone."""
    with torch.no_grad():
        logits = loaded.model(torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    rows = logits.float().log_softmax(-1)
    return rows.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
