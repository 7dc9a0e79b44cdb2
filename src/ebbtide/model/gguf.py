"""Reads the header of a GGUF file as the equivalent config.json: sizes and names of tensors, no weights.

Imports neither torch nor the package `gguf`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ebbtide.errors import UserError
from ebbtide.model.families import FAMILIES, family_named

# Numbers of the file format (github.com/ggml-org/ggml/blob/master/docs/gguf.md), little-endian.
VERSIONS = (2, 3)
NUMBERS: Mapping[int, str] = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9
LONGEST = 1 << 16  # Longer texts are truncated to this many bytes: none that is used here is so long.
MAX_DIMENSIONS = 8

KEYS: Mapping[str, str] = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "attention.key_length": "head_dim",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
"""The name of a size in a GGUF file, after the architecture's name -> its name in a config.json."""


def read_gguf_config(file: Path, called: str) -> dict[str, Any]:
    """The contents of an equivalent config.json; `called` is the model's name in messages."""
    try:
        with file.open("rb") as opened:
            return _config(_Header(opened, file.stat().st_size))
    except (OSError, ValueError, struct.error) as error:
        raise UserError(f"{called} has no readable GGUF header: {error}") from None


@dataclass
class _Header:
    """Reads a header from front to back; lengths that exceed the file's size are refused."""

    file: BinaryIO
    size: int

    def number(self, kind: str) -> Any:
        return struct.unpack("<" + kind, self.read(struct.calcsize("<" + kind)))[0]

    def read(self, size: int) -> bytes:
        read = self.file.read(size) if size <= self.size else b""
        if len(read) < size:
            raise ValueError("it ends before its header does")
        return read

    def text(self) -> str:
        """A text, truncated if it is long."""
        size = self.number("Q")
        kept = self.read(min(size, LONGEST))
        if size > LONGEST:
            self.skip(size - LONGEST)
        return kept.decode(errors="replace")

    def skip(self, size: int) -> None:
        if size > self.size - self.file.tell():
            raise ValueError("it ends before its header does")
        self.file.seek(size, 1)

    def value(self, kind: int) -> Any:
        """A number or a text; None for a list, because no size of a supported model is a list."""
        if kind == TEXT:
            return self.text()
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        if kind != ARRAY:
            raise ValueError(f"it has a value of the unknown kind {kind}")
        inner, count = self.number("I"), self.number("Q")
        if inner in NUMBERS:
            self.skip(count * struct.calcsize("<" + NUMBERS[inner]))
        elif inner == TEXT:
            for _ in range(count):
                self.skip(self.number("Q"))
        else:
            raise ValueError(f"it has a list of the unknown kind {inner}")
        return None

    def tensors(self, count: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The name of each tensor, and its shape with the innermost dimension first."""
        for _ in range(count):
            name, dimensions = self.text(), self.number("I")
            if dimensions > MAX_DIMENSIONS:
                raise ValueError(f"its tensor {name!r} has {dimensions} dimensions")
            yield name, tuple(self.number("Q") for _ in range(dimensions))
            self.read(4 + 8)  # The tensor's type and offset.


def _config(header: _Header) -> dict[str, Any]:
    if header.read(4) != b"GGUF":
        raise ValueError("it does not start with `GGUF`")
    version, tensors, pairs = header.number("I"), header.number("Q"), header.number("Q")
    if version not in VERSIONS:
        raise ValueError(f"it has version {version}; supported are {' and '.join(map(str, VERSIONS))}")
    known = {header.text(): header.value(header.number("I")) for _ in range(pairs)}
    shapes = dict(header.tensors(tensors))
    architecture = str(known.get("general.architecture"))
    model_type = next((name for name, each in FAMILIES.items() if each.gguf_name == architecture), architecture)
    found = {ours: known.get(f"{architecture}.{theirs}") for theirs, ours in KEYS.items()}
    for ours, theirs in family_named(model_type).gguf_keys.items():
        if found[ours] is None:
            found[ours] = known.get(f"{architecture}.{theirs}")
    return {
        **found,
        "model_type": model_type,
        "vocab_size": shapes.get("token_embd.weight", (None,))[-1],
        "tie_word_embeddings": "output.weight" not in shapes,
    }
