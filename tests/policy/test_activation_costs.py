"""What a block saves, predicted from the shape, against what autograd saves."""

from __future__ import annotations

import pytest
import torch

from conftest import FAMILIES, TINY, family, merged
from ebbtide.checkpoint.initial_model import load_initial
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.config.memory import ActivationsConfig
from ebbtide.model.load import blocks_of
from ebbtide.model.shape import Shape, find_shape
from ebbtide.policy import block_activations
from ebbtide.policy.activation_costs import (
    ActivationPolicy,
    activation_bytes,
    activation_names,
    locally_recomputable,
    resolve_policy,
    saved_bytes,
)
from ebbtide.policy.activation_plan import PlacedBlocks, measure_saved_bytes
from ebbtide.policy.policy import Policy

CPU = torch.device("cpu")
ON_A_GPU_ONLY = {"core_attn", "attn_proj", "moe_act", "expert_fc1", "moe_router"}  # a CPU has other kernels for these


def made(name: str, lora: dict[str, object] | None = None) -> tuple[Policy, Shape]:
    config = GrpoConfig.model_validate(
        merged(
            TINY,
            family(name)
            | {
                "model.dtype": "bfloat16",
                "model.scratch.context": 1024,
                "rollout.max_new_tokens": 500,
                "train.microbatch_tokens": 512,
                "model.lora": lora,
            },
        )
    )
    return Policy(load_initial(config, CPU), config), find_shape(config.model)


SOME = {"rank": 8, "targets": ["q_proj", "v_proj", "up_proj"]}
OF_ATTENTION = {"rank": 8, "targets": ["q_proj", "o_proj"]}
ADAPTED = [(name, lora) for name in FAMILIES for lora in ({"rank": 8}, OF_ATTENTION if name == "qwen3_moe" else SOME)]


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(("name", "lora"), [*((name, None) for name in FAMILIES), *ADAPTED])
def test_bytes_are_those_that_autograd_saves(name: str, lora: dict[str, object] | None, again: bool) -> None:
    policy, shape = made(name, lora)
    blocks = blocks_of(policy.model)
    names = locally_recomputable(shape) if again else frozenset()
    # With a frozen embedding the first block saves less than the others: nothing before its adapters has a gradient.
    found = measure_saved_bytes(
        PlacedBlocks(blocks if lora is None else blocks[1:]),
        block_activations.ActivationChoice(recompute=names, local=block_activations.locally_recomputable(blocks[0])),
        policy._probe,
    )
    predicted = saved_bytes(shape, 2, ActivationPolicy(recompute=names))
    for module in {*found, *predicted} - ON_A_GPU_ONLY:
        assert predicted.get(module, 0) == pytest.approx(
            found.get(module, 0), abs=4 * (shape.heads + shape.kv_heads) + 1
        ), module  # a root is counted with its norm or not at all


@pytest.mark.parametrize("name", FAMILIES)
def test_names_are_those_of_the_model(name: str) -> None:
    policy, shape = made(name)
    block = blocks_of(policy.model)[0]
    assert set(activation_names(shape)) == set(block_activations.activation_names(block))
    assert locally_recomputable(shape) == block_activations.locally_recomputable(block)


DENSE = Shape("qwen3", 28, 2048, 16, 8, 128, 6144, 151936, tied=True)


def test_presets_say_what_they_say() -> None:
    everything = frozenset(activation_names(DENSE)) - {"block_input"}
    assert resolve_policy(ActivationsConfig(), DENSE, 2, 1e9) == ActivationPolicy()
    assert resolve_policy(ActivationsConfig(preset="recompute"), DENSE, 2, 1e9) == ActivationPolicy(
        recompute=everything
    )
    assert resolve_policy(ActivationsConfig(preset="offload"), DENSE, 2, 0) == ActivationPolicy(
        frozenset({"block_input"}), everything
    )
    assert resolve_policy(ActivationsConfig(recompute=["mlp_norm"]), DENSE, 2, 0) == ActivationPolicy(
        recompute=frozenset({"mlp_norm"})
    )


def test_balanced_parks_what_the_link_carries_and_no_more() -> None:
    for carried in (0, 5_000, 13_000, 17_000, 30_000):
        choice = resolve_policy(ActivationsConfig(preset="balanced"), DENSE, 2, carried)
        assert choice.recompute == locally_recomputable(DENSE)
        assert sum(saved_bytes(DENSE, 2, choice).get(name, 0) for name in choice.offload) <= carried
    assert resolve_policy(ActivationsConfig(preset="balanced"), DENSE, 2, 17_000).offload == {
        "block_input",
        "core_attn",
    }


def test_what_is_parked_is_not_on_the_device() -> None:
    kept, parked = (
        activation_bytes(DENSE, 2, ActivationPolicy(), 1),
        activation_bytes(DENSE, 2, ActivationPolicy(frozenset({"mlp_fc1"})), 1),
    )
    assert parked.offloaded == 27 * 2 * 2048
    assert kept.blocks - parked.blocks == (28 - 3) * 2 * 2048  # the last block, and two on the way, are still there
