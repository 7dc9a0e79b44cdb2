"""Bytes of activations and seconds of models that were traced (planner/trace.py), and what `memory.activations`
resolves to for them: the counterpart of activation_costs.py and compute_costs.py. Imports no torch.

Blocks are kept, offloaded or recomputed as a whole (whole_blocks.py). Seconds are those of operations, bytes and
kernels that the trace counted, with the constants that were fitted to blocks of the usual structure.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from ebbtide.config.memory import ActivationName, ActivationsConfig
from ebbtide.errors import UserError
from ebbtide.memory.costs import GROUPS_IN_FLIGHT
from ebbtide.model.shape import Shape
from ebbtide.model.traced_shape import TracedShape, Work
from ebbtide.model.workload import MicroBatchSize
from ebbtide.policy import whole_blocks
from ebbtide.policy.activation_costs import ActivationBytes, ActivationPolicy
from ebbtide.policy.compute_costs import ATTENTION, LEAVING_OPS, Speed, overlap
from ebbtide.policy.whole_blocks import WHOLE

# What one kernel and one byte of the trace stand for: the constants of compute_costs.py, divided by what a trace of
# blocks of the usual structure (Qwen3) counts.
HOST_OPS, RECOMPUTED_HOST_OPS = 3.9, 6.0  # Operations of the host per kernel, with recomputed blocks too.
STARTS = 6.7e-6  # Seconds between kernels.
TOUCHED = 1.5  # Bytes that kernels read and write, as a multiple of what was counted.


def _traced(shape: Shape) -> TracedShape:
    assert isinstance(shape, TracedShape), "these are the costs of traced shapes"
    return shape


@cache
def activation_bytes(shape: Shape, itemsize: int, choice: ActivationPolicy, keep_last: int) -> ActivationBytes:
    """The activations of a model under a choice."""
    shape = _traced(shape)
    layers, keep, recompute = shape.layers, shape.keep, shape.recompute
    recomputing = 0
    if choice.recompute:
        recomputing = layers if choice.recompute_blocks is None else min(layers, choice.recompute_blocks)
    saved = [*recompute.saved[:recomputing], *keep.saved[recomputing:]]
    # What can be offloaded of each block: all that it saves, or its input, where it is recomputed from that.
    if WHOLE in choice.offload:
        offloadable = saved
    elif "block_input" in choice.offload:
        offloadable = [*shape.inputs[:recomputing], *[0] * (layers - recomputing)]
    else:
        offloadable = [0] * layers
    offloadable = [min(size, own) for size, own in zip(offloadable, saved, strict=True)]
    there = min(layers, keep_last + GROUPS_IN_FLIGHT)  # The last blocks', and those that are on their way.
    offloaded = sum(offloadable)
    whole = recompute if recomputing == layers else keep
    first = recompute if recomputing else keep
    return ActivationBytes(
        blocks=sum(saved) + first.outside - offloaded + sum(sorted(offloadable)[layers - there :]),
        # With `in_backward` and the gradient of the block's output it makes what the trace has in the first block.
        first_block=first.in_first - whole.in_backward - itemsize * shape.hidden,
        in_backward=whole.in_backward,
        norm_saved=whole.norm_saved,
        in_final_norm=whole.in_final_norm,
        offloaded=sum(offloadable[: max(0, layers - keep_last)]),
    )


def resolve_policy(
    config: ActivationsConfig, shape: Shape, itemsize: int, carried: float, *, gated: bool = True
) -> ActivationPolicy:
    """What `memory.activations` resolves to if the host link carries `carried` bytes per token and block during the
    forward. `gated`: whether the lists are checked against that, as `on_slow_link` says."""
    shape = _traced(shape)
    if shape.has_named_modules and (config.preset == "balanced" or config.keep or config.offload or config.recompute):
        raise UserError(
            f"a plan of {shape.family} knows only the presets keep, recompute and offload of `memory.activations`, with"
            " `recompute_blocks`, and no lists of modules: set one of these"
        )
    sizes: dict[ActivationName, int] = {WHOLE: sum(shape.keep.saved) // shape.layers}
    choice = whole_blocks.choose(config, sizes, carried, shape.layers, f"a model with the blocks of {shape.family}")
    return whole_blocks.fit_link(choice, sizes, carried) if gated and config.on_slow_link == "downgrade" else choice


def activation_options(shape: Shape, balanced: ActivationPolicy) -> list[dict[str, Any]]:
    """The settings of `memory.activations` that a plan tries: recompute some blocks, and all; and that with the blocks'
    inputs offloaded."""
    parts = [math.ceil(shape.layers * share) for share in (0.25, 0.5, 0.75)]
    some = [{"preset": "recompute", "recompute_blocks": count} for count in dict.fromkeys(parts)]
    return [*some, {"preset": "recompute"}, {"preset": "offload"}]


class TracedSpeed(Speed):
    """Predicts seconds of a traced model."""

    def _device(self, work: Work, tokens: float) -> float:
        """Seconds of a pass without attention."""
        rates = self._rates
        return tokens * (work.flops / rates.matmul + TOUCHED * work.touched / rates.copy) + STARTS * work.kernels

    def _attention(self, tokens: float, length: float) -> float:
        return tokens * _traced(self._shape).attention_flops(length) / (ATTENTION * self._rates.matmul)

    def forward(self, tokens: float, length: float) -> float:
        return overlap(self._forward(tokens, length), self.host("forward"))

    def _forward(self, tokens: float, length: float) -> float:
        return self._device(_traced(self._shape).forward, tokens) + self._attention(tokens, length)

    def host(self, kind: str) -> float:
        shape = _traced(self._shape)
        if "forward" in kind:
            return HOST_OPS * shape.forward.kernels / self._rates.host_op
        backward = (shape.recompute if kind == "whole" else shape.keep).backward
        each = RECOMPUTED_HOST_OPS if kind == "whole" else HOST_OPS
        return each * (shape.forward.kernels + backward.kernels) / self._rates.host_op

    def update(
        self, part: MicroBatchSize, length: float, choice: ActivationPolicy, keep_last: int, leaving: float = 0.0
    ) -> tuple[float, float]:
        shape = _traced(self._shape)
        share = 0.0  # of the blocks that are recomputed
        if choice.recompute:
            share = min(shape.layers, choice.recompute_blocks or shape.layers) / shape.layers
        forward = self._forward(part.tokens, length)
        kept, whole = (self._device(one.backward, part.tokens) for one in (shape.keep, shape.recompute))
        device = forward + kept + share * (whole - kept) + (2 + share) * self._attention(part.tokens, length)
        device += self.head(part.completion_tokens, 4 if shape.lora is None else 3)
        offloaded = activation_bytes(shape, self._itemsize, choice, keep_last).offloaded
        exposed = max(0.0, offloaded * part.tokens / self._rates.link_out - forward)
        host = self.host("keep") + share * (self.host("whole") - self.host("keep"))
        host += leaving * shape.trained_tensor_count * LEAVING_OPS / self._rates.host_op
        return overlap(device, host) + exposed, exposed
