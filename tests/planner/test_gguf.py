"""Shapes from the header of a GGUF file, against the model that transformers makes of the same file."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from transformers import AutoConfig, AutoModelForCausalLM

from ebbtide.config.tree import Model
from ebbtide.errors import UserError
from ebbtide.planner.shape import find_shape

VOCABULARY, HIDDEN, HEADS, KV_HEADS, MLP = 48, 512, 4, 2, 96
HEAD = 128  # what transformers takes a head of qwen3 for: such a file does not tell it


def written(file: Path, architecture: str, *, tied: bool) -> Path:
    """A model of two blocks, of which there is only what a header needs."""
    writer = GGUFWriter(file, architecture)
    writer.add_block_count(2)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    if architecture == "llama":
        writer.add_rope_dimension_count(64)  # not what width and heads would give
    else:
        writer.add_key_length(HEAD)
    if architecture == "qwen3moe":
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(768)  # the default of transformers, which reads no other
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token {number}" for number in range(VOCABULARY)])
    writer.add_token_types([1] * VOCABULARY)
    for name in ["token_embd.weight"] + ["output.weight"] * (not tied):
        writer.add_tensor(name, np.zeros((VOCABULARY, HIDDEN), dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "qwen3moe"])
def test_a_header_has_the_shape_that_transformers_loads(architecture: str, tied: bool, tmp_path: Path) -> None:
    file = written(tmp_path / "model.gguf", architecture, tied=tied)
    shape = find_shape(Model(path=str(file)))
    config = AutoConfig.from_pretrained(tmp_path, gguf_file=file.name)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    assert shape.parameters == sum(parameter.numel() for parameter in built.parameters())
    assert (shape.context, shape.vocabulary, shape.tied) == (256, VOCABULARY, tied)


def test_other_families_are_named_as_they_are_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model.gguf` is of the family `gpt2`, which a plan cannot be made for"):
        find_shape(Model(path=str(written(tmp_path / "model.gguf", "gpt2", tied=True))))


def test_a_size_that_lacks_is_named(tmp_path: Path) -> None:
    whole = written(tmp_path / "model.gguf", "qwen2", tied=True).read_bytes()
    (tmp_path / "model.gguf").write_bytes(whole.replace(b"qwen2.block_count", b"qwen2.block_kount"))
    with pytest.raises(UserError, match=r"the key `num_hidden_layers` is missing in the GGUF header of `model.path: "):
        find_shape(Model(path=str(tmp_path / "model.gguf")))


def test_a_damaged_header_is_a_sentence_and_takes_no_memory(tmp_path: Path) -> None:
    file = written(tmp_path / "model.gguf", "qwen2", tied=True)
    whole, chance = file.read_bytes()[:3000], random.Random(0)
    damaged = [whole[:end] for end in range(4, 1500, 90)]
    for _ in range(150):
        place = chance.randrange(4, 1500)
        damaged.append(whole[:place] + bytes(chance.choices((0, 1, 9, 127, 255), k=8)) + whole[place + 8 :])
    said = []
    for contents in damaged:
        file.write_bytes(contents)
        try:
            find_shape(Model(path=str(file)))  # of sizes that are only others a plan can be made
        except UserError as error:
            said.append(str(error))
    assert len(said) > 30
    assert all("model.gguf" in sentence for sentence in said)
