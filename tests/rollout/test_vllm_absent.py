"""What the vLLM engine does without vLLM: its error, its part of the config, and the weights it would hand over."""

import sys
from types import ModuleType

import pytest
from pydantic import ValidationError
from safetensors.torch import load_file

from conftest import family
from ebbtide.config.rollout import VllmConfig
from ebbtide.errors import UserError
from ebbtide.model.load import load_model
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


def test_vllm_runs_no_code_of_a_model_either(tiny, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    config = tiny({"rollout.engine": "vllm", "rollout.vllm": {"args": {"trust_remote_code": True}}})
    with pytest.raises(UserError, match=r"`rollout.vllm.args` names trust_remote_code, which Ebbtide sets itself"):
        build_engine(load_model(config), config, lambda size: None)
