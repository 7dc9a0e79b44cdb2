"""Registers the policy's weights as holdings: those that are trained, and the frozen ones beside adapters."""

from __future__ import annotations

from functools import partial

from ebbtide.config.root import Config
from ebbtide.errors import UserError
from ebbtide.memory.residency import Residency
from ebbtide.parallel.dtensor import local
from ebbtide.policy.model_costs import BASE
from ebbtide.policy.policy import Policy
from ebbtide.policy.stream_costs import BLOCKS


def register_weights(policy: Policy, config: Config, residency: Residency) -> None:
    """Blocks of a frozen base are a holding of their own where they are streamed."""
    parameters, lora = list(policy.model.parameters()), config.model.lora is not None
    residency.register("weights", [local(one) for one in parameters if one.requires_grad or not lora])
    if not lora:
        return
    frozen = [one for one in parameters if not one.requires_grad]
    if config.memory.stream_base:
        if policy.fused is None:
            raise UserError("`memory.stream_base` needs fused blocks, and the model's are not fused: remove it")
        parts = [[one for one in block.module.parameters() if not one.requires_grad] for block in policy.fused.blocks]
        residency.register(BLOCKS, [local(one) for part in parts for one in part], frozen=True)
        inside = {id(one) for part in parts for one in part}
        frozen = [one for one in frozen if id(one) not in inside]
        stream = residency.stream(BLOCKS, [[local(one) for one in part] for part in parts])
        for number, block in enumerate(policy.fused.blocks):
            block.needed = partial(stream.need, number)
    residency.register(BASE, [local(one) for one in frozen], frozen=True)
