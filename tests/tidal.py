"""Tidal: an invented family, which differs from those of transformers in names and numbers alone. None of its modules,
and few of its config's keys, are called as in any other family here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ebbtide.model.families import Family
from ebbtide.model.load import LoadedModel
from families import TOKENIZER

TIDAL = Family(
    defaults={"tie_word_embeddings": True, "num_key_value_heads": 2, "head_dim": 8},
    config_keys={
        "num_hidden_layers": "n_layer",
        "hidden_size": "d_model",
        "num_attention_heads": "n_head",
        "num_key_value_heads": "n_group",
        "intermediate_size": "d_ff",
        "head_dim": "d_head",
    },
    gguf_name="tide",
    qkv_bias=True,
    qk_norm=True,
    embedding_scale="swell",
    embedding="wte",
    rotary="angles",
    layers="h",
    last_norm="ln_f",
    attn_norm="ln_1",
    attention="attn",
    query="attn.wq",
    key="attn.wk",
    value="attn.wv",
    query_norm="attn.ln_q",
    key_norm="attn.ln_k",
    output="attn.wo",
    mlp_norm="ln_2",
    mlp="ffn",
    gate="ffn.w1",
    up="ffn.w3",
    activation="ffn.act",
    down="ffn.w2",
    norm_epsilon="tiny",
)
"""All that Ebbtide needs to know about it."""


class TidalConfig(PreTrainedConfig):
    model_type = "tidal"
    attribute_map = dict(TIDAL.config_keys)

    vocab_size: int = len(TOKENIZER)
    n_layer: int = 2
    d_model: int = 32
    n_head: int = 4
    n_group: int = 2
    d_head: int = 8
    d_ff: int = 48
    swell: float = 1.5
    max_position_embeddings: int = 64
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | None = 2


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.tiny = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.tiny)
        return self.weight * wide.to(x.dtype)


class Angles(nn.Module):
    def __init__(self, config: TidalConfig) -> None:
        super().__init__()
        self.d_head = config.d_head

    def forward(self, x: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        speed = 1e4 ** -(torch.arange(0, self.d_head, 2, device=x.device) / self.d_head)
        angle = (place[..., None].float() * speed).repeat(1, 1, 2)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


class Attention(nn.Module):
    def __init__(self, config: TidalConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer, True
        self.head_dim, self.scaling = config.d_head, config.d_head**-0.5
        self.num_key_value_groups = config.n_head // config.n_group
        queries, keys = config.n_head * config.d_head, config.n_group * config.d_head
        self.wq, self.wk, self.wv = (nn.Linear(config.d_model, width) for width in (queries, keys, keys))
        self.wo = nn.Linear(queries, config.d_model, bias=False)
        self.ln_q, self.ln_k = Norm(config.d_head), Norm(config.d_head)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], mask: Any, **named: Any) -> Tensor:
        heads = (*x.shape[:-1], -1, self.head_dim)
        query, key = self.ln_q(self.wq(x).view(heads)), self.ln_k(self.wk(x).view(heads))
        q, k, v = (states.transpose(1, 2) for states in (query, key, self.wv(x).view(heads)))
        cos, sin = (each.unsqueeze(1) for each in angles)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
        mixed, _ = attend(self, rotated(q, cos, sin), rotated(k, cos, sin), v, mask, scaling=self.scaling, **named)
        return self.wo(mixed.reshape(*x.shape[:-1], -1))


class Ffn(nn.Module):
    def __init__(self, config: TidalConfig) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(config.d_model, config.d_ff, bias=False) for _ in range(2))
        self.w2, self.act = nn.Linear(config.d_ff, config.d_model, bias=False), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.act(self.w1(x)) * self.w3(x))


class Block(GradientCheckpointingLayer):
    def __init__(self, config: TidalConfig, layer: int) -> None:
        super().__init__()
        self.ln_1, self.attn = Norm(config.d_model), Attention(config, layer)
        self.ln_2, self.ffn = Norm(config.d_model), Ffn(config)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], mask: Any, **named: Any) -> Tensor:
        x = x + self.attn(self.ln_1(x), angles, mask, **named)
        return x + self.ffn(self.ln_2(x))


class TidalBase(PreTrainedModel):
    config: TidalConfig
    config_class = TidalConfig
    base_model_prefix = "sea"
    _supports_sdpa = _supports_attention_backend = True


class TidalModel(TidalBase):
    def __init__(self, config: TidalConfig) -> None:
        super().__init__(config)
        self.wte, self.angles = nn.Embedding(config.vocab_size, config.d_model), Angles(config)
        self.h = nn.ModuleList([Block(config, layer) for layer in range(config.n_layer)])
        self.ln_f = Norm(config.d_model)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.wte

    def forward(self, input_ids: Tensor, position_ids: Any = None, use_cache: Any = None, **named: Any) -> Any:
        x = self.wte(input_ids) * self.config.swell
        if position_ids is None:
            position_ids = torch.arange(x.shape[1], device=x.device)[None]
        mask = create_causal_mask(self.config, x, None, None, position_ids=position_ids)
        angles = self.angles(x, position_ids)
        for block in self.h:
            x = block(x, angles, mask, **named)
        return BaseModelOutputWithPast(last_hidden_state=self.ln_f(x))


class TidalForCausalLM(TidalBase, GenerationMixin):
    _tied_weights_keys = {"head.weight": "sea.wte.weight"}

    def __init__(self, config: TidalConfig) -> None:
        super().__init__(config)
        self.sea, self.head = TidalModel(config), nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, **named: Any) -> CausalLMOutputWithPast:
        return CausalLMOutputWithPast(logits=self.head(self.sea(input_ids, **named).last_hidden_state))


def tidal_model(dtype: torch.dtype = torch.float32, **changes: Any) -> LoadedModel:
    torch.manual_seed(0)
    model = TidalForCausalLM(TidalConfig(**changes)).to(dtype).eval()
    for parameter in model.parameters():
        parameter.data += 0.15 * torch.randn_like(parameter)
    return LoadedModel(model, TOKENIZER, model.config._attn_implementation)
