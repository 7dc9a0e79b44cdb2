"""Shapes from the header of a GGUF file, against the model that transformers makes of the same file."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ebbtide.config.model import ModelConfig
from ebbtide.errors import UserError
from ebbtide.model.shape import find_shape
from tiny_gguf import VOCABULARY, written


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "qwen3moe"])
def test_a_header_has_the_shape_that_transformers_loads(architecture: str, tied: bool, tmp_path: Path) -> None:
    file = written(tmp_path / "model.gguf", architecture, tied=tied)
    shape = find_shape(ModelConfig(path=str(file)))
    config = AutoConfig.from_pretrained(tmp_path, gguf_file=file.name)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    assert shape.parameters == sum(parameter.numel() for parameter in built.parameters())
    assert (shape.context, shape.vocabulary, shape.tied) == (256, VOCABULARY, tied)


def test_other_families_are_named_as_they_are_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model.gguf` is of the family `gpt2`, which cannot be planned"):
        find_shape(ModelConfig(path=str(written(tmp_path / "model.gguf", "gpt2", tied=True))))


def test_a_size_that_lacks_is_named(tmp_path: Path) -> None:
    whole = written(tmp_path / "model.gguf", "qwen2", tied=True).read_bytes()
    (tmp_path / "model.gguf").write_bytes(whole.replace(b"qwen2.block_count", b"qwen2.block_kount"))
    with pytest.raises(UserError, match=r"the key `num_hidden_layers` is missing in the GGUF header of `model.path: "):
        find_shape(ModelConfig(path=str(tmp_path / "model.gguf")))


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
            find_shape(ModelConfig(path=str(file)))  # of sizes that are only others a plan can be made
        except UserError as error:
            said.append(str(error))
    assert len(said) > 30
    assert all("model.gguf" in sentence for sentence in said)
