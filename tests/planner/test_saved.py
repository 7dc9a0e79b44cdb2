"""What a block saves, foretold from the shape, against what autograd saves."""

from __future__ import annotations

import pytest

from conftest import FAMILIES, TINY, family, merged
from ebbtide.config.tree import Activations as ActivationsConfig
from ebbtide.config.tree import Config
from ebbtide.planner.saved import Choice, chosen, held, local_names, names_of, saved
from ebbtide.planner.shape import Shape, find_shape
from ebbtide.policy import activations
from ebbtide.policy.activation_plan import measure
from ebbtide.policy.model import blocks_of, load_model
from ebbtide.policy.policy import Policy

ON_A_GPU_ONLY = {"core_attn", "attn_proj", "moe_act", "expert_fc1", "moe_router"}  # a CPU has other kernels for these


def made(name: str) -> tuple[Policy, Shape]:
    config = Config.model_validate(
        merged(
            TINY,
            family(name)
            | {"model.dtype": "bfloat16", "model.scratch.context": 1024, "rollout.max_new_tokens": 500, "train.microbatch_tokens": 512},
        )
    )
    return Policy(load_model(config), config), find_shape(config.model)


@pytest.mark.parametrize("again", [False, True], ids=["kept", "made again"])
@pytest.mark.parametrize("name", FAMILIES)
def test_bytes_are_those_that_autograd_saves(name: str, again: bool) -> None:
    policy, shape = made(name)
    blocks = blocks_of(policy.model)
    names = local_names(shape) if again else frozenset()
    found = measure(blocks, activations.Choice(recompute=names, local=activations.local_names(blocks[0])), policy._probe)
    foretold = saved(shape, 2, Choice(recompute=names))
    for module in {*found, *foretold} - ON_A_GPU_ONLY:
        assert foretold.get(module, 0) == pytest.approx(found.get(module, 0), abs=4 * (shape.heads + shape.kv_heads) + 1), (
            module
        )  # a root is counted with its norm or not at all


@pytest.mark.parametrize("name", FAMILIES)
def test_names_are_those_of_the_model(name: str) -> None:
    policy, shape = made(name)
    block = blocks_of(policy.model)[0]
    assert set(names_of(shape)) == set(activations.names_of(block))
    assert local_names(shape) == activations.local_names(block)


DENSE = Shape("qwen3", 28, 2048, 16, 8, 128, 6144, 151936, tied=True)


def test_presets_say_what_they_say() -> None:
    everything = frozenset(names_of(DENSE)) - {"block_input"}
    assert chosen(ActivationsConfig(), DENSE, 2, 1e9) == Choice()
    assert chosen(ActivationsConfig(preset="recompute"), DENSE, 2, 1e9) == Choice(recompute=everything)
    assert chosen(ActivationsConfig(preset="offload"), DENSE, 2, 0) == Choice(frozenset({"block_input"}), everything)
    assert chosen(ActivationsConfig(recompute=["mlp_norm"]), DENSE, 2, 0) == Choice(recompute=frozenset({"mlp_norm"}))


def test_balanced_parks_what_the_link_carries_and_no_more() -> None:
    for carried in (0, 5_000, 13_000, 17_000, 30_000):
        choice = chosen(ActivationsConfig(preset="balanced"), DENSE, 2, carried)
        assert choice.recompute == local_names(DENSE)
        assert sum(saved(DENSE, 2, choice).get(name, 0) for name in choice.offload) <= carried
    assert chosen(ActivationsConfig(preset="balanced"), DENSE, 2, 17_000).offload == {"block_input", "core_attn"}


def test_what_is_parked_is_not_on_the_device() -> None:
    kept, parked = held(DENSE, 2, Choice(), 1), held(DENSE, 2, Choice(frozenset({"mlp_fc1"})), 1)
    assert parked.parked == 27 * 2 * 2048
    assert kept.blocks - parked.blocks == (28 - 3) * 2 * 2048  # the last block, and two on the way, are still there
