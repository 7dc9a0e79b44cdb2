"""A model's shape, from its `config.json` or its GGUF header alone: the exact number of parameters, and the width of
each part."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from ebbtide.config.model import BaseKind, ModelConfig, ScratchConfig
from ebbtide.config.model_path import download_config, locate
from ebbtide.errors import UserError
from ebbtide.model.families import FAMILIES, UnknownFamilyError, family_named, has_bias
from ebbtide.model.gguf import read_gguf_config
from ebbtide.model.known import known_models
from ebbtide.model.language_part import text_config
from ebbtide.model.lora_targets import check_targets, no_quantized_experts
from ebbtide.system.units import ceil_div

SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
MAX_LAYERS = 10_000

Tensor = tuple[int, int]
"""The shape of a parameter: its rows, and the numbers in each row."""

BYTE_TOKENS = 257  # of a from-scratch tokenizer without an alphabet: the bytes and an end token
SPECIAL_TOKENS = 2  # of one with an alphabet, in addition to its characters: an end token and an unknown token


@dataclass(frozen=True)
class LoraShape:
    """The adapters of a model."""

    rank: int
    targets: frozenset[str] | None
    """The names of the linear layers that have one; None is all of the blocks'."""
    exclude: frozenset[str] = frozenset()

    def adapts(self, path: str) -> bool:
        """Whether the linear layer at this path has an adapter."""
        name = path.rpartition(".")[2]
        return name not in self.exclude and (self.targets is None or name in self.targets)


@dataclass(frozen=True)
class Shape:
    """The shape of one model. Widths are in elements, not bytes."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    """The width of the MLP of a dense block, or of one expert."""
    vocabulary: int
    tied: bool
    experts: int = 0
    experts_per_token: int = 0
    dense_layers: int = 0
    """The number of blocks without experts in a mixture of experts."""
    dense_mlp: int = 0
    """The width of the MLP of those blocks."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    context: int | None = None
    """The number of tokens of the longest sequence; None if the config.json does not have it."""
    base: BaseKind | None = None
    """How the matrices of the blocks' linear layers are quantized; and whether embedding and head are, in float8."""
    base_embeddings: bool = False
    lora: LoraShape | None = None
    """The adapters, where only these are trained."""

    @property
    def is_traced(self) -> bool:
        """Whether it was found by a trace, because no formula describes its blocks."""
        return False

    @property
    def queries(self) -> int:
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def has_qk_norm(self) -> bool:
        """Whether queries and keys are normalized (QK norm)."""
        return family_named(self.family).qk_norm

    @property
    def has_pre_norms(self) -> bool:
        """Whether the inputs of attention and MLP are normalized."""
        return bool(family_named(self.family).attn_norm)

    @property
    def has_post_norms(self) -> bool:
        """Whether what attention and MLP add is normalized."""
        return bool(family_named(self.family).post_norms)

    @cached_property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    def _block_tensors(self, *, sparse: bool) -> list[Tensor]:
        """The tensors of a block, in the order of the model except for biases."""
        hidden, queries, keys = self.hidden, self.queries, self.keys
        family = family_named(self.family)
        matrices = [(queries, hidden), (keys, hidden), (keys, hidden)]
        found = [*([(queries + 2 * keys, hidden)] if family.has_packed_qkv else matrices), (hidden, queries)]
        found += [(queries, 1), (keys, 1), (keys, 1)] * self.qkv_bias + [(hidden, 1)] * self.out_bias
        wide = family.qk_norm_over_heads
        found += [(queries if wide else self.head_dim, 1), (keys if wide else self.head_dim, 1)] * self.has_qk_norm
        mlp = self.dense_mlp if self.experts else self.mlp
        if sparse:
            found += [(self.experts, 2 * self.mlp * hidden), (self.experts, hidden * self.mlp), (self.experts, hidden)]
        else:
            found += [(2 * mlp, hidden)] if family.has_packed_mlp else [(mlp, hidden), (mlp, hidden)]
            found += [(hidden, mlp), *([(mlp, 1), (mlp, 1), (hidden, 1)] * self.mlp_bias)]
        return [*found, *[(hidden, 1)] * len(family.stream_norms)]

    def block_shard(self, ranks: int = 1) -> int:
        """The number of parameters of one block, with all of its experts, on rank 0 of so many: tensors are sharded by
        rows, and rank 0 has the largest shard."""
        return largest_shard(self._block_tensors(sparse=self.experts > 0), ranks)

    def root_shard(self, ranks: int = 1) -> int:
        """The number of parameters outside the blocks (embedding, last norm and output head) on rank 0 of so many."""
        return largest_shard([(self.vocabulary, self.hidden)] * (1 if self.tied else 2) + [(self.hidden, 1)], ranks)

    def model_shard(self, ranks: int = 1) -> int:
        """The number of parameters of the whole model on rank 0 of so many."""
        dense = self.dense_layers and self.dense_layers * largest_shard(self._block_tensors(sparse=False), ranks)
        return (self.layers - self.dense_layers) * self.block_shard(ranks) + dense + self.root_shard(ranks)

    def round_up_to_tensors(self, place: int, ranks: int = 1, *, grouped: bool = False) -> int:
        """The first `place` parameters of a rank's shard, rounded up to whole tensors. With `grouped` they are rounded
        up to whole blocks, and all parameters outside the blocks are added."""
        embedding, block = (
            largest_shard([(self.vocabulary, self.hidden)], ranks),
            self._block_tensors(sparse=self.experts > 0),
        )
        if place <= 0:
            return 0
        if grouped:
            blocks = ceil_div(max(0, place - embedding), largest_shard(block, ranks))
            return min(self.model_shard(ranks), self.root_shard(ranks) + blocks * largest_shard(block, ranks))
        dense = self._block_tensors(sparse=False) * self.dense_layers if self.dense_layers else []
        last = [(self.hidden, 1), *[(self.vocabulary, self.hidden)] * (not self.tied)]
        tensors = [(self.vocabulary, self.hidden), *dense, *block * (self.layers - self.dense_layers), *last]
        return next(end for end in accumulate(largest_shard([tensor], ranks) for tensor in tensors) if end >= place)

    @property
    def widest_layer(self) -> int:
        """Numbers per token at the widest point of a block."""
        return max(self.mlp * max(1, self.experts_per_token), self.dense_mlp)

    @cached_property
    def block_parameters(self) -> int:
        return self.block_shard()

    @cached_property
    def parameters(self) -> int:
        return self.model_shard()

    @cached_property
    def largest_tensor(self) -> int:
        """The number of parameters of the largest tensor."""
        return max(self.embedding, *(rows * row for rows, row in self._block_tensors(sparse=self.experts > 0)))

    @cached_property
    def largest_trained_tensor(self) -> int:
        """The number of parameters of the largest tensor that is trained."""
        if self.lora is None:
            return self.largest_tensor
        return self.lora.rank * max(max(size) for size in self.adapters.values())

    @cached_property
    def tensor_count(self) -> int:
        """The number of parameter tensors."""
        return self.layers * len(self._block_tensors(sparse=self.experts > 0)) + (2 if self.tied else 3)

    @cached_property
    def linear_layers(self) -> dict[str, Tensor]:
        """Path of each linear layer of a block -> its (outputs, inputs)."""
        family, hidden, queries, keys, mlp = family_named(self.family), self.hidden, self.queries, self.keys, self.mlp
        qkv = {family.query: queries, family.key: keys, family.value: keys}
        halves = {family.gate: mlp, family.up: mlp}
        qkv = {family.query: queries + 2 * keys} if family.has_packed_qkv else qkv
        halves = {family.gate: 2 * mlp} if family.has_packed_mlp else halves
        layers = {path: (width, hidden) for path, width in (qkv | halves).items()}
        return layers | {family.output: (hidden, queries), family.down: (hidden, mlp)}

    @cached_property
    def adapters(self) -> dict[str, Tensor]:
        """Those of them that have an adapter."""
        lora, can = self.lora, set(family_named(self.family).adaptable)
        found = self.linear_layers.items()
        return {path: size for path, size in found if path in can and lora is not None and lora.adapts(path)}

    def adapter_shard(self, ranks: int = 1) -> int:
        """The number of parameters of one block's adapters on rank 0 of so many."""
        rank, layers = self.lora.rank if self.lora is not None else 0, self.adapters.values()
        return largest_shard([one for rows, row in layers for one in ((rank, row), (rows, rank))], ranks)

    def adapters_shard(self, ranks: int = 1) -> int:
        """The number of parameters of all adapters on rank 0 of so many."""
        return self.layers * self.adapter_shard(ranks)

    @cached_property
    def adapter_parameters(self) -> int:
        """The number of parameters of all adapters."""
        return self.adapters_shard()

    @cached_property
    def trained_tensor_count(self) -> int:
        """The number of tensors that are trained."""
        return self.tensor_count if self.lora is None else 2 * self.layers * len(self.adapters)

    def tensor_parallel_shape(self, tensor: int) -> Shape:
        """The shape that each of so many tensor-parallel ranks computes with: a share of the heads and of the MLP.
        Embedding, norms and output head are whole on each."""
        if tensor == 1:
            return self
        if self.experts:
            raise UserError(
                f"`parallel.tensor: {tensor}` with experts is not supported: set `parallel.tensor: 1` and shard the"
                " model with `parallel.data`"
            )
        if not family_named(self.family).tensor_plan:
            raise UserError(
                f"`parallel.tensor: {tensor}` is not supported for {self.family}, which packs matrices into one or"
                " normalizes all heads together: set `parallel.tensor: 1` and shard the model with `parallel.data`"
            )
        for what, size in (
            ("heads", self.heads),
            ("key-value heads", self.kv_heads),
            ("channels in its MLP", self.mlp),
        ):
            if size % tensor:
                raise UserError(
                    f"`parallel.tensor: {tensor}`: the model has {size} {what}, which is not a multiple of {tensor}:"
                    f" set a divisor of {size}"
                )
        return replace(self, heads=self.heads // tensor, kv_heads=self.kv_heads // tensor, mlp=self.mlp // tensor)

    def train_flops(self, lengths: Iterable[tuple[int, int]]) -> float:
        """The FLOPs of a forward and backward over sequences of (prompt, completion) tokens; recomputation is not
        counted."""
        found = list(lengths)
        tokens = sum(prompt + new for prompt, new in found)
        attention = 2 * self.layers * self.queries * sum((prompt + new) ** 2 for prompt, new in found)
        blocks = 2 * self.layers * self.matmul_parameters_per_token * tokens
        # The backward has a product for the input of a matmul, and one for its weight where that is trained.
        times = 3.0 if self.lora is None else 2.0
        return 3.0 * attention + times * (blocks + 2 * self.embedding * sum(new for _, new in found))

    @property
    def matmul_parameters_per_token(self) -> int:
        """The number of matrix parameters of a block that one token is multiplied with."""
        mlp = (
            self.hidden * self.experts + self.experts_per_token * 3 * self.hidden * self.mlp
            if self.experts
            else 3 * self.hidden * self.mlp
        )
        return self.hidden * (2 * self.queries + 2 * self.keys) + mlp

    @property
    def kv_numbers_per_token(self) -> int:
        """The number of elements that one token has in the KV cache."""
        return 2 * self.layers * self.keys


def largest_shard(tensors: Iterable[Tensor], ranks: int) -> int:
    """The number of elements on rank 0, which has the largest shard, if the tensors are sharded by rows."""
    return sum(ceil_div(rows, ranks) * row for rows, row in tensors)


def from_config(found: Mapping[str, Any], called: str, file: str = "config.json") -> Shape:
    """The shape from the contents of a config.json or an equivalent; `called` is the model's name in messages."""
    if not isinstance(found, Mapping):
        raise UserError(f"{called} has a {file} that is not a mapping of keys to values")
    name = str(found.get("model_type"))
    if name not in FAMILIES:
        raise UnknownFamilyError(
            f"{called} is of the family `{name}`, which cannot be planned: choose one of {', '.join(FAMILIES)}"
        )
    family = FAMILIES[name]
    text = family.usual_config(found)
    try:
        if odd := [key for key in SIZES if not isinstance(text.get(key, 1), int)]:
            raise ValueError(f"`{family.config_keys.get(odd[0], odd[0])}` is {text[odd[0]]!r}, not an integer")
        layers, hidden, heads = (text[key] for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
        if layers > MAX_LAYERS:
            raise ValueError(f"{layers:,} layers are more than {MAX_LAYERS:,}")
        sparse = family.sparse
        every, without = int(text.get("decoder_sparse_step") or 1), set(text.get("mlp_only_layers") or [])
        dense = sum(layer in without or (layer + 1) % every != 0 for layer in range(layers)) if sparse else 0
        made = Shape(
            family=name,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=int(text["num_key_value_heads"] or heads),
            head_dim=int(text.get("head_dim") or hidden // heads),
            mlp=int(text["moe_intermediate_size" if sparse else "intermediate_size"]),
            vocabulary=int(text["vocab_size"]),
            tied=bool(text["tie_word_embeddings"]),
            experts=int(text["num_experts"]) if sparse else 0,
            experts_per_token=int(text["num_experts_per_tok"]) if sparse else 0,
            dense_layers=dense,
            dense_mlp=int(text["intermediate_size"]) if dense else 0,
            qkv_bias=has_bias(family.qkv_bias, text),
            out_bias=has_bias(family.output_bias, text),
            mlp_bias=has_bias(family.mlp_bias, text),
            context=int(text["max_position_embeddings"]) if "max_position_embeddings" in text else None,
        )
        sizes = (made.layers, made.hidden, made.heads, made.kv_heads, made.head_dim, made.mlp, made.vocabulary)
        if min(*sizes, *((made.experts, made.experts_per_token) if sparse else ())) < 1:
            raise ValueError("a size is not an integer of 1 or more")
        return made
    except KeyError as error:
        missing = family.config_keys.get(error.args[0], error.args[0])
        raise UserError(f"the key `{missing}` is missing in the {file} of {called}: get the complete file") from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise UserError(f"{called} has a {file} that cannot be planned with: {error}") from None


def from_scratch(scratch: ScratchConfig) -> Shape:
    """The shape of a model from `model.scratch`."""
    family = family_named(scratch.architecture)
    tokens = BYTE_TOKENS if scratch.alphabet is None else SPECIAL_TOKENS + len(scratch.alphabet)
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
        experts=scratch.experts or 0 if family.sparse else 0,
        experts_per_token=scratch.experts_per_token or 0 if family.sparse else 0,
        qkv_bias=has_bias(family.qkv_bias, family.defaults),
        out_bias=has_bias(family.output_bias, family.defaults),
        mlp_bias=has_bias(family.mlp_bias, family.defaults),
    )


def find_shape(config: ModelConfig) -> Shape:
    """The shape of the configured model, from a folder's or the hub's config.json, the table of well-known models, the
    header of a GGUF file, or `model.scratch`. No weights are read."""
    return with_lora(_find_shape(config), config)


def with_lora(shape: Shape, config: ModelConfig) -> Shape:
    """The shape with the configured adapters, and the base as it is quantized beside them. What a trace found has
    them already."""
    if (lora := config.lora) is None or shape.is_traced:
        return shape
    family = family_named(shape.family)
    if config.base is not None and family.sparse:
        raise no_quantized_experts()
    check_targets(lora, {path.rpartition(".")[2] for path in family.adaptable}, sparse=family.sparse)
    targets = frozenset(lora.targets) if lora.targets is not None else None
    adapters = LoraShape(lora.rank, targets, frozenset(lora.exclude))
    return replace(shape, base=config.base, base_embeddings=config.base_embeddings, lora=adapters)


def _find_shape(config: ModelConfig) -> Shape:
    if config.scratch is not None:
        if config.tokenizer is not None and config.scratch.vocabulary is None:
            raise UserError(
                "a plan of `model.scratch` with `model.tokenizer` needs the rows of the embedding: set"
                " `model.scratch.vocabulary`"
            )
        return from_scratch(config.scratch)
    assert config.path is not None  # The config has exactly one of the two.
    called = f"`model.path: {config.path}`"
    if config.path in known_models() and not Path(config.path).exists():
        return from_config(known_models()[config.path], called)
    folder, gguf = locate(config.path)
    if gguf is not None:
        return from_config(read_gguf_config(Path(folder) / gguf, called), called, "GGUF header")
    file = Path(folder) / "config.json" if Path(folder).is_dir() else download_config(folder)
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:  # The file is missing, no text, or no JSON.
        raise UserError(f"{called} has no readable config.json: {error}") from None
    if isinstance(found, Mapping):
        found = text_config(found, Path(folder) if Path(folder).is_dir() else None)
    return from_config(found, called)
