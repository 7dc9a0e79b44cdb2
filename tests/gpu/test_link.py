"""The weights' way to ranks that only generate, on a GPU: NCCL, in a group that torch has not registered. Here one
rank sends to none: two ranks need two GPUs."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ebbtide.rollout.weights.channel import RolloutChannel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_weights_go_over_nccl() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    link = RolloutChannel(dist.HashStore(), 0, 1, 0, device, timedelta(minutes=1))
    weights = [
        torch.nn.Parameter(torch.full((size,), float(size), dtype=torch.bfloat16, device=device))
        for size in (3, 5, 100)
    ]
    link.send(weights, bucket=20)
    for weight in weights:
        assert torch.equal(weight, torch.full_like(weight, len(weight)))
    link.end(stopped=False)
