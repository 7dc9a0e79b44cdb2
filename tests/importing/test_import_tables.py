"""The tables of other tools' keys: each entry has one answer, and names keys that exist."""

import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache

import pytest
import torch

from ebbtide.config.keys import all_keys
from ebbtide.config.load import load_text
from ebbtide.config.model import ModelConfig
from ebbtide.config.roots import roots
from ebbtide.config.serve import ServeConfig
from ebbtide.importing.table import Entry, read_table
from ebbtide.model.families import FAMILIES
from ebbtide.model.known import hub_id_of, known_config, known_models
from ebbtide.model.shape import find_shape, from_config
from ebbtide.planner.host_memory import meta_model

CASES = [
    (tool, algorithm)
    for tool, algorithms in {
        "nemo_rl": ("grpo", "sft", "dpo", "distill"),
        "verl": ("grpo", "sft"),
        "trl": ("grpo", "sft", "dpo", "distill"),
    }.items()
    for algorithm in algorithms
]


@cache
def sections() -> set[str]:
    """All keys of Ebbtide, of all algorithms, and the sections that they are in."""
    keys = {key for root in (*roots().values(), ServeConfig) for key in all_keys(root)}
    return keys | {key.rpartition(".")[0] for key in keys}


def entries(tool: str, algorithm: str) -> Iterator[tuple[str, Entry]]:
    table = read_table(tool, algorithm)
    yield from table.keys.items()
    yield from table.sections.items()


@pytest.mark.parametrize(("tool", "algorithm"), CASES)
def test_every_entry_has_one_answer(tool: str, algorithm: str) -> None:
    odd = [
        key
        for key, entry in entries(tool, algorithm)
        if sum(part is not None for part in (entry.to, entry.by, entry.not_needed, entry.none)) != 1
    ]
    assert odd == []


@pytest.mark.parametrize(("tool", "algorithm"), CASES)
def test_keys_that_are_taken_exist(tool: str, algorithm: str) -> None:
    missing = [key for key, entry in entries(tool, algorithm) if entry.to is not None and entry.to not in sections()]
    assert missing == []


@pytest.mark.parametrize(("tool", "algorithm"), CASES)
def test_texts_name_keys_that_exist(tool: str, algorithm: str) -> None:
    named = {
        (key, one.partition("=")[0].partition(":")[0])
        for key, entry in entries(tool, algorithm)
        for text in (entry.not_needed, entry.none, entry.by)
        for one in re.findall(r"`([a-z_]+\.[a-z_.]+[^`]*)`", text or "")
        if not one.startswith(("algorithm.", "trainer."))
    }
    assert {(key, one) for key, one in named if one not in sections()} == set()


# Keys that transformers makes others of.
READ_AS_WELL = ("hybrid_override_pattern", "num_hidden_layers", "global_head_dim", "num_global_key_value_heads")


# Parameters as the model cards or the weights' own index files count them.
@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("Qwen/Qwen2.5-0.5B", 494_032_768),
        ("Qwen/Qwen2.5-1.5B-Instruct", 1_543_714_304),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("Qwen/Qwen3-30B-A3B", 30_532_122_624),
        ("meta-llama/Llama-3.2-1B", 1_235_814_400),
        ("meta-llama/Llama-3.1-8B", 8_030_261_248),
        ("HuggingFaceTB/SmolLM2-135M", 134_515_008),
        ("google/gemma-3-27b-it", 27_009_346_304),
    ],
)
def test_known_models_have_their_parameters(model: str, parameters: int) -> None:
    assert find_shape(ModelConfig(path=model)).parameters == parameters


# Without the buffers that some of these counts include, and without heads for further tokens (MTP).
@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 31_577_937_344),
        ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16", 123_611_012_096 - 2_942_324_736),
        ("nvidia/NVIDIA-Nemotron-Nano-9B-v2", 8_888_227_328),
        ("deepseek-ai/DeepSeek-V3", 671_026_419_200 - 58 * 256),
        ("openai/gpt-oss-20b", 20_914_757_184),
        ("openai/gpt-oss-120b", 116_829_156_672),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", 79_674_391_296),
    ],
)
def test_known_models_that_are_traced_have_their_parameters(model: str, parameters: int) -> None:
    config = load_text(f"{{model: {{path: {model}}}, task: {{builtin: {{name: copy}}}}}}", "test", "test")
    assert sum(one.numel() for one in meta_model(config, torch.bfloat16).parameters()) == parameters


def test_every_known_model_can_be_planned_and_built() -> None:
    for name, sizes in known_models().items():
        if sizes["model_type"] in FAMILIES:
            assert from_config(sizes, name).context == sizes["max_position_embeddings"]
        else:
            found = known_config(name)
            assert found is not None
            assert found.max_position_embeddings == sizes["max_position_embeddings"]
            # A key that transformers does not know would change nothing.
            known = {one.name for one in fields(found)} | {*READ_AS_WELL, "model_type"}
            assert set(sizes) - known == set(), name


def test_hub_ids_by_the_name_of_a_folder() -> None:
    assert hub_id_of("qwen3-8b") == "Qwen/Qwen3-8B"
    assert hub_id_of("Llama-3.2-1B-Instruct") == "meta-llama/Llama-3.2-1B-Instruct"
    assert hub_id_of("Qwen") is None
