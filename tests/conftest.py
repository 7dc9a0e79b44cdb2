"""Small things that many tests stand on."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for the network

import copy
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.system.torch_internals import allow_deterministic_matmuls

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # these tests may run in the background, where Ctrl-C is ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def deterministic_matmuls() -> None:
    """Some tests on a GPU compute in torch's deterministic mode, for which the first matmul must be prepared."""
    if torch.cuda.is_available():
        allow_deterministic_matmuls(torch.device("cuda", torch.cuda.current_device()))


TINY: dict[str, Any] = {
    "device": "cpu",
    "model": {
        "scratch": {"hidden": 32, "heads": 4, "kv_heads": 2, "mlp": 48, "context": 64, "alphabet": "0123456789="}
    },
    "task": {
        "builtin": {"name": "copy", "options": {"digits": 3}},
        "size": 40,
        "held_out": 8,
        "scoring": {"workers": 1},
    },
    "rollout": {"prompts_per_step": 4, "group_size": 4, "max_prompt_tokens": 8, "max_new_tokens": 6},
    "train": {"steps": 2, "microbatch_tokens": 64, "head_chunk_tokens": 5},
    "optimizer": {"lr": 1e-3},
}


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with dotted keys set: {"train.steps": 3}."""
    tree = copy.deepcopy(base)
    for dotted, value in changes.items():
        *above, last = dotted.split(".")
        place = tree
        for key in above:
            if not isinstance(place.get(key), dict):
                place[key] = {}
            place = place[key]
        place[last] = copy.deepcopy(value)  # a later key may change it
    return tree


@pytest.fixture
def tiny():
    """tiny({"train.steps": 3}): the config of a run that takes a second."""

    def make(changes: dict[str, Any] | None = None) -> GrpoConfig:
        return GrpoConfig.model_validate(merged(TINY, changes or {}))

    return make


@pytest.fixture
def two(tmp_path) -> Path:
    """A folder with two checkpoints of a few small tensors."""
    from killed import Numbers, saver

    made = saver(tmp_path / "c", Numbers(), async_save=False)
    for step in (1, 2):
        made.save(step, {"reward": -float(step)})
    return tmp_path / "c"


FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "qwen3_moe")


def family(name: str) -> dict[str, Any]:
    """Changes to TINY that make its model one of this family."""
    sparse = {"model.scratch.experts": 4, "model.scratch.experts_per_token": 2} if name == "qwen3_moe" else {}
    return {"model.scratch.architecture": name, **sparse}


def windowed_model(device: str) -> Any:
    """A Mistral whose layers see five tokens back."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from ebbtide.model.load import LoadedModel
    from ebbtide.model.tokenizer import scratch_tokenizer

    tokenizer = scratch_tokenizer("0123456789=")
    shape = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
    }
    config = AutoConfig.for_model(
        "mistral", vocab_size=len(tokenizer), max_position_embeddings=64, sliding_window=5, pad_token_id=None, **shape
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(device).eval()
    for parameter in model.parameters():
        parameter.data += 0.15 * torch.randn_like(parameter)
    return LoadedModel(model, tokenizer, model.config._attn_implementation)


@pytest.fixture
def fused_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are fused on a CPU as well, where what kernels compute is plain torch."""
    from ebbtide.policy import fuse

    monkeypatch.setattr(fuse, "DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(fuse, "has_flash", lambda *_: True)


def assert_trained_alike(ours: Mapping[str, Any], theirs: Mapping[str, Any], lr: float, steps: int) -> None:
    """Weights that differ by float noise: nearly all of them by a tenth of a step of the optimizer at most. Adam moves
    a weight whose gradient is next to nothing by a whole step, in the direction of the noise."""
    assert ours.keys() == theirs.keys()
    off = {name: np.abs(np.asarray(weight) - np.asarray(theirs[name])) for name, weight in ours.items()}
    assert max(one.max() for one in off.values()) <= 2 * lr * steps
    assert np.concatenate([(one > 0.1 * lr).ravel() for one in off.values()]).mean() <= 0.002
