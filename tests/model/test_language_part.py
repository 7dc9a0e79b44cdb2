"""The language part of multimodal checkpoints: it is loaded to the same logits as in the whole model, trained, exported
as a model of its own or written back, and the rest is never read."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from ebbtide.algorithms.loop import train
from ebbtide.checkpoint.export import export
from ebbtide.errors import UserError
from ebbtide.model.language_part import MULTIMODAL, is_tied, text_config
from ebbtide.model.load import load_model, model_config, uninitialized_model
from ebbtide.model.shape import find_shape
from ebbtide.model.tokenizer import scratch_tokenizer
from ebbtide.report.report import Report
from example_runs import write_rows

TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
}
DELTA_NET = {"num_hidden_layers": 4} | {
    f"linear_{name}": size
    for name, size in {"num_key_heads": 2, "num_value_heads": 2, "key_head_dim": 8, "value_head_dim": 8}.items()
}
SPARSE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
WINDOWS = {"num_hidden_layers": 6, "sliding_window": 16}
PATCHES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
    "num_position_embeddings": 16,
}
LLAMA_VISION = PATCHES | {
    "intermediate_size": 64,
    "vision_output_dim": 16,
    "projector_input_dim": 16,
    "projector_output_dim": 16,
}
PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64, "num_kv_shared_layers": 0}
WHOLE = {
    "qwen3_5": {"text_config": TEXT | DELTA_NET, "vision_config": QWEN_VISION},
    "qwen3_5_moe": {"text_config": TEXT | DELTA_NET | SPARSE, "vision_config": QWEN_VISION},
    "gemma3": {"text_config": TEXT | WINDOWS, "vision_config": PATCHES, "mm_tokens_per_image": 4},
    "gemma4": {
        "text_config": TEXT | WINDOWS | PER_LAYER | {"global_head_dim": 16, "num_global_key_value_heads": 1},
        "vision_config": PATCHES | {"num_key_value_heads": 2, "head_dim": 8},
        "audio_config": None,
    },
    "llama4": {
        "text_config": TEXT
        | {"num_hidden_layers": 4, "num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 16},
        "vision_config": LLAMA_VISION,
    },
    "mistral3": {
        "text_config": TEXT | {"model_type": "mistral"},
        "vision_config": PATCHES | {"model_type": "pixtral", "head_dim": 8},
        "spatial_merge_size": 1,
    },
}
TOKENS = torch.arange(3, 50)[None]
TRAINED = {"mistral3": "paged", "gemma3": "paged", "gemma4": "huggingface"}  # with an engine that runs them


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """made("gemma3"): (a checkpoint of the whole model, its logits)."""
    found = {}

    def make(name: str) -> tuple[Path, torch.Tensor]:
        if name not in found:
            folder = tmp_path_factory.mktemp(name)
            torch.manual_seed(0)
            model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(name, **WHOLE[name]))
            for parameter in model.parameters():
                parameter.data.normal_(0, 0.05)
            model.save_pretrained(folder)
            scratch_tokenizer("0123456789=").save_pretrained(folder)
            found[name] = folder, logits(model)
        return found[name]

    return make


@pytest.mark.parametrize("name", WHOLE)
def test_the_language_part_has_the_logits_of_the_whole(tiny, made, tmp_path, name) -> None:
    """To the bit; and as it is saved, and as a resumed run or an export builds it from its config."""
    folder, expected = made(name)
    config = tiny({"model": {"path": str(folder)}})
    model = load_model(config).model
    assert model.config.model_type == MULTIMODAL[name].text
    assert not [name for name, _ in model.named_parameters() if "vision" in name or "visual" in name]
    assert torch.equal(logits(model), expected)
    model.save_pretrained(tmp_path / "saved")
    again, _ = uninitialized_model(config, torch.float32)
    again.load_state_dict(model.state_dict())
    again.save_pretrained(tmp_path / "built")
    for place in ("saved", "built"):
        assert not [name for name in load_file(tmp_path / place / "model.safetensors") if "language_model" in name]
        read = AutoModelForCausalLM.from_pretrained(tmp_path / place)
        assert read.config.model_type == MULTIMODAL[name].text
        assert torch.equal(logits(read), expected)


def run_step(config):
    with Report(config, "test") as report:
        return train(config, report).model


@pytest.mark.parametrize("name", TRAINED)
def test_a_step_is_trained_and_exported_alone_and_as_the_whole(tiny, made, tmp_path, name) -> None:
    folder, before = made(name)
    rows = [{"prompt": f"{number:02d}=", "answer": ".*[0-4].*"} for number in range(12)]  # half of all completions
    task = {"file": {"train": write_rows(tmp_path / "rows.jsonl", rows), "scorer": "regex"}, "held_out": 0}
    settings = {"model": {"path": str(folder)}, "run.folder": str(tmp_path / "run"), "rollout.engine": TRAINED[name]}
    after = logits(run_step(tiny({**settings, "task": task, "train.steps": 1})))
    assert not torch.equal(after, before)
    export(tmp_path / "run", tmp_path / "text", say=lambda text: None)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "text")), after)
    export(tmp_path / "run", tmp_path / "whole", say=lambda text: None, full=True)
    whole, info = AutoModelForImageTextToText.from_pretrained(tmp_path / "whole", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(logits(whole), after)
    old, new = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "whole"))
    assert old.keys() == new.keys()
    kept = {name for name in old if "language_model" not in name}
    assert kept
    assert all(torch.equal(old[name], new[name]) for name in kept)


@pytest.mark.parametrize("name", WHOLE)
def test_all_tensors_are_written_back(tiny, made, tmp_path, name) -> None:
    """Of families that cannot be trained yet, too: each of their tensors has its place in the whole."""
    from ebbtide.checkpoint.export_full import write_full

    folder, expected = made(name)
    model = load_model(tiny({"model": {"path": str(folder)}})).model
    for parameter in model.parameters():
        parameter.data.mul_(2)
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    write_full(model, folder, first)
    assert torch.equal(logits(AutoModelForImageTextToText.from_pretrained(first)), logits(model))
    assert not torch.equal(logits(model), expected)
    save_file({"model.language_model.norm.weight": torch.zeros(32)}, first / "model.safetensors")
    second.mkdir()
    with pytest.raises(UserError, match="export without `--full`"):
        write_full(model, first, second)


def test_adapters_are_merged_into_the_whole(tiny, made, tmp_path) -> None:
    folder, _ = made("mistral3")
    model = {"path": str(folder), "lora": {"rank": 2}}
    run_step(tiny({"model": model, "run.folder": str(tmp_path / "run"), "train.steps": 1}))
    said: list[str] = []
    with pytest.raises(UserError, match="`--merge --full`"):
        export(tmp_path / "run", tmp_path / "none", say=said.append, full=True)
    export(tmp_path / "run", tmp_path / "adapter", say=said.append)
    assert any("for the language part" in text for text in said)
    export(tmp_path / "run", tmp_path / "text", say=said.append, merge=True)
    export(tmp_path / "run", tmp_path / "whole", say=said.append, merge=True, full=True)
    text = AutoModelForCausalLM.from_pretrained(tmp_path / "text")
    assert torch.equal(logits(text), logits(AutoModelForImageTextToText.from_pretrained(tmp_path / "whole")))


def test_only_multimodal_models_are_written_in_full(tiny, tmp_path) -> None:
    run_step(tiny({"run.folder": str(tmp_path / "run"), "train.steps": 1}))
    with pytest.raises(UserError, match="leave out `--full`"):
        export(tmp_path / "run", tmp_path / "out", say=lambda text: None, full=True)


@pytest.mark.parametrize("name", MULTIMODAL)
def test_the_table_is_what_transformers_assumes(name) -> None:
    config, family = AutoConfig.for_model(name), MULTIMODAL[name]
    assert config.get_text_config().model_type == family.text
    assert config.tie_word_embeddings == family.tied
    assert config.get_text_config().tie_word_embeddings == family.text_tied


@pytest.mark.parametrize("tied", [True, False])
def test_the_files_say_whether_the_head_is_the_embedding(tiny, made, tmp_path, tied) -> None:
    """Where the two configs differ, as those of Mistral 3 do by default."""
    folder = tmp_path / "model"
    shutil.copytree(made("mistral3")[0], folder)
    whole = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    if not tied:
        tensors["language_model.lm_head.weight"] = torch.randn(64, 32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for outer, inner in ((True, False), (False, True)):
        whole["tie_word_embeddings"] = outer
        whole["text_config"]["tie_word_embeddings"] = inner
        (folder / "config.json").write_text(json.dumps(whole))
        config = tiny({"model": {"path": str(folder)}})
        assert model_config(config).tie_word_embeddings == tied
        model = load_model(config).model
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        shape = find_shape(config.model)
        assert shape.tied == tied
        assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("outer", [True, False])
def test_without_weights_the_outer_config_counts(tmp_path, outer) -> None:
    """As in a plan of a folder that has nothing but a config.json."""
    assert is_tied(outer, not outer, tmp_path) == outer


def test_a_plan_finds_the_nested_config(tiny, made) -> None:
    shape = find_shape(tiny({"model": {"path": str(made("gemma3")[0])}}).model)
    assert (shape.family, shape.layers, shape.hidden) == ("gemma3_text", 6, 32)
    with pytest.raises(UserError, match="`qwen3_5_text`, which cannot be planned"):
        find_shape(tiny({"model": {"path": str(made("qwen3_5")[0])}}).model)
    plain = {"model_type": "llama", "hidden_size": 8}
    assert text_config(plain, None) is plain


def test_gemma_3n_needs_no_package_for_images(tiny, tmp_path) -> None:
    """The whole model does (timm), and so its checkpoint is made of its language part here."""
    per_layer = {"laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 5}
    sizes = TEXT | PER_LAYER | per_layer | {"num_hidden_layers": 5, "sliding_window": 16}
    whole = AutoConfig.for_model("gemma3n", text_config=sizes)
    text = AutoModelForCausalLM.from_config(whole.get_text_config())
    whole.save_pretrained(tmp_path)
    tensors = {name.replace("model.", "model.language_model.", 1): one for name, one in text.state_dict().items()}
    tensors = {name: one.clone() for name, one in tensors.items() if name != "lm_head.weight"}
    tensors["model.vision_tower.weight"] = torch.zeros(1)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    scratch_tokenizer("0123456789=").save_pretrained(tmp_path)
    assert torch.equal(logits(load_model(tiny({"model": {"path": str(tmp_path)}})).model), logits(text))


def test_quantized_tensors_are_found_under_their_names_in_the_files(tiny, made, tmp_path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(made("gemma3")[0], folder)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("0.mlp.up_proj.weight"))
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="does not say how it is quantized"):
        load_model(tiny({"model": {"path": str(folder)}}))
