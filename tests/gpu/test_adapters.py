"""Adapters on the GPU: in fused blocks, in decode, within a plan."""

from __future__ import annotations

import json

import pytest
import torch

from blocks import Setup
from conftest import TINY, merged
from ebbtide.algorithms.loop import train
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.model.load import load_model
from ebbtide.model.lora import adapted_layers, add_adapters
from ebbtide.policy.fuse import own_forwards, saved_names
from ebbtide.report.report import Report
from ebbtide.system.gpu import HOPPER, generation

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
SIZES = {"rollout.max_new_tokens": 80, "rollout.max_prompt_tokens": 60}
WIDE = {"model.scratch.hidden": 256, "model.scratch.mlp": 512, "model.scratch.context": 256, "model.scratch.layers": 4}


def adapted(dtype: str) -> Setup:
    changes = {**WIDE, **SIZES, "model.dtype": dtype, "device": "cuda", "train.microbatch_tokens": 1024}
    config = GrpoConfig.model_validate(merged(TINY, {**changes, "model.lora": {"rank": 16}}))
    loaded = load_model(config)
    assert config.model.lora is not None
    add_adapters(loaded.model, config.model.lora, 0)
    for layer in adapted_layers(loaded.model).values():
        layer.lora_B.data.normal_(std=0.05)
    return Setup("qwen3", dtype, "cuda", size=8, fused=True, given=loaded, **SIZES)


def test_gradients_are_close_to_those_of_the_models_own_blocks() -> None:
    setup = adapted("bfloat16")
    fused = setup.grads()
    with own_forwards(setup.model):
        own = setup.grads()
    assert fused.keys() == own.keys()
    for name, grad in own.items():
        assert float((fused[name] - grad).float().norm()) <= 0.06 * float(grad.float().norm()), name


def test_the_same_bits_whatever_is_kept() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        setup = adapted("bfloat16")
        names = [name for name in saved_names(setup.blocks[0]) if name != "block_input"]
        setup.with_choice(recompute=names, room=2**26)
        setup.with_choice(offload=names, room=2**26)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("place", ["device", "streamed", "cpu"])
def test_a_run_samples_with_its_adapters_within_its_plan(tmp_path, capsys, place: str) -> None:
    changes = {
        **WIDE,
        "device": "cuda",
        "model.dtype": "bfloat16",
        "model.lora": {"rank": 16},
        "optimizer": {"lr": 1e-2, "place": place},
        "train.steps": 5,
        "run.folder": str(tmp_path / "run"),
        "loss.kl": {"coefficient": 0.01},
        "memory.budget_gib": 2,
    }
    config = GrpoConfig.model_validate(merged(TINY, changes))
    with Report(config, "test") as report:
        model = train(config, report).model
    assert all(float(layer.lora_B.detach().abs().max()) > 0 for layer in adapted_layers(model).values())
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    exact = generation(torch.device("cuda")) == HOPPER
    assert all(line["mismatch_max"] == 0 if exact else line["mismatch"] < 0.05 for line in lines if "mismatch" in line)
    assert "fused" not in capsys.readouterr().out  # no note that blocks are not
