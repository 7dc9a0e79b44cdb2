"""Each entry of model/families.py against the model that transformers builds, and an invented family that is known by
its entry alone."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import conftest
from blocks import DENSE, SPARSE
from conftest import TINY, merged
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.config.loss import LossConfig
from ebbtide.config.model import ModelConfig, ScratchConfig
from ebbtide.errors import UserError
from ebbtide.memory.activations import ActivationOffloader
from ebbtide.memory.mover import Mover
from ebbtide.model import families
from ebbtide.model.families import FAMILIES, USUAL, Family, family_of, part_of
from ebbtide.model.load import blocks_of, decoder, layers_of
from ebbtide.model.shape import Shape, find_shape, from_config
from ebbtide.parallel import tensor_parallel
from ebbtide.planner.offline import Hardware, plan_offline
from ebbtide.policy import activation_costs, block_activations
from ebbtide.policy.activation_plan import PlacedBlocks, measure_saved_bytes
from ebbtide.policy.activations import ActivationHooks
from ebbtide.policy.block_activations import ActivationChoice
from ebbtide.policy.datum import trajectory
from ebbtide.policy.losses import build_loss
from ebbtide.policy.policy import Policy
from ebbtide.progress import no_progress
from ebbtide.rollout.engine import Request, SamplingParams
from ebbtide.rollout.paged.fused_model import FusedModel, can_fuse
from ebbtide.rollout.paged.verify import build_verified_engine
from families import EXPERTS, SHAPE, own_logprobs
from plain_kernels import PlainPass
from tidal import TIDAL, TidalConfig, tidal_model


def made(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A tiny model of a family, with weights that are all different; Mistral's has no window unless it is asked for."""
    own = EXPERTS if FAMILIES[name].sparse else {}
    window = {"sliding_window": None} if name == "mistral" else {}
    config = AutoConfig.for_model(name, **{**SHAPE, **own, **window, **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def block_of(model: PreTrainedModel) -> Any:
    layers = layers_of(model)
    assert layers is not None
    return layers[0]


def tensor_plan(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The modules that tensor parallelism shards, and how."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(tensor_parallel, "parallelize_module", lambda module, mesh, plan: found.update(plan))
    tensor_parallel.parallelize(model, SimpleNamespace(size=lambda: 2))  # type: ignore[arg-type]
    styles = {kind: style for style, kind in tensor_parallel.STYLES.items()}
    return {path: styles[type(style)] for path, style in found.items()}


def fused_difference(model: PreTrainedModel) -> float:
    """How far the fused blocks, with a plain cache, are from the model's own forward."""
    metadata = PlainPass()
    tokens = torch.arange(9) * 7 % SHAPE["vocab_size"]
    with torch.no_grad():
        found = FusedModel(model)(tokens, torch.arange(9), metadata)  # type: ignore[arg-type]
        return (found - decoder(model)(input_ids=tokens[None]).last_hidden_state[0]).abs().max().item()


# Entries against transformers


@pytest.mark.parametrize("name", FAMILIES)
def test_the_modules_have_these_names(name: str) -> None:
    family, model = FAMILIES[name], made(name)
    inner, block = decoder(model), block_of(model)
    assert family_of(model) is family_of(block) is family
    for path in (family.embedding, family.rotary, family.layers, family.last_norm):
        assert isinstance(part_of(inner, path), nn.Module), path
    dense, experts = (*family.mlp_matrices, family.activation), (family.router, family.experts)
    always = (*family.attention_matrices, *family.stream_norms, family.attention, family.mlp)
    for path in (*always, *(experts if family.sparse else dense)):
        assert isinstance(part_of(block, path), nn.Module), path
    for path in dense if family.sparse else experts:
        assert part_of(block, path) is None, path
    for path in (family.query_norm, family.key_norm):
        assert (part_of(block, path) is not None) == family.qk_norm
    norms = [part_of(inner, family.last_norm), *block_activations.norms_of(block).values()]
    assert len(norms) == 1 + 2 * bool(family.attn_norm) + 2 * family.qk_norm
    assert all(0 < getattr(norm, family.norm_epsilon) < 1e-3 for norm in norms)
    shape = from_config(model.config.to_dict(), "it")
    biases = [part_of(block, path).bias is not None for path in family.attention_matrices]
    assert biases == [shape.qkv_bias] * 3 + [shape.out_bias]


@pytest.mark.parametrize("name", FAMILIES)
def test_norms_compute_what_the_entry_says(name: str) -> None:
    family, model = FAMILIES[name], made(name, torch.bfloat16)
    norm = part_of(block_of(model), family.stream_norms[0])
    x = torch.randn(50, len(norm.weight)).bfloat16()
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + getattr(norm, family.norm_epsilon))
    rounded = (norm.weight + family.norm_offset) * wide.bfloat16()
    unrounded = ((norm.weight.float() + family.norm_offset) * wide).bfloat16()
    assert not torch.equal(rounded, unrounded)
    assert torch.equal(norm(x), unrounded if family.norm_in_float32 else rounded)


@pytest.mark.parametrize("name", FAMILIES)
def test_embeddings_are_scaled_as_the_entry_says(name: str) -> None:
    family, model, seen = FAMILIES[name], made(name), []
    scale = getattr(model.config, family.embedding_scale) if family.embedding_scale else 1.0
    block_of(model).register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    tokens = torch.arange(5)[None]
    model(tokens)
    assert torch.equal(seen[0], part_of(decoder(model), family.embedding)(tokens) * scale)


@pytest.mark.parametrize("name", FAMILIES)
def test_fused_decoding_takes_it(name: str) -> None:
    model = made(name)
    assert can_fuse(model)
    assert fused_difference(model) < 1e-5


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"mlp_bias": True}),
    ],
)
def test_fused_decoding_refuses_models_of_other_parts(name: str, changes: dict[str, Any]) -> None:
    assert not can_fuse(made(name, **changes))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3_moe", {"mlp_only_layers": [1], "attention_bias": True}),
        ("mistral", {"sliding_window": 5}),
        ("gemma", {"hidden_act": "silu"}),
        ("gemma3_text", {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]}),
        ("smollm3", {"no_rope_layers": [1, 0]}),
        ("granite", {"residual_multiplier": 0.22, "attention_multiplier": 0.3, "embedding_multiplier": 3.0}),
        ("ministral", {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]}),
        ("olmo3", {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]}),
        ("exaone4", {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]}),
        ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
        ("phi3", {"sliding_window": 5}),
        ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}}),
        ("glm4", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}}),
    ],
)
def test_fused_decoding_takes_what_families_allow(name: str, changes: dict[str, Any]) -> None:
    model = made(name, **changes)
    assert can_fuse(model)
    assert fused_difference(model) < 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_the_shape_has_the_models_parameters(name: str) -> None:
    biased = {"attention_bias": True} if "attention_bias" in AutoConfig.for_model(name).to_dict() else {}
    for changes in ({}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False, **biased}):
        model = made(name, **changes)
        shape = from_config(model.config.to_dict(), "it")
        assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
        assert shape.tensor_count == len(list(model.parameters()))


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {"ministral"}))  # transformers has no default for its window
def test_a_config_that_leaves_keys_out_is_read_as_transformers_does(name: str) -> None:
    sizes = {key: SHAPE[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    given = {**sizes, "num_attention_heads": 32, "pad_token_id": None}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **given))
    assert from_config({"model_type": name, **given}, "it").parameters == sum(one.numel() for one in model.parameters())


@pytest.mark.parametrize("name", FAMILIES)
def test_activations_have_the_names_of_the_shape(name: str) -> None:
    model = made(name, torch.bfloat16)
    block, shape = blocks_of(model)[0], from_config(model.config.to_dict(), "it")
    names = block_activations.activation_names(block)
    absent = set() if FAMILIES[name].attn_norm else {"attn_norm", "mlp_norm"}
    assert names == [one for one in (SPARSE if FAMILIES[name].sparse else DENSE) if one not in absent]
    assert sorted(names) == sorted(activation_costs.activation_names(shape))
    assert block_activations.locally_recomputable(block) == activation_costs.locally_recomputable(shape)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_tensor_plan_is_the_one_that_transformers_declares(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(name)
    if not FAMILIES[name].tensor_plan:
        with pytest.raises(UserError, match=r"`parallel\.tensor: 2`"):
            from_config(model.config.to_dict(), "it").tensor_parallel_shape(2)
        with pytest.raises(UserError, match="declares modules sharded as"):
            tensor_plan(model, monkeypatch)
    else:
        assert tensor_plan(model, monkeypatch) == FAMILIES[name].tensor_plan == model.config.base_model_tp_plan


# Other lists of families


def test_models_from_nothing_are_of_these_families() -> None:
    """config/ cannot import model/, so it has the names once more."""
    names = get_args(ScratchConfig.model_fields["architecture"].annotation)
    assert set(names) == set(conftest.FAMILIES) <= set(FAMILIES)
    for name in names:
        experts = {"experts": 4, "experts_per_token": 2}
        right, wrong = (experts, {}) if FAMILIES[name].sparse else ({}, experts)
        ScratchConfig(architecture=name, **right)
        with pytest.raises(ValidationError, match="experts"):
            ScratchConfig(architecture=name, **wrong)


def test_descriptions_need_neither_torch_nor_transformers() -> None:
    code = "import sys, ebbtide.model.families; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# Families without an entry


def test_a_family_without_an_entry_is_taken_for_a_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("helium", **SHAPE)).eval()
    assert "helium" not in FAMILIES
    assert family_of(model) is family_of(block_of(model)) is USUAL
    assert block_activations.activation_names(blocks_of(model)[0]) == DENSE
    assert tensor_plan(model, monkeypatch) == model.config.base_model_tp_plan
    assert not can_fuse(model)
    with pytest.raises(
        UserError, match="family `helium`, which cannot be planned: choose one of llama, mistral, qwen2"
    ):
        from_config(model.config.to_dict(), "it")
    model.config.base_model_tp_plan = None
    with pytest.raises(UserError, match="declares no `base_model_tp_plan`"):
        tensor_plan(model, monkeypatch)


# An invented family


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch) -> Family:
    monkeypatch.setitem(families.FAMILIES, "tidal", TIDAL)
    return TIDAL


def test_without_its_entry_an_invented_family_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tidal_model().model
    assert not can_fuse(model)
    with pytest.raises(UserError, match="family `tidal`, which cannot be planned"):
        from_config(model.config.to_dict(), "it")
    with pytest.raises(UserError, match="has no list of blocks where other families have one"):
        blocks_of(model)
    with pytest.raises(UserError, match="declares no `base_model_tp_plan`"):
        tensor_plan(model, monkeypatch)


def test_an_invented_family_has_a_plan(entry: Family, tmp_path: Any) -> None:
    model = tidal_model().model
    sizes = {"n_layer": 28, "d_model": 2048, "n_head": 16, "n_group": 8, "d_head": 128, "d_ff": 6144}
    TidalConfig(**sizes, vocab_size=151936, max_position_embeddings=4096).save_pretrained(tmp_path)
    assert from_config(model.config.to_dict(), "it").parameters == sum(one.numel() for one in model.parameters())
    config = GrpoConfig.model_validate(
        {**{key: TINY[key] for key in ("task", "rollout")}, "model": {"path": str(tmp_path)}}
    )
    result, shape, _ = plan_offline(config, Hardware("h200", None, None, None, None, 8))
    usual = Shape("tidal", 28, 2048, 16, 8, 128, 6144, 151936, tied=True, qkv_bias=True, context=4096)
    assert shape == usual
    assert result.fits
    for lacks in ("n_layer", "d_ff"):
        found = json.loads((tmp_path / "config.json").read_text())
        del found[lacks]
        with pytest.raises(UserError, match=f"the key `{lacks}` is missing"):
            from_config(found, "it")


def test_an_invented_family_has_activations(entry: Family) -> None:
    """Gradients are the same whatever is offloaded or recomputed, and what is saved is what was predicted."""
    loaded = tidal_model(torch.bfloat16, n_layer=4)
    config = GrpoConfig.model_validate(merged(TINY, {"model.dtype": "bfloat16"}))
    policy, blocks = Policy(loaded, config), blocks_of(loaded.model)
    shape = from_config(loaded.model.config.to_dict(), "it")
    names, local = block_activations.activation_names(blocks[0]), block_activations.locally_recomputable(blocks[0])
    assert names == DENSE
    assert local == activation_costs.locally_recomputable(shape) == {"attn_norm", "qkv_linear", "mlp_norm", "mlp_fc2"}
    for recompute in (frozenset(), local):
        saved = measure_saved_bytes(
            PlacedBlocks(blocks), ActivationChoice(recompute=recompute, local=local), policy._probe
        )
        predicted = activation_costs.saved_bytes(shape, 2, activation_costs.ActivationPolicy(recompute=recompute))
        for name in set(names) - {"core_attn", "attn_proj"}:  # a CPU has other kernels for these
            roots = 4 * (shape.heads + shape.kv_heads) + 1
            assert predicted.get(name, 0) == pytest.approx(saved.get(name, 0), abs=roots), (name, recompute)
    sequences = [trajectory([1, 2, 3], [4, 5, 6, 7], [-2.0] * 4, (-1.0) ** i, 0.01) for i in range(4)]

    def grads() -> dict[str, torch.Tensor]:
        policy.forward_backward(sequences, build_loss(LossConfig()), no_progress)
        found = {name: weight.grad.clone() for name, weight in loaded.model.named_parameters()}
        loaded.model.zero_grad()
        return found

    kept = grads()
    offload, memory = frozenset(names) - local, torch.zeros(2**22, dtype=torch.uint8)
    for choice in (
        ActivationChoice(recompute=local, local=local),
        ActivationChoice(offload, local, local),
        ActivationChoice(recompute=frozenset(names) - {"block_input", "core_attn"}, local=local),
    ):
        offloader = ActivationOffloader(memory, Mover(torch.device("cpu")))
        policy._activations = ActivationHooks(blocks, choice, offloader, minimum=1)
        assert all(torch.equal(kept[name], grad) for name, grad in grads().items())


def test_an_invented_family_is_sharded(entry: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tensor_plan(tidal_model().model, monkeypatch) == {
        "h.*.attn.wq": "colwise",
        "h.*.attn.wk": "colwise",
        "h.*.attn.wv": "colwise",
        "h.*.attn.wo": "rowwise",
        "h.*.attn.ln_q": "replicated_with_grad_allreduce",
        "h.*.attn.ln_k": "replicated_with_grad_allreduce",
        "h.*.ffn.w1": "colwise",
        "h.*.ffn.w3": "colwise",
        "h.*.ffn.w2": "rowwise",
    }
    with pytest.raises(UserError, match="num_attention_heads = 5, which is not a multiple"):
        tensor_plan(tidal_model(n_head=5, n_group=5).model, monkeypatch)


def test_an_invented_family_is_decoded_with_fused_blocks(entry: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tidal_model().model
    assert can_fuse(model)
    assert fused_difference(model) < 1e-5
    for differs in ({"attn_norm": "ln_0"}, {"rotary": "rope"}):
        monkeypatch.setitem(families.FAMILIES, "tidal", replace(entry, **differs))
        assert not can_fuse(model)


def test_an_invented_family_is_checked_and_sampled() -> None:
    """The checks before a run need no entry."""
    loaded = tidal_model()
    engine = build_verified_engine(loaded, 4, longest=(8, 24))
    (completion,) = engine.generate([Request([3, 4, 5], [0])], SamplingParams(7, ignore_eos=True), lambda *_: None)[0]
    wanted = own_logprobs(loaded, [3, 4, 5], completion.tokens)
    torch.testing.assert_close(torch.tensor(completion.logprobs), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_copy_under_another_name_has_the_same_plan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other, found = f"renamed_{name}", made(name).config.to_dict()
    monkeypatch.setitem(families.FAMILIES, other, FAMILIES[name])
    shape, renamed = from_config(found, "it"), from_config({**found, "model_type": other}, "it")
    assert asdict(renamed) == {**asdict(shape), "family": other}
    assert renamed.parameters == shape.parameters
    assert activation_costs.saved_bytes(renamed, 2) == activation_costs.saved_bytes(shape, 2)
    assert activation_costs.locally_recomputable(renamed) == activation_costs.locally_recomputable(shape)


def test_an_invented_family_has_a_name_of_its_own_in_gguf_files(entry: Family, tmp_path: Any) -> None:
    from tiny_gguf import written

    file = written(tmp_path / "model.gguf", "tide", tied=True)
    assert find_shape(ModelConfig(path=str(file))).family == "tidal"
