"""Tiny models whose layers pass a state from token to token, one of each kind, with real patterns of layers."""

from families import EXPERTS, OF

DELTA = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA = {
    "num_hidden_layers": 3,
    "mamba_n_heads": 8,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
STATES = {
    "qwen3_next": {**DELTA, **EXPERTS},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **EXPERTS},
    "olmo_hybrid": {**DELTA, "pad_token_id": 0},
    "granitemoehybrid": {
        **MAMBA,
        **EXPERTS,
        "shared_intermediate_size": 16,
        "layer_types": ["mamba", "attention", "mamba"],
    },
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "nemotron_h": {
        "num_hidden_layers": 4,
        "hybrid_override_pattern": "M*M-",
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 8,
        "conv_kernel": 4,
    },
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64},
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {
        **EXPERTS,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
    },
    "minimax": {**EXPERTS, "layer_types": ["linear_attention", "full_attention"], "block_size": 8},
    "jamba": {
        **EXPERTS,
        "num_hidden_layers": 4,
        "attn_layer_period": 4,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "zaya": OF["zaya"],
}
KINDS = ["qwen3_5_text", "nemotron_h", "lfm2", "minimax", "jamba"]
"""One of each kind: a delta net, Mamba 2, a short convolution, linear attention, Mamba 1."""
OF |= STATES
