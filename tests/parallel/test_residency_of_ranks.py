"""Any sequence of phases, plans, exceptions, accumulations and readers keeps every byte of a rank's part, with
FSDP's own backward in between."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from ranks import together

from ebbtide.parallel.dtensor import local
from memory.test_residency import AnyRun


class AnyRank(AnyRun):
    """The weight is one of a layer that two ranks share out; each sees other inputs."""

    def make_weight(self) -> torch.Tensor:
        from torch.distributed.fsdp import fully_shard

        self.layer = torch.nn.Linear(5, 8, bias=False)
        fully_shard(self.layer)
        self.layer.set_gradient_divide_factor(1.0)
        self.layer.set_force_sum_reduction_for_comms(True)
        self.weight = self.layer.weight
        return local(self.weight)

    def grads(self) -> list[torch.Tensor]:
        return [] if self.weight.grad is None else [local(self.weight.grad)]

    def backward(self) -> torch.Tensor:
        # of both ranks, which draw alike; whole numbers add up exactly in any order
        x = torch.randint(-8, 8, (2, 3, 5)).float()
        self.layer(x[dist.get_rank()]).sum().backward()
        # of the sum of all outputs: the same for each of this rank's four rows
        return x.sum((0, 1)).expand(4, 5).clone()


def any_rank(rank: int) -> None:
    """The same sequences on all ranks: drawn from nothing but this function."""
    import json
    import os

    os.environ["MASTER_PORT"] = str(json.loads(os.environ["PORTS"])[0])
    dist.init_process_group("gloo")
    run_state_machine_as_test(
        AnyRank,
        settings=settings(max_examples=20, stateful_step_count=20, deadline=None, derandomize=True, database=None),
    )


@pytest.mark.slow
def test_residency_holds_on_every_rank() -> None:
    together(2, any_rank)
