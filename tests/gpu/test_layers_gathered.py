"""Weights gathered layer by layer on a GPU, behind compute: one rank gathers from itself, over NCCL, and samples
what the whole model samples."""

import copy
import os
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from conftest import family
from ebbtide.model.load import load_model
from ebbtide.parallel.comm import Comm
from ebbtide.rollout.engine import Request, SamplingParams
from ebbtide.rollout.paged.engine import PagedEngine
from ebbtide.rollout.weights.layerwise import LayerwiseGather

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

ASKED = [Request([3, 4, 5], list(range(40))), Request([6], [6]), Request([7, 8, 9, 10, 11, 3, 4], [7, 8])]
# so that a gather takes as long as a layer
BIG = {"model.scratch.hidden": 512, "model.scratch.mlp": 2048, "model.scratch.layers": 7}


class OneRank(Comm):
    """Says once that another has a pass to make."""

    asked = 0

    def any(self, mine: bool) -> bool:
        self.asked += not mine
        return mine or self.asked == 1


@pytest.fixture
def mesh():
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    dist.init_process_group("cpu:gloo,cuda:nccl")
    yield init_device_mesh("cuda", (1, 1, 1), mesh_dim_names=("replicate", "shard", "tensor"))
    dist.destroy_process_group()


# fused blocks, which no hook of a module reaches, and the model's own
@pytest.mark.parametrize(("name", "fused"), [("qwen3", True), ("gemma", True), ("qwen3", False)])
def test_layers_that_come_behind_compute_are_whole_when_they_are_used(tiny, mesh, name, fused, monkeypatch) -> None:
    if not fused:
        monkeypatch.setattr("ebbtide.rollout.paged.cuda_runner.can_fuse", lambda model: False)
    loaded = load_model(tiny({"device": "cuda", "model.dtype": "bfloat16", **family(name), **BIG}))
    twin = copy.deepcopy(loaded.model)
    for weight in twin.parameters():
        weight.requires_grad_(False)
    pairs = [
        (weight, distribute_tensor(source.detach(), mesh["shard"], [Shard(0)]))
        for weight, source in zip(twin.parameters(), loaded.model.parameters(), strict=True)
    ]
    layers = LayerwiseGather(twin, pairs, OneRank(), mesh, timedelta(minutes=1))
    assert {id(weight) for weight, _ in layers.outside_layers} == {
        id(weight) for key, weight in twin.named_parameters() if "layers" not in key
    }
    wanted = PagedEngine(loaded, 16)
    with layers.materialized():
        engine = PagedEngine(replace(loaded, model=twin), 16)
    assert engine._runner.is_fused == wanted._runner.is_fused == fused
    assert not engine._runner._captures
    assert wanted._runner._captures
    wanted._runner._captures = False  # the same kernels on both sides
    for sampling in (SamplingParams(40, ignore_eos=True), SamplingParams(30, 0.7, top_p=0.9)):
        with layers.materialized():
            found = engine.generate(ASKED, sampling, lambda *_: None)
            layers.join_remaining_passes()
        assert found == wanted.generate(ASKED, sampling, lambda *_: None)
    assert layers._comm.asked == 3
    assert all(buffer.untyped_storage().nbytes() == 0 for buffer in layers._memory)
