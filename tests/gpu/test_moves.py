"""Moves on a real GPU: streams, freed memory, stable addresses, and the same bits under any plan."""

import json

import pytest
import torch

from conftest import TINY, merged
from ebbtide.algorithms.loop import train
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.config.memory import MemoryConfig
from ebbtide.memory.device_budget import enforce_budget
from ebbtide.memory.residency import Residency
from ebbtide.report.report import Report
from plans import plan_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def lean() -> Residency:
    return Residency(plan_of(MemoryConfig(preset="lean")), torch.device("cuda", 0))


def test_bytes_survive_many_moves_while_compute_runs() -> None:
    residency = lean()
    tensors = [torch.randn(3_000_000 + i, device="cuda") for i in range(6)]
    truth = [tensor.clone() for tensor in tensors]
    residency.register("moments", tensors)
    residency.pin()
    noise = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        noise = torch.tanh(noise @ noise)
        residency.enter("generate")
        # Takes the memory that was just freed, and writes to it at once: a copy not yet over would be spoilt.
        junk = [torch.full_like(tensor, 7.0) for tensor in truth]
        noise = torch.tanh(noise @ noise)
        del junk
        residency.enter("train")
        residency.enter("step")
        with residency.writing("moments"):
            for tensor, true in zip(tensors, truth, strict=True):
                tensor.mul_(1.001).add_(0.5)
                true.mul_(1.001).add_(0.5)
    assert all(torch.equal(a, b) for a, b in zip(tensors, truth, strict=True))
    residency.__exit__()


def test_evicted_memory_is_given_back_and_other_addresses_stay() -> None:
    residency = lean()
    weights = [torch.randn(1000, 1000, device="cuda")]
    bucket = torch.randn(64 * 2**20, device="cuda")
    residency.register("weights", weights)
    residency.register("moments", [bucket])
    residency.pin()
    address, before = weights[0].data_ptr(), torch.cuda.memory_allocated()
    residency.enter("generate")
    torch.cuda.synchronize()
    assert before - torch.cuda.memory_allocated() == bucket.untyped_storage().nbytes() + 256 * 2**20
    residency.enter("step")
    residency.need("moments")
    assert torch.cuda.memory_allocated() == before
    assert weights[0].data_ptr() == address
    assert residency.arena._slabs[0].is_pinned()
    residency.__exit__()


def test_room_that_is_still_being_copied_away_is_waited_for_and_counted() -> None:
    residency = lean()
    with enforce_budget(residency.device, 3.0):
        residency.register("moments", [torch.ones(2**31, dtype=torch.uint8, device="cuda")])
        residency.pin()
        residency.enter("generate")
        residency.make_room(2**29)  # is there
        assert residency.mover.drain().exposed == 0
        before = torch.cuda.memory_stats()["num_alloc_retries"]
        residency.make_room(2**31)
        assert residency.mover.drain().exposed > 0
        taken = torch.empty(2**31, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_stats()["num_alloc_retries"] == before
        del taken
    residency.__exit__()


def test_a_prefetch_that_nobody_waits_for_leaves_whole() -> None:
    residency = lean()
    bucket = torch.arange(32 * 2**20, device="cuda", dtype=torch.float32)
    residency.register("reference", [bucket], frozen=True)
    residency.pin()
    for _ in range(5):
        residency.enter("generate")
        residency.enter("score")  # fetched ahead, never used
        residency.enter("train")  # sent away while it may still be arriving
        junk = torch.full((32 * 2**20,), -1.0, device="cuda")
        del junk
    residency.enter("logprob")
    residency.need("reference")
    assert torch.equal(bucket, torch.arange(32 * 2**20, device="cuda", dtype=torch.float32))
    residency.__exit__()


@pytest.mark.parametrize(
    "away",
    [
        {"preset": "lean"},
        {"offload": {"generate": ["moments", "master"], "logprob": ["moments"]}},
        {"activations": {"preset": "offload", "keep_last": 0, "minimum_kib": 0}},
        {
            "activations": {
                "recompute": ["attn_norm", "mlp_fc2"],
                "offload": ["mlp_act"],
                "keep_last": 0,
                "minimum_kib": 0,
                "on_slow_link": "ignore",
            }
        },
    ],
)
def test_a_grpo_run_is_the_same_to_the_bit_under_any_plan(tmp_path, away) -> None:
    changes = {
        "device": "cuda",
        "deterministic": True,
        "train.steps": 3,
        "train.minibatches": 2,
        "loss.kl": {"coefficient": 0.1},
        "rollout.group_size": 8,
        "advantage.drop_zero_std_groups": False,
    }
    ends = []
    for name, memory in (("keep", {}), ("moved", away)):
        config = GrpoConfig.model_validate(
            merged(TINY, {**changes, "memory": memory, "run.folder": str(tmp_path / name)})
        )
        with Report(config, name) as report:
            weights = train(config, report).model.state_dict()
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        ends.append((weights, [(line["loss"], line["grad_norm"], line["reward"]) for line in lines]))
    torch.use_deterministic_algorithms(False)
    assert ends[0][1] == ends[1][1]
    assert all(torch.equal(ends[0][0][key], ends[1][0][key]) for key in ends[0][0])
