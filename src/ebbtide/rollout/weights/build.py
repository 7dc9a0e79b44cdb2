"""Chooses the weights that a run generates with."""

from __future__ import annotations

import torch

from ebbtide.config.parallel import RolloutWeightsMode
from ebbtide.parallel.comm import Comm
from ebbtide.policy.policy import Policy
from ebbtide.rollout.weights.channel import RolloutChannel
from ebbtide.rollout.weights.gathered import GatheredWeights
from ebbtide.rollout.weights.remote import RemoteWeights
from ebbtide.rollout.weights.shared import RolloutWeights


def shard_policy(
    policy: Policy, comm: Comm, channel: RolloutChannel | None, device: torch.device, mode: RolloutWeightsMode | None
) -> RolloutWeights:
    """Shards the policy's model over the ranks. `mode` says how they are gathered to generate."""
    if channel is not None:
        return RemoteWeights(policy, channel, comm.mesh, device)
    if comm.mesh is None:
        return RolloutWeights(policy.model)
    return GatheredWeights(policy, comm, comm.mesh, device, by_layer=mode == "layerwise")
