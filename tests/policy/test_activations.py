"""Activations kept, offloaded or recomputed: the same gradients to the bit, for every module and any mix; sense and
nonsense in the config."""

import gc
import random
import weakref

import pytest
import torch

from blocks import CPU, DENSE, SPARSE, Setup
from conftest import FAMILIES
from ebbtide.config.memory import ActivationsConfig
from ebbtide.errors import UserError
from ebbtide.memory.activations import ActivationOffloader
from ebbtide.memory.mover import Mover
from ebbtide.policy.activation_plan import (
    ActivationFigures,
    PlacedBlocks,
    choose_activations,
    measure_saved_bytes,
    offload_capacity,
)
from ebbtide.policy.activations import ActivationHooks
from ebbtide.policy.attention import PACKED, use_attention
from ebbtide.policy.block_activations import ActivationChoice, activation_names, locally_recomputable
from ebbtide.policy.packing import pack
from ebbtide.policy.recompute import NormCall


@pytest.fixture(scope="module")
def dense() -> Setup:
    return Setup("qwen3")


@pytest.fixture(scope="module")
def sparse() -> Setup:
    return Setup("qwen3_moe")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_names_that_a_model_has(name) -> None:
    block = Setup(name).blocks[0]
    assert activation_names(block) == (SPARSE if name == "qwen3_moe" else DENSE)
    normed = {"attn_norm", "mlp_norm"} | ({"qkv_linear"} if name.startswith("qwen3") else set())
    assert locally_recomputable(block) == normed | (set() if name == "qwen3_moe" else {"mlp_fc2"})


@pytest.mark.parametrize("kind", ["dense", "sparse"])
@pytest.mark.parametrize("place", ["offload", "recompute"])
@pytest.mark.parametrize("number", range(9))
def test_each_module_alone(kind, place, number, request) -> None:
    setup = request.getfixturevalue(kind)
    name = activation_names(setup.blocks[0])[number]
    if name == "block_input":
        recompute = (
            ["attn_norm"]
            if place == "offload"
            else [other for other in activation_names(setup.blocks[0]) if other != name]
        )
        setup.with_choice([name], recompute)
        return
    parked = setup.with_choice(**{place: [name]}).drain()[0]
    assert (parked > 0) == (place == "offload")


@pytest.mark.parametrize(
    ("offload", "recompute"),
    [
        (["mlp_act"], []),
        (["core_attn"], ["attn_norm", "mlp_fc2"]),
        (["block_input"], DENSE[1:]),
        (["mlp_act"], ["core_attn"]),
    ],
)
def test_nothing_is_left_for_the_garbage_collector(dense, offload, recompute) -> None:
    """On a GPU what waits for it is memory: a step's tensors go with the step."""
    dense.with_choice(offload, recompute)
    gc.collect()
    gc.disable()
    try:
        dense.with_choice(offload, recompute)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = [thing for thing in gc.garbage if isinstance(thing, torch.Tensor) and thing.numel() > 100]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not left


def test_a_forward_without_its_backward_is_freed() -> None:
    """An exception may come between the two."""
    setup = Setup("llama", "bfloat16")
    choice = ActivationChoice(
        recompute=frozenset({"attn_norm", "mlp_norm", "mlp_fc2"}), local=locally_recomputable(setup.blocks[0])
    )
    (batch,) = pack(setup.sequences[:2], 64, CPU)
    with ActivationHooks(setup.blocks, choice, None), use_attention(setup.model, PACKED):
        logprobs = setup.policy._logprobs(batch, 1.0)[0]
    alive = weakref.ref(logprobs.grad_fn)
    made = [weakref.ref(call) for call in gc.get_objects() if type(call) is NormCall]
    assert made
    del logprobs
    gc.collect()
    assert alive() is None
    assert not any(call() for call in made)


@pytest.mark.parametrize("kind", ["dense", pytest.param("sparse", marks=pytest.mark.slow)])
def test_any_mix(kind, request) -> None:
    setup = request.getfixturevalue(kind)
    names = activation_names(setup.blocks[0])
    chance = random.Random(0)
    for _ in range(40):
        places = {name: chance.choice(["keep", "offload", "recompute"]) for name in names}
        offload = [name for name, place in places.items() if place == "offload"]
        recompute = [name for name, place in places.items() if place == "recompute" and name != "block_input"]
        setup.with_choice(offload, recompute, keep_last=chance.randrange(3), minimum=chance.choice([1, 4000]))


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_in_bfloat16(name) -> None:
    setup = Setup(name, "bfloat16")
    setup.with_choice(["core_attn"], ["attn_norm", "qkv_linear", "mlp_norm", "mlp_fc2"])
    setup.with_choice(["core_attn", "mlp_act"], ["attn_norm", "mlp_norm", "mlp_fc2"])
    setup.with_choice(["block_input"], DENSE[1:])
    setup.with_choice(["mlp_act"], ["core_attn", "qkv_linear"])


def test_small_tensors_stay(dense) -> None:
    assert dense.with_choice(["mlp_act"], minimum=2**20).drain() == (0, 0)


def test_norms_of_queries_and_keys_are_made_again_by_themselves(dense) -> None:
    local = locally_recomputable(dense.blocks[0])
    kept, again = (
        measure_saved_bytes(
            PlacedBlocks(dense.blocks), ActivationChoice(recompute=frozenset(some), local=local), dense.policy._probe
        )
        for some in ([], ["qkv_linear"])
    )
    assert again["qkv_linear"] < kept["qkv_linear"]
    assert {name: size for name, size in again.items() if name != "qkv_linear"} == {
        name: size for name, size in kept.items() if name != "qkv_linear"
    }


def test_a_block_that_runs_again_keeps_the_products_that_it_should(dense) -> None:
    local = locally_recomputable(dense.blocks[0])
    stored = measure_saved_bytes(
        PlacedBlocks(dense.blocks),
        ActivationChoice(recompute=frozenset(DENSE[1:]) - {"mlp_act"}, local=local),
        dense.policy._probe,
    )
    assert stored["mlp_act"] == 2 * 48 * 4  # gate and up
    assert stored.keys() == {"block_input", "mlp_act"}


def test_what_finds_no_room_stays_and_is_counted(dense) -> None:
    parked, refused = dense.with_choice(["mlp_act"], room=20_000).drain()
    assert parked > 0
    assert refused > parked


def test_frozen_blocks(dense) -> None:
    for weight in dense.blocks[1].parameters():
        weight.requires_grad = False
    kept, dense.kept = dense.kept, dense.grads()
    try:
        dense.with_choice(["core_attn"], ["attn_norm", "mlp_norm"])
        dense.with_choice(["block_input"], DENSE[1:])
    finally:
        dense.kept = kept
        for weight in dense.blocks[1].parameters():
            weight.requires_grad = True


@pytest.mark.parametrize("name", FAMILIES)
def test_norms_beside_frozen_ones(name) -> None:
    """A norm whose weight is frozen saves less than the others: it is no measure for them."""
    setup = Setup(name, "bfloat16")
    for weight in setup.blocks[0].parameters():
        weight.requires_grad = False
    setup.kept = setup.grads()
    setup.with_choice([], ["attn_norm", "mlp_norm"])


def test_a_backward_that_fails_leaves_nothing_behind(dense) -> None:
    parking = ActivationOffloader(torch.zeros(2**22, dtype=torch.uint8), Mover(CPU))
    activations = ActivationHooks(dense.blocks, ActivationChoice(frozenset({"mlp_act"})), parking, minimum=1)
    forward = dense.blocks[0].forward
    with pytest.raises(KeyError), activations:  # noqa: PT012
        dense.policy._probe(16)
        raise KeyError("in the middle")
    assert not parking._stack
    assert dense.blocks[0].forward == forward
    assert "forward" not in dense.blocks[0].get_submodule("mlp").__dict__
    dense.with_choice(["mlp_act"])


def test_forwards_without_gradient_are_left_alone(dense) -> None:
    parking = ActivationOffloader(torch.zeros(2**22, dtype=torch.uint8), Mover(CPU))
    with ActivationHooks(dense.blocks, ActivationChoice(frozenset({"mlp_act"})), parking, minimum=1):
        dense.policy.compute_logprobs("old_logprobs", dense.sequences, lambda *_: None)
        for sequence in dense.sequences:
            del sequence.values["old_logprobs"]
    assert parking.drain() == (0, 0)


def test_the_host_memory_predicted_is_what_is_used(dense) -> None:
    config = ActivationsConfig(offload=["mlp_act", "core_attn"], keep_last=1)
    predicted = (
        offload_capacity(
            config,
            PlacedBlocks(dense.blocks),
            ActivationChoice(frozenset(config.offload)),
            dense.policy._probe,
            tokens=640,
        )
        - 2**20
    )
    parking = ActivationOffloader(torch.zeros(2**24, dtype=torch.uint8), Mover(CPU))
    with ActivationHooks(dense.blocks, ActivationChoice(frozenset(config.offload)), parking, keep_last=1, minimum=1):
        tokens = dense.policy._probe(640)
    parked, refused = parking.drain()
    assert refused == 0
    assert predicted == pytest.approx(1.02 * parked * 640 / tokens, rel=0.01)


SAVED = {"attn_norm": 10, "qkv_linear": 20, "core_attn": 12, "mlp_norm": 10, "mlp_fc1": 4, "mlp_act": 36, "mlp_fc2": 12}


def chosen(settings, block, carried=10**9):
    figures = ActivationFigures(
        {name: 1024 * size for name, size in SAVED.items()}, forward=1.0, link=carried * 1024 / 0.9, blocks=1
    )
    notes: list[str] = []
    config = ActivationsConfig.model_validate(settings)
    return choose_activations(config, PlacedBlocks([block]), figures, lambda _: figures.saved, notes.append), notes


def test_presets(dense) -> None:
    block = dense.blocks[0]
    assert chosen({}, block)[0].recompute == frozenset()
    assert chosen({"preset": "recompute"}, block)[0].recompute == set(DENSE[1:])
    assert chosen({"preset": "offload"}, block)[0].offload == {"block_input"}
    mixed = chosen({"preset": "recompute", "keep": ["core_attn", "attn_proj"], "offload": ["mlp_act"]}, block)[0]
    assert mixed.offload == {"mlp_act"}
    assert mixed.recompute == {"attn_norm", "qkv_linear", "mlp_norm", "mlp_fc1", "mlp_fc2"}


def test_balanced_takes_what_the_link_carries_and_says_so(dense) -> None:
    for carried, offload in (
        (0, set()),
        (13, {"core_attn"}),
        (16, {"core_attn", "mlp_fc1"}),
        (37, {"mlp_act"}),
        (100, {"core_attn", "mlp_fc1", "mlp_act"}),
    ):
        choice, notes = chosen({"preset": "balanced"}, dense.blocks[0], carried)
        assert choice.offload == offload
        assert choice.recompute == {"attn_norm", "qkv_linear", "mlp_norm", "mlp_fc2"}
        assert f"the host link carries {carried} KiB " in notes[0]
    choice, _ = chosen({"preset": "balanced", "offload": ["mlp_fc1"], "keep": ["mlp_act"]}, dense.blocks[0], 45)
    assert choice.offload == {"mlp_fc1", "core_attn"}


def test_the_gate(dense) -> None:
    wanted = {"offload": ["mlp_act", "core_attn"]}
    assert chosen(wanted, dense.blocks[0], 48) == (
        ActivationChoice(frozenset(wanted["offload"]), local=locally_recomputable(dense.blocks[0])),
        [],
    )
    choice, (note,) = chosen(wanted, dense.blocks[0], 20)
    assert (choice.offload, choice.recompute) == ({"core_attn"}, {"mlp_act"})
    assert "48 KiB per token" in note
    assert "recomputed instead: mlp_act" in note
    with pytest.raises(UserError, match=r"48 KiB per token.*carries only 20 KiB.*`memory.activations.on_slow_link`"):
        chosen({**wanted, "on_slow_link": "refuse"}, dense.blocks[0], 20)
    assert chosen({**wanted, "on_slow_link": "ignore"}, dense.blocks[0], 20)[0].offload == set(wanted["offload"])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"offload": ["moe_act"]},
            ["`memory.activations.offload` lists `moe_act`", "choose from block_input, attn_norm"],
        ),
        ({"recompute": ["block_input"]}, ["`block_input`", "move `block_input` to `keep` or `offload`"]),
        ({"offload": ["block_input"]}, ["`block_input`", "recompute: [attn_norm]"]),
        ({"offload": ["mlp_fc1"], "recompute": ["core_attn"]}, ["`mlp_fc1`", "`core_attn`", "save nothing"]),
        ({"offload": ["attn_proj"]}, ["`attn_proj` without `core_attn`", "both"]),
    ],
)
def test_nonsense_is_named(dense, settings, words) -> None:
    with pytest.raises(UserError) as caught:
        chosen(settings, dense.blocks[0])
    assert all(word in str(caught.value) for word in words)


def test_measured_bytes_are_what_a_norm_and_a_product_save(dense) -> None:
    saved = measure_saved_bytes(PlacedBlocks(dense.blocks), ActivationChoice(), dense.policy._probe)
    hidden, mlp = 32 * 4, 48 * 4
    assert saved["mlp_fc2"] == mlp
    assert saved["mlp_act"] == 3 * mlp
    assert saved["mlp_fc1"] == hidden
    local = locally_recomputable(dense.blocks[0])
    assert "mlp_fc2" not in measure_saved_bytes(
        PlacedBlocks(dense.blocks), ActivationChoice(recompute=frozenset({"mlp_fc2"}), local=local), dense.policy._probe
    )
    whole = measure_saved_bytes(
        PlacedBlocks(dense.blocks), ActivationChoice(recompute=frozenset(DENSE[1:]), local=local), dense.policy._probe
    )
    assert whole == {"block_input": hidden}
