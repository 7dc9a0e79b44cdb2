"""Reward models of a few thousand weights, as folders that transformers can read."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
import transformers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

from ebbtide.model.tokenizer import scratch_tokenizer

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}"


def tokenizer(template: str | None = TEMPLATE, pad: str | None = "<pad>") -> PreTrainedTokenizerFast:
    made = scratch_tokenizer(None)
    made.chat_template = template
    if pad is not None:
        made.add_special_tokens({"pad_token": pad})
    return made


def reward_model(
    folder: Path, *, labels: int = 1, seed: int = 0, pad: str | None = "<pad>", causal: bool = False
) -> str:
    """A Qwen3 that scores chats. Its config names a padding token only if that is one of its own."""
    tokens = tokenizer(pad=pad)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokens),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        num_labels=labels,
        pad_token_id=tokens.pad_token_id if pad == "<pad>" else None,
    )
    model = (Qwen3ForCausalLM if causal else Qwen3ForSequenceClassification)(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3) if parameter.dim() > 1 else None
    model.save_pretrained(folder)
    tokens.save_pretrained(folder)
    return str(folder)


def pair_classifier(folder: Path, labels: int = 3, kind: Literal["Bert", "Roberta"] = "Bert") -> str:
    """A BERT of pairs of texts, without a chat template; a RoBERTa has room for two tokens fewer than positions."""
    tokens = tokenizer(None)
    torch.manual_seed(0)
    if kind == "Roberta":
        tokens.pad_token, tokens.model_max_length = tokens.convert_ids_to_tokens(1), 62
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(tokens),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        num_labels=labels,
        pad_token_id=tokens.pad_token_id,
        initializer_range=0.3,
    )
    getattr(transformers, f"{kind}ForSequenceClassification")(config).save_pretrained(folder)
    tokens.save_pretrained(folder)
    return str(folder)
