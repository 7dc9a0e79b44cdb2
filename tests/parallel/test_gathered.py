"""The model that a rank generates with: what it has of the weights that train."""

import json
import os
from datetime import timedelta

import pytest
import torch
from ranks import together
from torch.distributed import HashStore

from conftest import TINY, merged
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.config.parallel import ParallelConfig
from patience import PATIENCE


def twins(rank: int, config: GrpoConfig) -> tuple[set[str], set[str]]:
    """Names of weights that are the trained ones themselves, before and after those changed; in between all are the
    whole ones."""
    from ebbtide.launch.join import join
    from ebbtide.model.load import load_model
    from ebbtide.parallel.dtensor import local
    from ebbtide.policy.policy import Policy
    from ebbtide.rollout.weights.build import shard_policy
    from ebbtide.rollout.weights.gathered import GatheredWeights

    os.environ["MASTER_PORT"] = str(json.loads(os.environ["PORTS"])[0])
    cpu = torch.device("cpu")
    with join(config) as (comm, _):
        policy = Policy(load_model(config, comm.load_device(cpu)), config, comm)
        whole = shard_policy(policy, comm, None, cpu, "gathered")
        assert isinstance(whole, GatheredWeights)

        def same() -> set[str]:
            pairs = zip(whole._model.named_parameters(), policy.model.parameters(), strict=True)
            return {
                name
                for (name, twin), weight in pairs
                if twin.untyped_storage().data_ptr() == local(weight).untyped_storage().data_ptr() != 0
            }

        before = same()
        for change in (1.0, 0.0):
            with whole.materialized() as model:
                policy.verify(model)  # FSDP's own first pass
                for twin, weight in zip(model.parameters(), policy.model.parameters(), strict=True):
                    assert torch.equal(twin, weight.full_tensor())
                    local(weight).add_(change)  # as the optimizer writes
        return before, same()


@pytest.mark.parametrize(
    ("parallel", "all_here"),
    [
        pytest.param({"data": 2, "replicate": 2}, {"embed", "norm", "proj"}, marks=pytest.mark.slow),
        ({"gpus": 2, "tensor": 2}, {"embed", "norm"}),
        pytest.param({"gpus": 2}, set(), marks=pytest.mark.slow),
    ],
)
def test_what_a_rank_has_whole_it_generates_with_as_it_is(parallel, all_here) -> None:
    config = GrpoConfig.model_validate(merged(TINY, {"parallel": parallel}))
    for before, after in together(2, twins, config):
        assert before == after
        assert {kind for kind in ("embed", "norm", "proj") if any(kind in name for name in before)} == all_here


def streams(rank: int, config: GrpoConfig) -> list[bool]:
    """Whether each of FSDP's is the one that computes, after its first pass."""
    from ebbtide.model.load import load_model
    from ebbtide.parallel.comm import DistributedComm
    from ebbtide.policy.policy import Policy
    from ebbtide.rollout.weights.build import shard_policy

    cpu = torch.device("cpu")
    with DistributedComm(
        ParallelConfig(), cpu, HashStore(), rank=0, size=1, timeout=timedelta(seconds=PATIENCE)
    ) as comm:
        policy = Policy(load_model(config, cpu), config, comm)
        with shard_policy(policy, comm, None, cpu, "gathered").materialized() as model:
            policy.verify(model)
        context = policy.module._get_fsdp_state()._comm_ctx
        return [
            stream is torch.cpu.current_stream() for name, stream in vars(context).items() if name.endswith("_stream")
        ]


def test_one_rank_computes_on_one_stream() -> None:
    [same] = together(1, streams, GrpoConfig.model_validate(TINY))
    assert len(same) >= 4
    assert all(same)
