"""What the vLLM engine does without vLLM: its error, its part of the config, and the weights it would hand over."""

import json
import sys
from types import ModuleType

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from vllm_stand_in import StandIn

from conftest import family
from ebbtide.algorithms.loop import train
from ebbtide.checkpoint.initial_model import load_initial
from ebbtide.config.rollout import VllmConfig
from ebbtide.errors import UserError
from ebbtide.model.load import load_model
from ebbtide.model.lora import adapted_layers, merge_adapters
from ebbtide.report.report import Report
from ebbtide.rollout.build import build_engine
from ebbtide.rollout.vllm_engine import checkpoint_weights


def test_without_vllm_the_error_names_the_extra(tiny, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    config = tiny({"rollout.engine": "vllm"})
    with pytest.raises(UserError, match=r"`rollout.engine: vllm`.*pip install 'ebbtide\[vllm\]'"):
        build_engine(load_model(config), config, lambda size: None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rollout.vllm": {}}, "`rollout.engine: paged` does not use it"),
        ({"rollout.engine": "vllm", "rollout.vllm.sleep_level": 3}, "rollout.vllm.sleep_level"),
        ({"rollout.engine": "vllm", "rollout.vllm.memory_share": 1.5}, "rollout.vllm.memory_share"),
        ({"rollout.engine": "vllm", "rollout.vllm.bucket_mib": 0}, "rollout.vllm.bucket_mib"),
        ({"rollout.engine": "vllm", "rollout.temperature": 0.8, "rollout.top_p": 0.9}, "`rollout.top_p`"),
        (
            {"rollout.engine": "vllm", "evaluate": {"problems": 4, "temperature": 0.6}, "rollout.min_p": 0.1},
            "`evaluate.temperature`",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(tiny, changes, said) -> None:
    with pytest.raises(ValidationError, match=said):
        tiny(changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rollout.vllm": VllmConfig(sleep_level=1).model_dump()},
        {"rollout.temperature": 0.8, "evaluate": {"problems": 4, "temperature": 0.6}},
        {"rollout.top_p": 0.9, "rollout.top_k": 4, "rollout.min_p": 0.1, "evaluate": {"problems": 4}},
    ],
)
def test_settings_that_can_be(tiny, changes) -> None:
    assert tiny({"rollout.engine": "vllm", **changes}).rollout.engine == "vllm"


@pytest.mark.parametrize("bucket", [1, 20_000, 1 << 30])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_weights_are_those_of_a_checkpoints_files(tiny, tmp_path, name, bucket) -> None:
    model = load_model(tiny(family(name))).model
    model.save_pretrained(tmp_path)
    wanted = load_file(tmp_path / "model.safetensors")
    found = list(checkpoint_weights(model, bucket))
    assert len(found) == len(dict(found))
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()  # a file holds it once
    assert set(dict(found)) == set(wanted) | tied
    assert all(tensor.equal(dict(found)[key]) for key, tensor in wanted.items())


def test_weights_in_the_policys_own_shape_are_not_copied(tiny) -> None:
    model = load_model(tiny()).model
    own = {parameter.data_ptr() for parameter in model.parameters()}
    assert {tensor.data_ptr() for _, tensor in checkpoint_weights(model, 1)} == own


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_with_adapters_are_those_of_the_merged_model(tiny, dtype) -> None:
    """Added in float32 and rounded once, and nothing of the policy changes."""
    config = tiny({"model.lora": {"rank": 3, "exclude": ["k_proj"]}, "model.dtype": dtype})
    model = with_adapters(config)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = dict(checkpoint_weights(model, 1))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    one = adapted_layers(model)["model.layers.1.mlp.down_proj"]
    exact = one.weight.float() + 32 / 3 * (one.lora_B.float() @ one.lora_A.float())
    torch.testing.assert_close(found["model.layers.1.mlp.down_proj.weight"], exact.to(one.weight.dtype))
    keys = "model.layers.1.self_attn.k_proj.weight"
    assert found[keys].data_ptr() == model.get_parameter(keys).data_ptr()
    merge_adapters(model)
    wanted = model.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())
    assert not torch.equal(found["model.layers.1.mlp.down_proj.weight"], before["model.layers.1.mlp.down_proj.weight"])


def with_adapters(config):
    model = load_initial(config, torch.device("cpu")).model
    torch.manual_seed(0)
    for layer in adapted_layers(model).values():
        layer.lora_B.data.normal_(std=0.1)
    return model


def test_a_run_with_adapters_samples_from_merged_weights(tiny, tmp_path, monkeypatch) -> None:
    vllm = StandIn()
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    config = tiny(
        {
            "rollout.engine": "vllm",
            "model.lora": {"rank": 3},
            "optimizer.lr": 1e-2,
            "train.steps": 3,
            "checkpoint": None,
            "run.folder": str(tmp_path),
            "loss.kl": {"coefficient": 0.1},
        }
    )
    with Report(config, "test") as report:
        model = train(config, report).model
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["step"] > 0]
    assert len(steps) == vllm.engines[0].loaded == 3
    assert max(step["mismatch_max"] for step in steps) < 1e-4
    assert steps[0]["kl"] == 0 < steps[2]["kl"]
    base = load_model(config).model.state_dict()
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in base.items())
    assert all(float(layer.lora_B.detach().abs().max()) > 0 for layer in adapted_layers(model).values())


def test_vllm_runs_no_code_of_a_model_either(tiny, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    config = tiny({"rollout.engine": "vllm", "rollout.vllm": {"args": {"trust_remote_code": True}}})
    with pytest.raises(UserError, match=r"`rollout.vllm.args` names trust_remote_code, which Ebbtide sets itself"):
        build_engine(load_model(config), config, lambda size: None)
