"""What a quantized matrix (`model.base`) needs. This file imports no torch."""

from __future__ import annotations

import math

from ebbtide.config.model import BaseKind
from ebbtide.errors import UserError
from ebbtide.model.families import Family, family_named
from ebbtide.model.shape import Shape

MOST_ROWS = 256
"""Products of more rows make numbers of the codes first."""
HEAD_SLICE = 2**25
"""Numbers of a quantized output head that are made of its codes at once, where there are more."""
SLICE_STEP = 64
"""Rows of a slice of a matrix are a multiple of it."""
LARGEST_GROUP, SMALLEST_GROUP = 32, 4
"""Numbers of a row that share a factor, in 4 bits."""


def quantized_bytes(rows: int, columns: int, kind: BaseKind) -> int:
    """The bytes of a matrix with its scales."""
    if kind == "float8":
        return rows * (columns + 2)
    return rows * (columns // 2 + columns // group_size(columns) + 4)


def layer_kind(path: str, kind: BaseKind, family: Family) -> BaseKind:
    """What a linear layer of a block is quantized to."""
    return "float8" if kind == "int4" and path in (family.key, family.value) else kind


def group_size(columns: int) -> int:
    """Numbers of a row that share a factor, in 4 bits: the largest power of 2 up to 32 of which the number of a row's
    groups is a multiple of 4, whose bytes are a word."""
    found = math.gcd(columns, 4 * LARGEST_GROUP) // 4
    if found < SMALLEST_GROUP:
        raise UserError(
            f"`model.base: int4` needs layers whose inputs are a multiple of {4 * SMALLEST_GROUP}, and one has"
            f" {columns}: choose float8"
        )
    return found


def base_bytes(shape: Shape, itemsize: int, parameters: int | None = None) -> int:
    """The bytes of so many of a model's parameters, by default all, among which are all linear layers of its blocks.
    `itemsize`: of a number that is not quantized."""
    parameters = shape.parameters if parameters is None else parameters
    if shape.base is None:
        return itemsize * parameters
    others = parameters - shape.layers * block_numbers(shape) - shape.root_shard()
    return itemsize * others + shape.layers * _block_bytes(shape, shape.base) + root_bytes(shape, itemsize)


def _block_bytes(shape: Shape, base: BaseKind) -> int:
    """The bytes of the matrices of a block's linear layers, quantized."""
    family, layers = family_named(shape.family), shape.linear_layers.items()
    return sum(quantized_bytes(*size, layer_kind(path, base, family)) for path, size in layers)


def root_bytes(shape: Shape, itemsize: int) -> int:
    """The bytes of what is outside of a model's blocks: embedding, last norm and output head."""
    whole = itemsize * shape.root_shard()
    if not shape.base_embeddings:
        return whole
    # A number's scale has the type of the other weights.
    quantized = shape.embedding + itemsize * shape.vocabulary
    return whole + (1 if shape.tied else 2) * (quantized - itemsize * shape.embedding)


def slice_rows(columns: int) -> int:
    """The rows of a slice of a matrix of which no more is to be there in numbers at once."""
    return max(1, HEAD_SLICE // columns // SLICE_STEP) * SLICE_STEP


def slice_numbers(vocabulary: int, hidden: int) -> int:
    """The numbers of a quantized output head that are there at once."""
    return hidden * min(vocabulary, slice_rows(hidden))


def head_scratch_bytes(shape: Shape, itemsize: int, *, gradients: float = 0.0) -> int:
    """The bytes of the numbers of a slice of a quantized output head, and of its product with `gradients` of so many
    rows, in float32 and then rounded."""
    if not shape.base_embeddings:
        return 0
    of_gradients = 4 + (itemsize if itemsize < 4 else 0)
    return itemsize * slice_numbers(shape.vocabulary, shape.hidden) + round(of_gradients * gradients * shape.hidden)


def sampling_scratch(shape: Shape, *, whole_head: bool = False) -> int:
    """The most numbers that a sampler makes of codes at once: of a block's largest product, or of a slice of the output
    head or the whole of it."""
    if not shape.base_embeddings:
        return scratch_bytes(shape, 1)
    head = shape.embedding if whole_head else slice_numbers(shape.vocabulary, shape.hidden)
    return max(scratch_bytes(shape, 1), head)


def scratch_bytes(shape: Shape, itemsize: int) -> int:
    """The bytes of the numbers of a block's largest product, in which codes become numbers before a matmul."""
    return 0 if shape.base is None else itemsize * 2 * shape.mlp * shape.hidden


def dequantized_traffic(shape: Shape) -> float:
    """The bytes that are read and written to make numbers of all codes of a model's blocks, once."""
    if shape.base is None:
        return 0.0
    return float(shape.layers * (2 * block_numbers(shape) + _block_bytes(shape, shape.base)))


def block_numbers(shape: Shape) -> int:
    """The numbers of the matrices of a block's linear layers."""
    return sum(rows * columns for rows, columns in shape.linear_layers.values())
