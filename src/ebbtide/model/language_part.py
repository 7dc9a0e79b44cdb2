"""The language part of a multimodal checkpoint, which is loaded, trained and exported as a model of its own.

Its config is the `text_config` inside the checkpoint's, and its tensors are those with one of a few prefixes. The rest,
such as a vision tower and its projector, is never read. Imports neither torch nor transformers.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Multimodal(NamedTuple):
    """A family of multimodal models."""

    text: str
    """The family of its language part."""
    tied: bool = False
    """Whether transformers ties its output head to its embedding, if its config.json does not say so."""
    text_tied: bool = False
    """The same for its language part."""


MULTIMODAL = {
    "gemma3": Multimodal("gemma3_text", tied=True, text_tied=True),
    "gemma3n": Multimodal("gemma3n_text", tied=True, text_tied=True),
    "gemma4": Multimodal("gemma4_text", tied=True, text_tied=True),
    "llama4": Multimodal("llama4_text"),
    "mistral3": Multimodal("mistral", tied=True),
    "qwen3_5": Multimodal("qwen3_5_text"),
    "qwen3_5_moe": Multimodal("qwen3_5_moe_text"),
}
"""Families by their `model_type`. That of Mistral 3 may have another language part: its `text_config` says so."""

PREFIXES = {"model.language_model.": "model.", "language_model.model.": "model.", "language_model.lm_head.": "lm_head."}
"""How the names of the language part's tensors begin in a checkpoint -> and in a model of its own."""


def text_name(name: str) -> str:
    """The name in the language part of a checkpoint's tensor."""
    for before, after in PREFIXES.items():
        if name.startswith(before):
            return after + name.removeprefix(before)
    return name


def text_config(found: Mapping[str, Any], folder: Path | None) -> Mapping[str, Any]:
    """The config of the language part, if `found` is the contents of a multimodal model's config.json; else `found`.
    `folder` has the checkpoint, if it is on this machine."""
    family, text = MULTIMODAL.get(str(found.get("model_type"))), found.get("text_config")
    if family is None or not isinstance(text, Mapping):
        return found
    outer = bool(found.get("tie_word_embeddings", family.tied))
    inner = bool(text.get("tie_word_embeddings", family.text_tied))
    return {"model_type": family.text, **text, "tie_word_embeddings": is_tied(outer, inner, folder)}


def is_tied(outer: bool, inner: bool, folder: Path | None) -> bool:
    """Whether the head is the embedding, by a multimodal model's config and by its `text_config`. Where they differ,
    the checkpoint says it: it has a head or it has none. The outer one counts where that cannot be seen."""
    names = [] if outer == inner or folder is None else [text_name(name) for name in _tensor_names(folder)]
    return "lm_head.weight" not in names if names else outer


def _tensor_names(folder: Path) -> Iterable[str]:
    """The names of the tensors in a folder's safetensors files."""
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            (size,) = struct.unpack("<Q", opened.read(8))
            yield from json.loads(opened.read(size))
