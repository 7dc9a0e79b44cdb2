"""Model folders with wrong values, or none: one sentence each, and none that blames something else."""

import json
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.errors import UserError
from ebbtide.model.load import load_model, model_config
from ebbtide.model.tokenizer import scratch_tokenizer
from ebbtide.planner.holdings import plan_holdings
from ebbtide.planner.host_memory import host_bytes
from ebbtide.policy.policy import Policy


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    from conftest import TINY

    path = tmp_path_factory.mktemp("model")
    made = load_model(GrpoConfig.model_validate(TINY))
    made.model.save_pretrained(path)
    made.tokenizer.save_pretrained(path)
    return path


def changed(base, tmp_path, file: str, **keys):
    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    place = folder / file
    place.write_text(json.dumps({**(json.loads(place.read_text()) if place.exists() else {}), **keys}))
    return folder


@pytest.mark.parametrize(
    "keys",
    [
        {"layer_types": ["full_attention"] * 3},
        {"hidden_size": "32"},
        {"dtype": "evil"},
        {"num_attention_heads": 0},
        {"rope_parameters": 5},
    ],
    ids=str,
)
def test_a_config_with_wrong_values_is_refused(base, tmp_path, tiny, keys) -> None:
    config = tiny(
        {"model": {"path": str(changed(base, tmp_path, "config.json", **keys))}, "checkpoint": {"async_save": True}}
    )
    for look in (lambda: host_bytes(config, plan_holdings(config)), lambda: load_model(config)):
        with pytest.raises(UserError, match="could not be loaded as a causal language model"):
            look()


def test_a_config_that_is_a_list(base, tmp_path, tiny) -> None:
    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(UserError, match="could not be loaded as a causal language model"):
        model_config(tiny({"model": {"path": str(folder)}}))


def test_an_end_token_that_is_no_number(base, tmp_path, tiny) -> None:
    config = tiny({"model": {"path": str(changed(base, tmp_path, "generation_config.json", eos_token_id=[1, "x"]))}})
    with pytest.raises(UserError, match=r"`eos_token_id` in the model's generation_config.json is 'x'"):
        load_model(config)


def edited(base, tmp_path, change):
    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})
    return folder


def test_weights_that_are_not_finite_are_named(base, tmp_path, tiny) -> None:
    """Not the family, which is sound."""

    def broken(weights):
        weights["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
        return weights

    config = tiny({"model": {"path": str(edited(base, tmp_path, broken))}})
    with pytest.raises(
        UserError, match=r"computes numbers that are not finite \(NaN or Inf\), its weight mlp.up_proj.weight has some"
    ):
        Policy(load_model(config), config).verify()


def test_codes_of_numbers_are_not_taken_for_numbers(base, tmp_path, tiny) -> None:
    folder = edited(
        base, tmp_path, lambda weights: {name: (100 * weight).to(torch.int8) for name, weight in weights.items()}
    )
    with pytest.raises(
        UserError, match=r"as I8 in model.safetensors, but its config.json does not say how it is quantized"
    ):
        load_model(tiny({"model": {"path": str(folder)}}))


def test_what_transformers_says_of_a_model_is_shown_not_obeyed(base, tmp_path, tiny, capfd) -> None:
    load_model(
        tiny(
            {"model": {"path": str(edited(base, tmp_path, lambda weights: {**weights, "red \x1b[31m": torch.ones(1)}))}}
        )
    )
    said = capfd.readouterr()
    assert "\x1b" not in said.out + said.err
    (own,) = [
        handler for handler in logging.getLogger("transformers").handlers if type(handler) is logging.StreamHandler
    ]
    record = logging.makeLogRecord({"msg": "also %s", "args": ("\x1b[31m",)})
    assert own.filter(record)
    assert record.getMessage() == "also \\x1b[31m"


def test_a_multimodal_family_without_a_language_model_is_refused_without_a_list_of_all_others(tiny, tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl"}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    scratch_tokenizer("0123456789=").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="could not be loaded as a causal language model") as error:
        load_model(tiny({"model": {"path": str(tmp_path)}}))
    assert "Qwen3VLConfig" in str(error.value)
    assert "GPT2Config" not in str(error.value)
