"""transformers' private parts behave as Ebbtide relies on: a test that fails here after an update of transformers names
the function of system/transformers_internals.py to adapt."""

import json
import logging
import re
from importlib import import_module
from inspect import signature, unwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import sdpa_mask

import ebbtide.model.load  # noqa: F401 (it sets transformers' verbosity, and filters its messages)
from ebbtide.model.load import decoder
from ebbtide.model.tokenizer import scratch_tokenizer
from ebbtide.system import transformers_internals
from ebbtide.system.transformers_internals import (
    attention_implementation,
    experts_implementation,
    forget_quantized_file,
    forget_renaming,
    full_mask,
    has_post_expert_norm,
    initialize,
    is_expert_parallel,
    is_gelu_tanh,
    is_silu,
    log_handlers,
    needs_own_code,
    template_variables,
    to_checkpoint_format,
)
from families import EXPERTS, SHAPE, WINDOW


def made(family: str, **changes: Any) -> Any:
    sparse = EXPERTS if family.endswith("moe") else {}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SHAPE, **sparse, **changes}))


def test_the_attention_of_a_model_is_in_its_config() -> None:
    model = made("qwen3")
    assert attention_implementation(model.config) == "sdpa"
    model.set_attn_implementation("eager")
    assert attention_implementation(model.config) == "eager"


def test_how_experts_are_computed_is_in_a_models_config() -> None:
    model = made("qwen3_moe")
    assert experts_implementation(model.config.get_text_config()) == "grouped_mm"
    model.set_experts_implementation("eager")
    assert experts_implementation(model.config.get_text_config()) == "eager"


def test_what_a_module_of_experts_has_besides_its_matrices() -> None:
    module = next(one for one in made("qwen3_moe").modules() if hasattr(one, "is_transposed"))
    assert not has_post_expert_norm(module)
    assert not is_expert_parallel(module)
    module.has_post_expert_norm = module._is_expert_parallel = True
    assert has_post_expert_norm(module)
    assert is_expert_parallel(module)


def test_a_full_mask_is_there_also_where_attention_could_do_without() -> None:
    assert sdpa_mask(1, 4, 4) is None  # otherwise `full_mask` is needed no more
    place = torch.arange(4)
    assert torch.equal(full_mask(batch_size=1, q_length=4, kv_length=4)[0, 0], place[:, None] >= place)


@pytest.mark.parametrize("window", [None, WINDOW])
def test_a_registered_mask_function_gets_the_arguments_of_sdpa_mask(window) -> None:
    wanted: list[dict[str, Any]] = []
    masks: list[Any] = []

    def attention(module: nn.Module, query: Any, key: Any, value: Any, mask: Any, **_: Any) -> tuple[Any, None]:
        masks.append(mask)
        return query.transpose(1, 2), None

    def mask(**arguments: Any) -> torch.Tensor:
        wanted.append(arguments)
        return full_mask(**arguments)

    AttentionInterface.register("test_internals", attention)
    AttentionMaskInterface.register("test_internals", mask)
    model = made("mistral", sliding_window=window)
    model.set_attn_implementation("test_internals")
    model(torch.arange(3, 11)[None])
    assert {one.get("local_size") for one in wanted} == {window}
    place = torch.arange(8)
    seen = (place[:, None] >= place) & (place[:, None] - place < (window or 8))
    assert len(masks) == SHAPE["num_hidden_layers"]
    assert all(torch.equal(one[0, 0], seen) for one in masks)


def test_silu_is_known_by_its_class() -> None:
    assert is_silu(decoder(made("qwen3")).layers[0].mlp.act_fn)
    assert is_silu(nn.SiLU())
    assert not is_silu(decoder(made("qwen3", hidden_act="gelu")).layers[0].mlp.act_fn)


def test_gelu_by_tanh_is_known_by_its_class_and_its_function() -> None:
    activation = decoder(made("gemma")).layers[0].mlp.act_fn
    assert is_gelu_tanh(activation)
    x = torch.linspace(-4, 4, 50)
    assert torch.equal(activation(x), nn.functional.gelu(x, approximate="tanh"))
    for other in ("gelu", "gelu_new", "silu", "gelu_python"):
        assert not is_gelu_tanh(decoder(made("qwen3", hidden_act=other)).layers[0].mlp.act_fn)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_tensors_get_the_names_and_shapes_of_files(family, tmp_path) -> None:
    model = made(family, tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    found = to_checkpoint_format(model, model.state_dict())
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], saved[name]) for name in saved)
    # One layer at a time gives the same.
    parts = {}
    for part in ("model.layers.0.", "model.layers.1."):
        some = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(part)}
        parts |= to_checkpoint_format(model, some)
    assert parts.keys() == {name for name in saved if name.startswith("model.layers.")}


def test_messages_of_transformers_pass_through_a_handler_of_its_own() -> None:
    own = [handler for handler in log_handlers() if type(handler) is logging.StreamHandler]  # pytest adds others
    assert own
    for handler in own:
        record = logging.LogRecord("transformers", logging.ERROR, "", 0, "a name: %s", ("\x1b[31m",), None)
        assert handler.filter(record)
        assert record.getMessage() == "a name: \\x1b[31m"


def test_a_model_that_needs_its_own_code_is_known_by_its_error(tmp_path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "foreign", "auto_map": {"AutoConfig": "code.Config"}})
    )
    (tmp_path / "code.py").write_text("")
    with pytest.raises(ValueError) as error:  # noqa: PT011 (its message is what is tested)
        AutoConfig.from_pretrained(tmp_path, trust_remote_code=False)
    assert needs_own_code(error.value)
    with pytest.raises(OSError) as error:  # noqa: PT011
        AutoConfig.from_pretrained(tmp_path / "missing", trust_remote_code=False)
    assert not needs_own_code(error.value)


def test_a_model_from_a_quantized_file_can_be_saved(tmp_path) -> None:
    model = made("qwen3")
    model.hf_quantizer = SimpleNamespace(quantization_config=SimpleNamespace(quant_method="gguf"))
    model.config.quantization_config = {"quant_method": "gguf"}
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path / "refused")
    forget_quantized_file(model)
    model.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())


def test_a_module_is_initialized_alone() -> None:
    model = made("qwen3")
    layer, before = model.model.layers[0].mlp, model.model.layers[1].mlp.up_proj.weight.clone()
    with torch.no_grad():
        layer.up_proj.weight.zero_()
    initialize(model, layer.up_proj)
    assert float(layer.up_proj.weight.detach().std()) > 0
    assert torch.equal(model.model.layers[1].mlp.up_proj.weight, before)


def test_a_model_is_saved_under_its_own_names(tmp_path) -> None:
    model = made("qwen3")
    names = {name for name in model.state_dict() if name != "lm_head.weight" or not model.config.tie_word_embeddings}
    save_file({f"outer.{name}": model.state_dict()[name].clone() for name in names}, tmp_path / "model.safetensors")
    model.config.save_pretrained(tmp_path)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, key_mapping={r"^outer\.": ""})
    read.save_pretrained(tmp_path / "reverted")
    assert all(name.startswith("outer.") for name in load_file(tmp_path / "reverted" / "model.safetensors"))
    forget_renaming(read)
    read.save_pretrained(tmp_path / "own")
    assert load_file(tmp_path / "own" / "model.safetensors").keys() == names


def test_the_variables_of_a_template_are_known() -> None:
    """With the statements that transformers adds to templates, and without what it defines for them."""
    tokenizer = scratch_tokenizer(None)
    for template, variables in (
        ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}", {"messages"}),
        ("{% if not day is defined %}{% set day = strftime_now('%d') %}{% endif %}{{ day }}", {"day"}),
        ("{% set ns = namespace(a=1) %}{% for i in range(3) %}{% break %}{% endfor %}{{ raise_exception('') }}", set()),
        ("{% if %}", None),
    ):
        tokenizer.chat_template = template
        assert template_variables(tokenizer) == variables


PRIVATE = re.compile(
    r"\._(attn|experts)_implementation|\btransformers(\.\w+)*\._[a-z]|getLogger\(.transformers.\)|"
    r"from transformers\.(?!utils import logging\b)"
)


DELTA_INPUTS = {"query", "key", "value", "g", "beta", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel"}
STATE_FUNCTIONS = {
    transformers_internals.DELTA_RULE: DELTA_INPUTS,
    transformers_internals.DELTA_STEP: DELTA_INPUTS,
    transformers_internals.CONVOLUTION: {"hidden_states", "weight", "bias", "activation"},
    transformers_internals.CONV_STEP: {"hidden_states", "conv_state", "weight", "bias", "activation"},
}


@pytest.mark.parametrize("name", STATE_FUNCTIONS)
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen3_next", "olmo_hybrid"])
def test_the_functions_of_a_gated_delta_net_are_known(family, name) -> None:
    code = import_module(f"transformers.models.{family}.modeling_{family}")
    (layer,) = (one for name, one in vars(code).items() if name.endswith("GatedDeltaNet"))
    found = transformers_internals.state_function(layer.__new__(layer), name)
    assert found is not None
    assert STATE_FUNCTIONS[name] <= set(signature(unwrap(found)).parameters)


def test_no_other_file_uses_private_parts_of_transformers() -> None:
    source = Path(transformers_internals.__file__).parents[1]
    files = {str(path.relative_to(source)): path.read_text() for path in source.rglob("*.py")}
    assert [name for name, text in files.items() if PRIVATE.search(text)] == ["system/transformers_internals.py"]
