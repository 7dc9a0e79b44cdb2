"""Plans of families that no formula describes: what a trace counts is what formulas say of families that have both, and
what the parts of a run take."""

from inspect import unwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import state_families
from conftest import TINY, merged
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.config.planner_keys import with_changes
from ebbtide.errors import UserError
from ebbtide.model.delta_rule import ChosenDeltaRule
from ebbtide.model.shape import from_config
from ebbtide.model.traced_shape import TracedShape
from ebbtide.model.workload import max_workload
from ebbtide.planner import traced_kernels
from ebbtide.planner.offline import Hardware, plan_offline
from ebbtide.planner.predict import Predictor
from ebbtide.planner.shapes import plannable_shape
from ebbtide.planner.trace import pattern
from ebbtide.planner.traced_model import shape_of_model
from ebbtide.policy import activation_costs, traced_costs
from ebbtide.policy.activation_costs import ActivationPolicy, activation_names
from ebbtide.rollout.paged.engine import PagedEngine
from ebbtide.system.machine import machine_for
from families import OF, SHAPE, family_model

H200 = Hardware("h200", None, 500, None, None, 8)
SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32000,
}
SPARSE = {"num_experts": 16, "num_local_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 768}
PLANNED = (
    *("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "gpt_oss", "gemma2", "gemma3n_text", "gemma4_text"),
    *("llama4_text", "granitemoehybrid", "nemotron_h", "falcon_h1", "lfm2", "deepseek_v3", "olmo_hybrid"),
)


def meta(name: str, sizes: dict[str, Any]) -> Any:
    config = AutoConfig.for_model(name, **sizes)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def settings(folder: Path, **changes: Any) -> GrpoConfig:
    return GrpoConfig.model_validate(merged(TINY, {"model": {"path": str(folder)}, **changes}))


def written(folder: Path, name: str, **sizes: Any) -> Path:
    AutoConfig.for_model(name, **{**SHAPE, **OF[name], **sizes}).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "olmo2", "qwen3_moe"])
def test_a_trace_counts_what_the_formulas_say(tmp_path, name) -> None:
    sizes = {**SIZES, **(SPARSE if name == "qwen3_moe" else {})}
    model = meta(name, sizes)
    described = from_config(model.config.to_dict(), "it")
    traced = shape_of_model(model, settings(tmp_path), 512, 2)
    assert traced.parameters == described.parameters
    assert traced.block_shard(3) == described.block_shard(3)
    assert traced.root_shard(3) == described.root_shard(3)
    assert traced.kv_numbers_per_token == described.kv_numbers_per_token
    assert traced.forward.flops == pytest.approx(2 * traced.layers * described.matmul_parameters_per_token, rel=0.01)
    assert traced.train_flops([(100, 50)]) == pytest.approx(described.train_flops([(100, 50)]), rel=0.01)
    recompute = frozenset(activation_names(described)) - {"block_input"}
    for theirs, ours in ((frozenset(), frozenset()), (recompute, frozenset({"block"}))):
        wanted = activation_costs.activation_bytes(described, 2, ActivationPolicy(recompute=theirs), 1)
        found = traced_costs.activation_bytes(traced, 2, ActivationPolicy(recompute=ours), 1)
        for moment in ("norm_saved", "in_backward"):
            at_once = [one.blocks + getattr(one, moment) for one in (found, wanted)]
            # Of experts the formula has more at the peak of a backward, by up to 10% for narrow models whose blocks are
            # recomputed. No GPU has said which of the two is right; what blocks save is the same.
            off = 0.12 if described.experts and moment == "in_backward" else 0.05
            assert at_once[0] == pytest.approx(at_once[1], rel=off), moment


def test_of_a_pattern_only_the_first_blocks_run(tmp_path) -> None:
    """And the whole model has what all blocks would have had."""
    sizes = {**SHAPE, **OF["qwen3_5_text"]}
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    (short, long) = (
        shape_of_model(
            meta("qwen3_5_text", {**sizes, "num_hidden_layers": 4 * n, "layer_types": kinds * n}),
            settings(tmp_path),
            64,
            2,
        )
        for n in (2, 5)
    )
    assert long.layers == 20
    assert long.keep.saved[1:] == (*short.keep.saved[1:], *short.keep.saved[4:] * 3)
    assert long.keep.in_backward == short.keep.in_backward
    each = (long.forward.flops - short.forward.flops) / 3
    assert long.forward.flops == pytest.approx(short.forward.flops + 3 * each)
    assert len(long.attention) == 5
    assert pattern("AAB" * 3) == [0, 1, 2, 3, 4, 5, 4, 4, 5]
    assert pattern("ABCD") == [0, 1, 2, 3]


@pytest.mark.parametrize("name", PLANNED)
def test_every_family_has_a_plan(tmp_path, name) -> None:
    config = settings(written(tmp_path, name))
    result, shape, _ = plan_offline(config, H200)
    assert isinstance(shape, TracedShape)
    model = family_model(name).model
    assert shape.parameters == sum(one.numel() for one in model.parameters())
    assert result.fits
    phases = result.candidate.prediction.phases
    has_states = name in state_families.STATES
    assert ("sequence_states" in phases["generate"].device) == has_states
    train = phases["train"].device
    small = Predictor(shape, machine_for("h200", None, 500, None))
    recomputed = with_changes(config, {"memory.activations": {"preset": "recompute"}})
    less = small.predict(recomputed, max_workload(config), 10**11).phases["train"].device
    assert less["activations"] < train["activations"]


@pytest.mark.parametrize("name", ["qwen3_5_text", "nemotron_h", "falcon_h1", "gemma4_text"])
def test_states_and_cache_are_those_of_the_engine(tmp_path, name) -> None:
    shape = plannable_shape(settings(written(tmp_path, name), **{"model.dtype": "float32"}), "cpu")
    engine = PagedEngine(family_model(name), 4, block=16)
    sizes = engine.cache_tensor_bytes(3, 5)
    assert sum(sizes["kv_cache"]) == 3 * 16 * 4 * shape.kv_numbers_per_token
    assert sum(sizes.get("sequence_states", [])) == 6 * shape.state_bytes


def test_kept_states_are_part_of_every_phase(tmp_path) -> None:
    partial = {"rollout.partial": {"extra_prompts": 2, "kv_cache": "keep"}}
    config = settings(written(tmp_path, "qwen3_5_text"), **partial)
    result, shape, _ = plan_offline(config, H200)
    kept = (2 * (1 + config.rollout.group_size) + 1) * shape.state_bytes
    phases = result.candidate.prediction.phases
    assert phases["train"].device["sequence_states"] == kept
    running = config.rollout.group_size * (config.rollout.prompts_per_step + 2)
    prompts = config.rollout.prompts_per_step + 2
    assert phases["generate"].device["sequence_states"] == (running + prompts + 1) * shape.state_bytes


def test_what_a_trace_cannot_plan_is_refused_by_name(tmp_path) -> None:
    config = settings(written(tmp_path, "gemma2"), **{"memory.activations": {"recompute": ["attn_norm"]}})
    with pytest.raises(UserError, match="gemma2 knows only the presets keep, recompute and offload"):
        plan_offline(config, H200)
    config = settings(written(tmp_path / "b", "nemotron_h"), **{"memory.activations": {"recompute": ["attn_norm"]}})
    with pytest.raises(UserError, match=r"lists `attn_norm`, which .* does not have: choose from block_input, block"):
        plan_offline(config, H200)
    config = settings(written(tmp_path / "c", "nemotron_h"), **{"parallel": {"gpus": 2, "tensor": 2}})
    with pytest.raises(UserError, match=r"`parallel.tensor: 2` is not possible for nemotron_h"):
        plan_offline(config, H200)


def test_delta_rules_save_less_than_plain_torch(tmp_path, monkeypatch) -> None:
    """The rule that runs where no kernel is installed is traced as it is. Where one is, a stand-in has its memory, and
    the layer's own function is there afterwards."""
    sizes = {**SHAPE, **OF["qwen3_5_text"]}
    lean = shape_of_model(meta("qwen3_5_text", sizes), settings(tmp_path), 128, 2)
    module = __import__("transformers.models.qwen3_5.modeling_qwen3_5", fromlist=["_"])
    before = module.torch_chunk_gated_delta_rule
    assert isinstance(before, ChosenDeltaRule)
    with monkeypatch.context() as patch:
        patch.setattr(traced_kernels, "our_rule", unwrap(before._own))
        plain = shape_of_model(meta("qwen3_5_text", sizes), settings(tmp_path), 128, 2)
    monkeypatch.setattr(traced_kernels, "find_spec", lambda name: True)
    fused = shape_of_model(meta("qwen3_5_text", sizes), settings(tmp_path), 128, 2)
    assert module.torch_chunk_gated_delta_rule is before
    assert lean.state_bytes == fused.state_bytes == plain.state_bytes
    assert lean.keep.saved[1] < fused.keep.saved[1] < plain.keep.saved[1]
    assert lean.keep.saved[3] == plain.keep.saved[3]  # attention
    assert fused.keep.saved[3] == plain.keep.saved[3]  # attention


def test_a_plan_for_a_cpu_counts_no_kernels_of_a_gpu(tmp_path) -> None:
    sizes = {**SHAPE, **OF["qwen3_5_text"], "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    shapes = [
        shape_of_model(meta("qwen3_5_text", sizes), settings(tmp_path), 128, 2, device) for device in ("cuda", "cpu")
    ]
    on_gpu, on_cpu = (shape.keep for shape in shapes)
    assert on_gpu.saved[1] < on_cpu.saved[1]  # what the activation after the convolution gets
    assert on_gpu.in_backward < 0.7 * on_cpu.in_backward
