"""What a plan says of each rank, held against ranks: parts to the byte, collectives to the number, and a choice that
all make alike."""

import json
import os
from pathlib import Path

import pytest
from ranks import run, together

from conftest import FAMILIES, TINY, family, merged
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.model.shape import find_shape
from ebbtide.parallel.costs import ALLREDUCES_BACKWARD, ALLREDUCES_FORWARD, MeshShape
from ebbtide.planner.predict import Predictor
from ebbtide.system.machine import machine_for

GIB = 2**30
# Every part is a whole number of what the optimizer's chunks are cut at, so that its bytes are exact.
ROUND = {
    "model.scratch": {
        "architecture": "llama", "layers": 3, "hidden": 256, "heads": 4, "kv_heads": 2,
        "mlp": 512, "context": 64, "alphabet": "0123456789=",
    },
    "checkpoint": None,
    "memory.budget_gib": 0.5,
    "advantage.drop_zero_std_groups": False,
    "train.steps": 1,
    "rollout": {"prompts_per_step": 2, "group_size": 2, "max_prompt_tokens": 8, "max_new_tokens": 3},
    "parallel": {"gpus": 2},
}  # fmt: skip


def config_of(folder: Path, **changes: object) -> GrpoConfig:
    return GrpoConfig.model_validate(merged(TINY, {**ROUND, "run.folder": str(folder), **changes}))


def trained(rank: int, configs: list[GrpoConfig]) -> list[bytes]:
    return [b"".join(weight.tobytes() for weight in run(rank, config)["weights"].values()) for config in configs]


@pytest.mark.slow
def test_holdings_are_those_of_a_rank_to_the_byte_and_a_plan_that_moves_changes_none(tmp_path) -> None:
    ways = {
        "device": {"loss.kl": {}},
        "bfloat16": {"model.dtype": "bfloat16"},
        # Half, at a round place. A block's gradients stay with those of its first tensors.
        "adapters": {"model.lora": {"rank": 64}, "loss.kl": {}},
        "split": {"optimizer.cpu_fraction": 443_776 / 887_424, "loss.kl": {}},
        # the CPU steps to other bits
        "tight": {"memory.budget_gib": 0.065, "optimizer.cpu_fraction": 0.0, "loss.kl": {}},
    }
    configs = [config_of(tmp_path / name, **way) for name, way in ways.items()]
    bits = dict(zip(ways, together(2, trained, configs)[0], strict=True))
    for name in ways:
        written = json.loads((tmp_path / name / "plan.json").read_text())
        assert written["fits"]
        assert written["ranks"] == {"data": 2, "tensor": 1, "replicate": 1, "node": 2}
        last = json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1])
        for phase in ("generate", "logprob", "train", "step"):
            names = "weights", "base", "master", "moments", "reference", *(["grads"] if phase == "step" else [])
            for holding in names:
                held = round(GIB * last.get(f"device_gib/{phase}/{holding}", 0.0))
                assert round(GIB * written["phases"][phase]["device_gib"].get(holding, 0.0)) == held, (
                    name,
                    phase,
                    holding,
                )
    moved = json.loads((tmp_path / "tight" / "plan.json").read_text())["settings"]
    assert any("memory" in setting or "optimizer" in setting for setting in moved)
    assert bits["tight"] == bits["device"]


def planned(rank: int, config: GrpoConfig) -> tuple[float, object]:
    """The host memory that a rank plans for, where each finds another, and what it chooses."""
    import torch

    from ebbtide.launch.join import join
    from ebbtide.planner import run_plan

    os.environ["MASTER_PORT"] = str(json.loads(os.environ["PORTS"])[0])
    run_plan.free_host_bytes = lambda: (1 + rank) * GIB  # type: ignore[attr-defined]
    with join(config) as (comm, _):
        plan = run_plan.plan_run(config, torch.device("cpu"), None, comm, print)
        assert plan is not None
        return plan.machine.host_gib, plan.config.model_dump()


def test_all_ranks_choose_alike_for_the_least_that_any_has(tmp_path) -> None:
    (first, mine), (second, theirs) = together(
        2, planned, config_of(tmp_path / "run", **{"memory.budget_gib": 0.086, "loss.kl": {}})
    )
    assert first == second == 1.0
    assert mine == theirs


# Every family without adapters, and those that may have some with them.
WITH_ADAPTERS = [(name, lora) for name in FAMILIES for lora in (False, True) if not (lora and name == "qwen3_moe")]


def planned_config(name: str, lora: bool) -> GrpoConfig:
    changes = {**family(name), "model.scratch.layers": 3, "model.scratch.tied": name == "qwen3"}
    return GrpoConfig.model_validate(merged(TINY, {**changes, **({"model.lora": {"rank": 5}} if lora else {})}))


def parts(rank: int, meshes: list[tuple[int, int, int]]) -> dict[object, object]:
    """Parameters that the first of many ranks has, and the collectives of passes: none of the others is there, and
    nothing is sent."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from ebbtide.checkpoint.initial_model import load_initial
    from ebbtide.parallel.dtensor import local
    from ebbtide.policy.datum import trajectory
    from ebbtide.policy.losses import build_loss
    from ebbtide.policy.policy import Policy
    from ebbtide.progress import no_progress

    found: dict[object, object] = {}
    for mesh in meshes:
        copies, shards, tensor = mesh
        dist.init_process_group("fake", rank=0, world_size=copies * shards * tensor, store=FakeStore())
        made = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard", "tensor"))
        for name, lora in WITH_ADAPTERS:
            if name == "qwen3_moe" and tensor > 1:
                continue
            config = planned_config(name, lora)
            policy = Policy(load_initial(config, torch.device("cpu")), config)
            policy.shard(made, torch.device("cpu"))
            numbers = [0, 0]
            for weight in policy.model.parameters():
                numbers[weight.requires_grad] += local(weight).numel()
            found[mesh, name, lora] = numbers
            if name != "llama":
                continue
            samples = [trajectory([1] * 3, [2] * 4, [-5.0] * 4, advantage=1.0, weight=1.0)] * 2
            for what, work in (("forward", policy.forward_only), ("update", policy.forward_backward)):
                with CommDebugMode() as seen:
                    work(samples, build_loss(config.loss), no_progress)
                found[mesh, what, lora] = {
                    str(kind).split(".")[-1].strip("_"): count for kind, count in seen.get_comm_counts().items()
                }
        dist.destroy_process_group()
    return found


@pytest.mark.slow
def test_parts_and_collectives_are_those_that_ranks_have() -> None:
    meshes = [(1, 3, 1), (1, 40, 1), (2, 2, 1), (1, 1, 2), (2, 2, 2)]
    (found,) = together(1, parts, meshes)
    layers = 3
    for mesh in meshes:
        copies, shards, tensor = mesh
        for name, lora in WITH_ADAPTERS:
            if (mesh, name, lora) in found:
                shape = find_shape(planned_config(name, lora).model)
                predictor = Predictor(
                    shape, machine_for("h200", None, None, None), sharing=MeshShape(copies * shards, tensor, copies, 1)
                )
                own = predictor._rank
                wanted = [own.parameters, own.trained] if lora else [0, own.parameters]
                assert found[mesh, name, lora] == wanted, (mesh, name, lora)
        for lora in (False, True):
            gathered = {"allgather_base": layers + 1} if shards > 1 else {}
            joined = {"all_reduce": ALLREDUCES_FORWARD * layers} if tensor > 1 else {}
            assert found[mesh, "forward", lora] == gathered | joined, mesh
            # With adapters nothing outside the blocks is reduced.
            reduced = layers if lora else layers + 1
            gathered = {"allgather_base": 2 * layers + 1, "reduce_scatter_base": reduced} if shards > 1 else {}
            sums = (ALLREDUCES_FORWARD + ALLREDUCES_BACKWARD) * layers
            if (
                lora
            ):  # One for each adapter, and none for the inputs of the first block's three, which need no gradient.
                sums += 7 * layers - 3
            joined = {"all_reduce": sums} if tensor > 1 else {}
            copied = {"allreduce": reduced} if copies > 1 else {}
            assert found[mesh, "update", lora] == gathered | joined | copied, mesh


def test_a_budget_below_the_least_of_a_rank_is_refused(tmp_path) -> None:
    with pytest.raises(AssertionError, match="The minimum is"):
        together(2, trained, [config_of(tmp_path / "run", **{"memory.budget_gib": 1e-6})])
