"""Plans of several ranks: what each holds and gathers, what they say to each other, and what a node's host must
have."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from ebbtide.cli import app
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.config.parallel import ParallelConfig
from ebbtide.config.planner_keys import free_groups, keep_planned_settings
from ebbtide.errors import UserError
from ebbtide.model.shape import Shape, find_shape
from ebbtide.model.workload import max_workload
from ebbtide.parallel.costs import WEIGHT_SYNC_BUCKET, GatherCosts, MeshShape, RankGroup, mesh_shape
from ebbtide.planner.predict import Predictor
from ebbtide.planner.prediction import Prediction
from ebbtide.planner.render import explain_misfit, summarize
from ebbtide.planner.search import PlanResult, PlanSearch
from ebbtide.system.machine import KNOWN, links_for, machine_for
from ebbtide.system.units import GIB
from planner.test_search import BASE, config_with

DENSE = Shape("qwen3", 28, 2048, 16, 8, 128, 6144, 151936, tied=True)
SPARSE = Shape("qwen3_moe", 48, 2048, 32, 4, 128, 768, 151936, tied=False, experts=128, experts_per_token=8)
HOLDINGS = ("weights", "grads", "master", "moments", "reference")


def predicted(
    parallel: dict[str, Any] | None, node: int = 8, network: float | None = None, **sections: Any
) -> Prediction:
    config = config_with(parallel=parallel, **sections)
    shared = mesh_shape(config.parallel, None, node)
    machine = machine_for("h200", None, 2000, None, network, shared.ranks_per_node)
    return Predictor(find_shape(config.model), machine, sharing=shared).predict(
        config, max_workload(config), int(130 * GIB)
    )


def test_a_cluster_of_one_is_none() -> None:
    assert predicted({"gpus": 1}) == predicted(None)
    assert predicted({"data": 1}, loss={"kl": {}}) == predicted(None, loss={"kl": {}})


@given(fewer=st.integers(1, 1024), more=st.integers(1, 1024), shape=st.sampled_from([DENSE, SPARSE]))
def test_more_ranks_never_hold_more_each_and_together_hold_all(fewer: int, more: int, shape: Shape) -> None:
    fewer, more = sorted((fewer, more))
    assert shape.model_shard(more) <= shape.model_shard(fewer)
    assert more * shape.model_shard(more) >= shape.parameters == shape.model_shard(1)


def test_experts_are_rows_and_no_row_is_cut() -> None:
    assert SPARSE.block_shard(256) == pytest.approx(SPARSE.block_shard(128), rel=0.05)
    assert SPARSE.block_shard(1024) > 7 * SPARSE.block_parameters / 1024


@settings(max_examples=30, deadline=None)
@given(
    data=st.sampled_from([1, 2, 3, 8, 16, 64, 256]),
    tensor=st.sampled_from([1, 2, 4]),
    copies=st.sampled_from([1, 2, 4]),
    node=st.sampled_from([1, 4, 8]),
    kl=st.booleans(),
    place=st.sampled_from(["device", "streamed", "cpu"]),
)
def test_whatever_the_ranks_a_rank_holds_no_more_than_one_alone(
    data: int, tensor: int, copies: int, node: int, kl: bool, place: str
) -> None:
    if data % copies:
        copies = 1
    sections = {"loss": {"kl": {} if kl else None}, "optimizer": {"place": place}}
    alone, one = (
        predicted(None, **sections),
        predicted({"data": data, "tensor": tensor, "replicate": copies}, node, **sections),
    )
    for phase, mine in one.phases.items():
        for name in HOLDINGS:
            assert mine.device.get(name, 0) <= alone.phases[phase].device.get(name, 0)
        assert mine.host <= alone.phases[phase].host
        assert 0 <= mine.exposed_communication <= mine.communication
        assert mine.exposed_communication + mine.exposed <= mine.seconds + 1e-9
    assert (one.phases["train"].communication > 0) == (data * tensor > 1)


def test_copies_cost_memory_and_spare_communication_between_nodes() -> None:
    shared, copied = predicted({"gpus": 1024}), predicted({"gpus": 1024, "replicate": 128})
    assert copied.phases["step"].device["weights"] == pytest.approx(
        128 * shared.phases["step"].device["weights"], rel=0.01
    )
    assert copied.phases["train"].communication < shared.phases["train"].communication / 2
    assert copied.phases["generate"].communication < shared.phases["generate"].communication / 10


def test_work_is_dealt_out() -> None:
    one, eight, many = (
        predicted({"gpus": gpus}, rollout={**BASE["rollout"], "prompts_per_step": 64}) for gpus in (1, 8, 1024)
    )
    assert eight.generation.concurrent == 8 * 8
    assert many.generation.concurrent == 8  # no rank has less than a prompt
    assert eight.phases["train"].seconds < one.phases["train"].seconds / 6
    compute = [
        found.phases["generate"].seconds - found.phases["generate"].exposed_communication
        for found in (one, eight, many)
    ]
    assert compute[0] > compute[1] > compute[2]


def test_the_optimizer_on_the_cpu_shares_the_cpu() -> None:
    cpu = {"optimizer": {"place": "cpu"}}
    alone, eight, apart = (
        predicted(parallel, node, **cpu) for parallel, node in ((None, 8), ({"gpus": 8}, 8), ({"gpus": 8}, 1))
    )
    assert eight.phases["step"].seconds > 0.9 * alone.phases["step"].seconds
    assert apart.phases["step"].seconds < 0.3 * alone.phases["step"].seconds


def test_generate_has_the_whole_weights_and_training_two_blocks() -> None:
    found = predicted({"gpus": 8}, evaluate={"every": 1})
    for phase in ("generate", "evaluate"):
        assert found.phases[phase].device["gathered"] == 2 * DENSE.parameters  # type: ignore[index]
    assert found.phases["train"].device["gathered"] < 2 * DENSE.root_shard() * 3 + 2 * 8 * DENSE.block_parameters
    assert "gathered" not in found.phases["step"].device


def test_what_every_rank_has_whole_is_not_gathered() -> None:
    copies = predicted({"gpus": 8, "replicate": 8})
    assert not copies.phases["generate"].device["gathered"]
    assert not copies.phases["generate"].communication
    assert not copies.loading_bytes
    matrices = 28 * 2 * (2048 * (2 * 2048 + 2 * 1024) + 3 * 2048 * 6144)
    assert predicted({"tensor": 2, "data": 1}).phases["generate"].device["gathered"] == matrices


def test_layers_take_less_room_and_more_communication_than_whole_weights() -> None:
    whole, layers = (
        predicted({"gpus": 8, "rollout_weights": way}).phases["generate"] for way in ("gathered", "layerwise")
    )
    assert layers.device["gathered"] == 2 * (
        DENSE.root_shard() + 3 * DENSE.block_parameters + DENSE.block_parameters // 8
    )
    assert layers.device["gathered"] < whole.device["gathered"] / 3
    assert layers.communication > 5 * whole.communication == 5 * whole.exposed_communication
    assert layers.seconds > 2 * whole.seconds


# Links


def test_a_ring_takes_its_bytes_over_its_slowest_link() -> None:
    gathers = GatherCosts(DENSE, DENSE, MeshShape(64, node=8), replace(links_for("h200"), near=400e9, far=40e9), 2)
    much = 1e12
    assert gathers._all_gather(RankGroup(1, 1), much) == 0
    assert gathers._all_gather(RankGroup(8, 8), much) == pytest.approx(7 / 8 * much / 400e9, rel=1e-3)
    assert gathers._all_gather(RankGroup(64, 8), much) == pytest.approx(63 / 64 * much / (8 * 40e9), rel=1e-3)
    assert gathers._all_gather(RankGroup(8, 1), much) == pytest.approx(7 / 8 * much / 40e9, rel=1e-3)
    steps = [gathers._all_gather(RankGroup(size, min(size, 8)), 0.0) for size in (2, 8, 64, 1024)]
    assert all(later > sooner for sooner, later in pairwise(steps))


def test_a_faster_network_is_never_slower_and_of_no_use_in_one_node() -> None:
    seconds = [predicted({"gpus": 64}, network=network).seconds for network in (1, 10, 50, 400)]
    assert all(later <= sooner for sooner, later in pairwise(seconds))
    assert seconds[0] > 1.5 * seconds[-1]
    assert predicted({"gpus": 8}, network=1) == predicted({"gpus": 8}, network=400)


@pytest.mark.parametrize("name", [*KNOWN, "Some Other GPU"])
def test_every_gpu_has_links(name: str) -> None:
    links = links_for(name)
    assert links.near > links.far > 0
    assert links.has_nvlink == (links.near > 200e9)


# The host of a node


def planned(parallel: dict[str, Any], host: float, **sections: Any) -> tuple[PlanResult, str]:
    config = config_with(parallel=parallel, **sections)
    shared = mesh_shape(config.parallel, None, 8)
    machine = machine_for("h200", None, host, None, None, shared.ranks_per_node)
    chosen = PlanSearch(
        Predictor(find_shape(config.model), machine, sharing=shared), max_workload(config), 130, host
    ).choose(config)
    return chosen, explain_misfit(chosen, config, machine)


def test_ranks_of_a_node_pin_its_memory_together() -> None:
    cpu = {"optimizer": {"place": "cpu"}}
    one, eight = predicted(None, **cpu), predicted({"gpus": 8, "replicate": 8}, **cpu)
    assert eight.host == 8 * one.host
    chosen, said = planned({"gpus": 8, "replicate": 8}, 100, **cpu)
    assert chosen.bottleneck == "host"
    assert "by the 8 ranks of a node" in said


def test_every_rank_of_a_node_loads_the_whole_model() -> None:
    chosen, said = planned({"gpus": 8}, 20)
    assert chosen.bottleneck == "loading"
    assert (
        "25.6 GiB of host memory needed to load the whole model in each of the 8 ranks of a node, more than the 20"
        in said
    )
    assert planned({"gpus": 8}, 30)[0].fits


def in_5_gib(parallel: dict[str, Any], layers: int = 200) -> tuple[PlanResult, str]:
    config = config_with(model={"scratch": {**BASE["model"]["scratch"], "layers": layers}}, parallel=parallel)
    machine = machine_for("h200", 5, 1000, None, None, 8)
    predictor = Predictor(find_shape(config.model), machine, sharing=mesh_shape(config.parallel, None, 8))
    chosen = PlanSearch(predictor, max_workload(config), 5, 1000).choose(config)
    return chosen, " ".join(summarize(chosen, config, machine))


def test_where_the_whole_weights_have_no_room_layers_are_chosen_or_named() -> None:
    chosen, said = in_5_gib({"gpus": 64})
    assert chosen.fits
    assert chosen.candidate.config.parallel is not None
    assert chosen.candidate.config.parallel.rollout_weights == "layerwise"
    assert "`parallel.rollout_weights=layerwise`: without it" in said
    chosen, said = in_5_gib({"gpus": 64, "rollout_weights": "gathered"})
    assert not chosen.fits
    assert "parallel.rollout_weights=layerwise" in said
    chosen, _ = in_5_gib({"gpus": 64}, layers=4)
    assert chosen.candidate.config.parallel is not None
    assert chosen.candidate.config.parallel.rollout_weights is None  # which is whole


def test_what_ranks_gather_is_decided_anew_for_other_ranks() -> None:
    chosen = in_5_gib({"gpus": 64})[0].candidate.config
    before = chosen.model_dump(mode="json")
    for parallel in ({"gpus": 8}, {"gpus": 64, "rollout_gpus": 2}):
        resumed = keep_planned_settings(config_with(parallel=parallel), before)
        assert resumed.parallel is not None
        assert resumed.parallel.rollout_weights is None
        assert resumed.train == chosen.train
        GrpoConfig.model_validate(resumed.model_dump(mode="json"))
    assert free_groups(keep_planned_settings(config_with(parallel={"gpus": 8}), before)) == ("rollout_weights",)
    assert not free_groups(keep_planned_settings(config_with(parallel={"gpus": 64, "rollout_gpus": 2}), before))


def test_ranks_beside_that_only_generate_have_the_cache() -> None:
    both, apart = predicted({"gpus": 8}), predicted({"gpus": 8, "rollout_gpus": 4})
    generate = apart.phases["generate"]
    assert "kv_cache" in both.phases["generate"].device
    assert "kv_cache" not in generate.device
    assert (
        generate.device["gathered"]
        == max(2 * WEIGHT_SYNC_BUCKET, 2 * DENSE.embedding)
        < both.phases["generate"].device["gathered"]
    )
    assert generate.device["weights"] == both.phases["generate"].device["weights"]
    assert apart.generation.rollout_worker_bytes > 2 * DENSE.parameters
    assert apart.generation.concurrent == 2 * both.generation.concurrent  # half as many ranks generate
    assert generate.exposed_communication > 0
    near, far = (predicted({"gpus": 4, "rollout_gpus": 4}, node=node).phases["generate"] for node in (8, 4))
    assert far.exposed_communication > near.exposed_communication  # over the network
    assert far.seconds - far.exposed_communication == pytest.approx(near.seconds - near.exposed_communication)
    assert predicted({"gpus": 1, "rollout_gpus": 1}).phases["train"].device == predicted(None).phases["train"].device
    _, said = in_5_gib({"gpus": 64, "rollout_gpus": 8}, layers=4)
    assert "each rollout worker (a rank that only generates) needs" in said


# What users write


def test_what_cannot_be_shared_out_says_so() -> None:
    with pytest.raises(UserError, match=r"set `parallel\.gpus`"):
        mesh_shape(ParallelConfig(tensor=2), None, 8)
    with pytest.raises(UserError, match=r"`parallel\.tensor: 3`: the model has 16 heads"):
        DENSE.tensor_parallel_shape(3)
    with pytest.raises(UserError, match="with experts"):
        SPARSE.tensor_parallel_shape(2)


def test_the_command_plans_for_ranks() -> None:
    command = ["plan", "quickstart", "--gpu", "h100", "parallel.gpus=16", "parallel.tensor=2"]
    found = json.loads(CliRunner().invoke(app, [*command, "--gpus-per-node", "4", "--json"]).stdout)
    assert found["ranks"] == {"data": 8, "tensor": 2, "replicate": 1, "node": 4}
    assert found["machine"]["host_gib"] == 4 * 128
    train = found["phases"]["train"]
    assert 0 < train["seconds_communication_exposed"] <= train["seconds_communication"]
    said = CliRunner().invoke(app, [*command, "--network", "7"]).stdout
    assert "16 ranks, each with one part in 16 of the model, 8 on a node: data 8, tensor 2, replicate 1" in said
    assert "7 GB/s to other nodes (computed from data sheets" in said


def test_the_host_memory_that_is_advised_has_room_to_load_too() -> None:
    """Where each rank of a node loads the whole model, that is more than all that they pin."""
    config = config_with(parallel={"gpus": 8})
    shared = mesh_shape(config.parallel, None, 8)

    def chosen_on(host: float) -> PlanResult:
        machine = machine_for("h200", None, host, None, None, shared.ranks_per_node)
        return PlanSearch(
            Predictor(find_shape(config.model), machine, sharing=shared), max_workload(config), 139, host
        ).choose(config)

    said = explain_misfit(chosen_on(8), config, machine_for("h200", None, 8, None, None, shared.ranks_per_node))
    wanted = float(said.partition(". With 8 GiB of host memory no plan fits. With ")[2].partition(" GiB of host")[0])
    assert chosen_on(wanted).fits
    assert not chosen_on(0.98 * wanted).fits
