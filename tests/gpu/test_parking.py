"""Activations on a real GPU: every module and any mix give the gradients of keeping everything, to the bit, in
deterministic mode."""

import random

import pytest
import torch

from blocks import DENSE, Setup
from ebbtide.policy.block_activations import activation_names

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(autouse=True)
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_modules_alone_and_mixes(name) -> None:
    setup = Setup(name, "bfloat16", "cuda", size=8)
    names = activation_names(setup.blocks[0])
    for one in names[1:]:
        setup.with_choice([one], room=2**28)
        setup.with_choice([], [one])
    setup.with_choice(["block_input"], names[1:], room=2**28)
    chance = random.Random(0)
    for _ in range(12):
        places = {name: chance.choice(["keep", "offload", "recompute"]) for name in names}
        offload = [name for name, place in places.items() if place == "offload"]
        recompute = [name for name, place in places.items() if place == "recompute" and name != "block_input"]
        setup.with_choice(offload, recompute, room=2**28, keep_last=chance.randrange(3))


def test_memory_on_the_device_goes_down() -> None:
    setup = Setup("qwen3", "bfloat16", "cuda", size=16)
    peaks = {}
    for name, options in {
        "keep": {},
        "offload": {"offload": ["mlp_act", "core_attn"]},
        "recompute": {"recompute": DENSE[1:]},
    }.items():
        setup.with_choice(**options, room=2**29, keep_last=0)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        setup.with_choice(**options, room=2**29, keep_last=0)
        peaks[name] = torch.cuda.max_memory_allocated() - before
    assert peaks["recompute"] < peaks["offload"] < peaks["keep"]
