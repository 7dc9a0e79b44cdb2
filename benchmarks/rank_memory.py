"""The device memory of one rank of many, measured on one GPU and held against the plan's.

    python benchmarks/rank_memory.py

The rank's part is built as in a run, among ranks that are not there: torch's `fake` backend, whose collectives send
nothing and take their room. What is computed means nothing; what it takes does, and so does the host's time for
gathering (`generate: seconds`, in which nothing is sampled and nothing sent).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Row, save
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from ebbtide.config import load
from ebbtide.config.loss import LossConfig
from ebbtide.memory.residency import Residency
from ebbtide.model.load import load_model
from ebbtide.model.shape import find_shape
from ebbtide.model.workload import Workload
from ebbtide.optim.adamw import AdamW
from ebbtide.parallel.comm import Comm
from ebbtide.parallel.costs import MeshShape
from ebbtide.parallel.dtensor import local
from ebbtide.planner.holdings import plan_holdings
from ebbtide.planner.predict import LIBRARIES, Predictor
from ebbtide.policy.datum import trajectory
from ebbtide.policy.losses import build_loss
from ebbtide.policy.policy import Policy
from ebbtide.progress import no_progress
from ebbtide.rollout.weights.build import shard_policy
from ebbtide.system.machine import machine_for
from ebbtide.system.units import GIB

CONFIG = str(Path(__file__).parent / "configs" / "qwen3-1.7b.yaml")
PROMPT, NEW, SAMPLES = 126, 256, 86  # of one rank: three micro-batches of at most 16,384 tokens
PHASES = ("generate", "logprob", "train", "step")
SAMPLING_ROWS = ("kv_cache", "activations", "workspace")
RECOMPUTE = ["memory.activations.preset=recompute"]
CASES: dict[str, tuple[tuple[int, int, int], list[str]]] = {
    "8 ranks, keep": ((1, 8, 1), []),
    "8 ranks, recompute": ((1, 8, 1), RECOMPUTE),
    "64 ranks, recompute": ((1, 64, 1), RECOMPUTE),
    "2 copies of 4 ranks, recompute": ((2, 4, 1), RECOMPUTE),
}
"""Name -> (copies, shards, tensor), settings."""


def peaks(mesh: tuple[int, int, int], options: list[str]) -> Iterator[tuple[str, float, int, int]]:
    """(phase, seconds, bytes at its peak, bytes predicted)."""
    copies, shards, tensor = mesh
    config = load(CONFIG, [*options, "checkpoint=null"])
    device = torch.device("cuda", 0)
    gc.collect()
    torch.cuda.empty_cache()  # of the case before: each is to be as if alone
    dist.init_process_group("fake", rank=0, world_size=copies * shards * tensor, store=FakeStore())
    try:
        comm: Any = Comm()
        comm.mesh = init_device_mesh("cuda", mesh, mesh_dim_names=("replicate", "shard", "tensor"))
        with Residency(plan_holdings(config), device) as residency:
            loaded = load_model(config, device)
            policy = Policy(loaded, config, comm)
            whole = shard_policy(policy, comm, None, device, "gathered")
            policy.fuse_blocks()
            residency.register("weights", [local(parameter) for parameter in policy.model.parameters()])
            optimizer = AdamW(policy.model.named_parameters(), config.optimizer, residency)
            policy.place_activations(residency, {})
            optimizer.discard_grads()
            samples = [
                trajectory([1] * PROMPT, [2] * NEW, [-5.0] * NEW, advantage=1.0, weight=1 / NEW) for _ in range(SAMPLES)
            ]
            for _ in range(2):  # the first makes what stays
                with residency.phase("generate"), whole.materialized():
                    pass
                with residency.phase("logprob"):
                    policy.forward_only(samples, build_loss(LossConfig()), no_progress)
                with residency.phase("train"):
                    policy.forward_backward(samples, build_loss(LossConfig()), no_progress)
                with residency.phase("step"):
                    optimizer.step(1e-6)
                figures = residency.meter.drain()
        data = copies * shards
        predictor = Predictor(
            find_shape(config.model), machine_for("h200", None, 2000, None), sharing=MeshShape(data, tensor, copies, 8)
        )
        # so that there is a logprob phase
        looked = config.model_copy(update={"train": config.train.model_copy(update={"epochs": 2})})
        foretold = predictor.predict(looked, Workload(1, SAMPLES * data, PROMPT, NEW, NEW, NEW), 130 * GIB).phases
        for phase in PHASES:
            mine = foretold[phase]
            # Nothing is sampled here: of generate, there is only what is gathered for it.
            absent = sum(mine.device[row] for row in SAMPLING_ROWS) - LIBRARIES if phase == "generate" else 0
            yield phase, figures[f"seconds/{phase}"], int(figures[f"peak_gib/{phase}"] * GIB), mine.peak - absent
    finally:
        dist.destroy_process_group()


def main() -> None:
    rows: list[Row] = []
    for label, (mesh, options) in CASES.items():
        for phase, seconds, measured, foretold in peaks(mesh, options):
            rows += [
                Row(label, f"{phase}: peak", measured / GIB, "GiB"),
                Row(label, f"{phase}: peak predicted", foretold / GIB, "GiB"),
                Row(label, f"{phase}: peak off by", 100 * (foretold / measured - 1), "%"),
                Row(label, f"{phase}: seconds", seconds, "s"),
            ]
    save("rank_memory", rows)


if __name__ == "__main__":
    main()
