"""A model's shape from its `config.json` or its GGUF header alone: what it weighs, to the parameter, and how wide each part is."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from ebbtide.config.model_path import config_from_hub, locate
from ebbtide.config.tree import Model as ModelConfig
from ebbtide.config.tree import Scratch
from ebbtide.errors import UserError
from ebbtide.planner.gguf import config_of

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {"tie_word_embeddings": False, "num_key_value_heads": None},
    "mistral": {"tie_word_embeddings": False, "num_key_value_heads": 8},
    "qwen2": {"tie_word_embeddings": False, "num_key_value_heads": 32},
    "qwen3": {"tie_word_embeddings": False, "num_key_value_heads": 32, "head_dim": 128},
    "qwen3_moe": {
        "tie_word_embeddings": False,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "gemma": {"tie_word_embeddings": True, "num_key_value_heads": 16, "head_dim": 256},
}
"""What transformers assumes where a family's config.json is silent."""

SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
MOST_LAYERS = 10_000

Tensor = tuple[int, int]
"""Rows, and numbers in each."""

# Tokens of a from-scratch tokenizer: the end and each byte; beside an alphabet, the end and one for what it lacks.
OF_BYTES, BESIDE_ALPHABET = 257, 2


@dataclass(frozen=True)
class Shape:
    """Of one model. Widths in numbers, not bytes."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    """Of a dense block, or of one expert."""
    vocabulary: int
    tied: bool
    experts: int = 0
    experts_per_token: int = 0
    dense_layers: int = 0
    """Among the blocks of a mixture of experts, those without experts."""
    dense_mlp: int = 0
    """Their width."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    context: int | None = None
    """Tokens of the longest sequence; None where the config.json does not say."""

    @property
    def queries(self) -> int:
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def normed_heads(self) -> bool:
        """Queries and keys pass a norm of their own."""
        return self.family in ("qwen3", "qwen3_moe")

    @cached_property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    def _of_a_block(self, *, sparse: bool) -> list[Tensor]:
        """In the order in which the model has them, but for biases."""
        hidden, queries, keys = self.hidden, self.queries, self.keys
        found = [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)]
        found += [(queries, 1), (keys, 1), (keys, 1)] * self.qkv_bias + [(hidden, 1)] * self.out_bias
        found += [(self.head_dim, 1)] * (2 * self.normed_heads)
        mlp = self.dense_mlp if self.experts else self.mlp
        if sparse:
            found += [(self.experts, 2 * self.mlp * hidden), (self.experts, hidden * self.mlp), (self.experts, hidden)]
        else:
            found += [(mlp, hidden), (mlp, hidden), (hidden, mlp), *([(mlp, 1), (mlp, 1), (hidden, 1)] * self.mlp_bias)]
        return [*found, (hidden, 1), (hidden, 1)]

    def block_held(self, ranks: int = 1) -> int:
        """Parameters of one block, with all of its experts, that the first of so many ranks has: each tensor is shared out by rows, and the first has the most."""
        return _held(self._of_a_block(sparse=self.experts > 0), ranks)

    def root_held(self, ranks: int = 1) -> int:
        """The same of what is in no block: embedding, last norm and head."""
        return _held([(self.vocabulary, self.hidden)] * (1 if self.tied else 2) + [(self.hidden, 1)], ranks)

    def held(self, ranks: int = 1) -> int:
        """The same of the whole model."""
        dense = self.dense_layers and self.dense_layers * _held(self._of_a_block(sparse=False), ranks)
        return (self.layers - self.dense_layers) * self.block_held(ranks) + dense + self.root_held(ranks)

    def whole_to(self, place: int, ranks: int = 1, *, grouped: bool = False) -> int:
        """Parameters of all tensors that have one among the first `place` of those that `held` counts; `grouped`: of all blocks that have one, and with what is in no block."""
        embedding, block = _held([(self.vocabulary, self.hidden)], ranks), self._of_a_block(sparse=self.experts > 0)
        if place <= 0:
            return 0
        if grouped:
            blocks = -(-max(0, place - embedding) // _held(block, ranks))
            return min(self.held(ranks), self.root_held(ranks) + blocks * _held(block, ranks))
        dense = self._of_a_block(sparse=False) * self.dense_layers if self.dense_layers else []
        last = [(self.hidden, 1), *[(self.vocabulary, self.hidden)] * (not self.tied)]
        tensors = [(self.vocabulary, self.hidden), *dense, *block * (self.layers - self.dense_layers), *last]
        return next(end for end in accumulate(_held([tensor], ranks) for tensor in tensors) if end >= place)

    @cached_property
    def block(self) -> int:
        return self.block_held()

    @cached_property
    def parameters(self) -> int:
        return self.held()

    @cached_property
    def largest(self) -> int:
        """Parameters of the largest tensor."""
        return max(self.embedding, *(rows * row for rows, row in self._of_a_block(sparse=self.experts > 0)))

    @cached_property
    def tensors(self) -> int:
        """How many the parameters are."""
        return self.layers * len(self._of_a_block(sparse=self.experts > 0)) + (2 if self.tied else 3)

    def part(self, tensor: int) -> Shape:
        """What one of so many ranks that share out each matrix (tensor parallelism) has: a part of the heads and of the MLP. Embedding, norms and head are whole on each."""
        if tensor == 1:
            return self
        if self.experts:
            raise UserError(
                f"`cluster.tensor: {tensor}` with experts is not supported: set `cluster.tensor: 1` and share the model out with `cluster.data`"
            )
        for what, size in (("heads", self.heads), ("heads of keys and values", self.kv_heads), ("numbers in its MLP", self.mlp)):
            if size % tensor:
                raise UserError(
                    f"`cluster.tensor: {tensor}`: the model has {size} {what}, which is not a multiple of it: set a divisor of {size}"
                )
        return replace(self, heads=self.heads // tensor, kv_heads=self.kv_heads // tensor, mlp=self.mlp // tensor)

    def train_flops(self, lengths: Iterable[tuple[int, int]]) -> float:
        """Operations that a forward and backward of sequences needs, each of a prompt and a completion; what is recomputed is not counted."""
        found = list(lengths)
        tokens = sum(prompt + new for prompt, new in found)
        blocks = 2 * self.used_by_a_token * tokens + 2 * self.queries * sum((prompt + new) ** 2 for prompt, new in found)
        return 3.0 * (self.layers * blocks + 2 * self.embedding * sum(new for _, new in found))

    @property
    def used_by_a_token(self) -> int:
        """Numbers of a block's matrices that one token is multiplied with."""
        mlp = (
            self.hidden * self.experts + self.experts_per_token * 3 * self.hidden * self.mlp if self.experts else 3 * self.hidden * self.mlp
        )
        return self.hidden * (2 * self.queries + 2 * self.keys) + mlp

    @property
    def kept_by_a_token(self) -> int:
        """Numbers of the cache."""
        return 2 * self.layers * self.keys


def _held(tensors: Iterable[Tensor], ranks: int) -> int:
    return sum(-(-rows // ranks) * row for rows, row in tensors)


def from_config(found: Mapping[str, Any], called: str, file: str = "config.json") -> Shape:
    """Of a config.json, or of what else says the same; `called` is the model's name in messages."""
    if not isinstance(found, Mapping):
        raise UserError(f"{called} has a {file} that is not a table of settings")
    family = str(found.get("model_type"))
    if family not in FAMILIES:
        raise UserError(f"{called} is of the family `{family}`, which a plan cannot be made for: known are {', '.join(FAMILIES)}")
    text = {**FAMILIES[family], **{key: value for key, value in found.items() if value is not None}}
    try:
        if odd := [key for key in SIZES if not isinstance(text.get(key, 1), int)]:
            raise ValueError(f"`{odd[0]}` is {text[odd[0]]!r}, and no whole number")
        layers, hidden, heads = (text[key] for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
        if layers > MOST_LAYERS:
            raise ValueError(f"{layers:,} layers are more than {MOST_LAYERS:,}")
        biased = bool(text.get("attention_bias", False))
        sparse = family == "qwen3_moe"
        every, without = int(text.get("decoder_sparse_step") or 1), set(text.get("mlp_only_layers") or [])
        dense = sum(layer in without or (layer + 1) % every != 0 for layer in range(layers)) if sparse else 0
        made = Shape(
            family=family,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=int(text["num_key_value_heads"] or heads),
            head_dim=int(text.get("head_dim") or hidden // heads),
            mlp=int(text["moe_intermediate_size" if sparse else "intermediate_size"]),
            vocabulary=int(text["vocab_size"]),
            tied=bool(text["tie_word_embeddings"]),
            experts=int(text.get("num_local_experts") or text["num_experts"]) if sparse else 0,  # its name in newer files
            experts_per_token=int(text["num_experts_per_tok"]) if sparse else 0,
            dense_layers=dense,
            dense_mlp=int(text["intermediate_size"]) if dense else 0,
            qkv_bias=biased or family == "qwen2",
            out_bias=biased,
            mlp_bias=bool(text.get("mlp_bias", False)),
            context=int(text["max_position_embeddings"]) if "max_position_embeddings" in text else None,
        )
        sizes = (made.layers, made.hidden, made.heads, made.kv_heads, made.head_dim, made.mlp, made.vocabulary)
        if min(*sizes, *((made.experts, made.experts_per_token) if sparse else ())) < 1:
            raise ValueError("a size is not a whole number of 1 or more")
        return made
    except KeyError as error:
        raise UserError(f"the key `{error.args[0]}` is missing in the {file} of {called}: get the whole file") from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise UserError(f"{called} has a {file} that a plan cannot be made from: {error}") from None


def from_scratch(scratch: Scratch) -> Shape:
    """Of a model that is built from nothing."""
    sparse = scratch.architecture == "qwen3_moe"
    tokens = OF_BYTES if scratch.alphabet is None else BESIDE_ALPHABET + len(scratch.alphabet)
    return Shape(
        family=scratch.architecture,
        layers=scratch.layers,
        hidden=scratch.hidden,
        heads=scratch.heads,
        kv_heads=scratch.kv_heads,
        head_dim=scratch.head_dim or scratch.hidden // scratch.heads,
        mlp=scratch.mlp,
        vocabulary=scratch.vocabulary or tokens,
        tied=scratch.tied,
        experts=scratch.experts or 0 if sparse else 0,
        experts_per_token=scratch.experts_per_token or 0 if sparse else 0,
        qkv_bias=scratch.architecture == "qwen2",
    )


def find_shape(config: ModelConfig) -> Shape:
    """Of the configured model: from a folder's config.json, the hub's, the header of a GGUF file, or `model.scratch`. No weight is read."""
    if config.scratch is not None:
        if config.tokenizer is not None and config.scratch.vocabulary is None:
            raise UserError("a plan of `model.scratch` with `model.tokenizer` needs `model.scratch.vocabulary`: the rows of the embedding")
        return from_scratch(config.scratch)
    assert config.path is not None  # the config holds exactly one of the two
    called, (folder, gguf) = f"`model.path: {config.path}`", locate(config.path)
    if gguf is not None:
        return from_config(config_of(Path(folder) / gguf, called), called, "GGUF header")
    file = Path(folder) / "config.json" if Path(folder).is_dir() else config_from_hub(folder)
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:  # absent, no text, no JSON
        raise UserError(f"{called} has no config.json that can be read: {error}") from None
    return from_config(found, called)
