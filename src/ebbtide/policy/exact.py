"""Exact mode (`rollout.exact`): the log-prob that the sampler records for a token is the trainer's, to the bit.

Both run the same fused blocks, with attention in one order of keys (model/attention_kernels.py), matmuls that do not
split their inner dimension, and log-probs reduced by one kernel. The backward is as in any run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.config.model import resolve_dtype
from ebbtide.config.planner_keys import with_changes
from ebbtide.errors import UserError
from ebbtide.model.attention_sizes import MOST_SPLITS, SPLIT
from ebbtide.policy.losses import build_loss, loss_head
from ebbtide.system.gpu import HOPPER, generation

if TYPE_CHECKING:
    from ebbtide.config.root import Config
    from ebbtide.policy.policy import Policy

NOT_FUSED = "the model's blocks are not fused"
LONGEST = MOST_SPLITS * SPLIT - 128
"""Tokens of a sequence: in decode, longer ones have larger splits. Prompt and completion are rounded up to blocks."""


def decide_exact(
    config: Config, device: torch.device, ranks: int, *, is_fused: Callable[[], bool]
) -> tuple[Config, str]:
    """(the config with `rollout.exact` decided, where it is null; why it is off then). `is_fused` tells whether the
    model's blocks will be fused, as far as its config says."""
    if config.rollout.exact is not None:
        return config, ""
    why = _why_not_run(config, device, ranks) or ("" if is_fused() else NOT_FUSED)
    return with_changes(config, {"rollout.exact": not why}), why


def why_not_exact(policy: Policy, config: Config, ranks: int) -> str:
    """Why the log-probs of a policy cannot have the bits of the sampler's; empty if they can."""
    return _why_not_run(config, policy.device, ranks) or ("" if policy.fused is not None else NOT_FUSED)


def make_exact(policy: Policy, *, on: bool = True) -> None:
    """Gives a policy's log-probs the bits of the sampler's. Both are to run in a context `without_split_k`."""
    if policy.fused is not None:
        policy.fused.exact = on


def _why_not_run(config: Config, device: torch.device, ranks: int) -> str:
    rollout = config.rollout
    if not isinstance(config, GrpoConfig):
        return f"`algorithm: {config.algorithm}` does not train on the log-probs that are recorded"
    if rollout.engine != "paged":
        return f"`rollout.engine: {rollout.engine}` computes with kernels of its own"
    if rollout.replay is not None:
        return "`rollout.replay` reads log-probs from a file"
    if config.max_sequence_tokens > LONGEST:
        return f"sequences of this run may have more than {LONGEST:,} tokens"
    if loss_head(build_loss(config.loss)) is not None:
        return f"`loss.kind: {config.loss.kind}` computes log-probs of its own"
    if ranks > 1:
        return "it needs one GPU that trains and samples, and this run has several ranks"
    if device.type != "cuda":
        return "it needs a GPU"
    if resolve_dtype(config.model.dtype, device.type) != "bfloat16":
        return "it needs `model.dtype: bfloat16`"
    if generation(device) != HOPPER:
        return "matmuls of few and of many rows have the same bits only on GPUs of the Hopper generation"
    return ""


def check_exact(figures: dict[str, float]) -> None:
    """Stops a run whose first update of a step, on tokens that the same weights sampled, found other log-probs."""
    off = figures.get("mismatch_max", 0.0)
    if off > 0:  # Log-probs that are not numbers have other causes: such an update is skipped.
        raise UserError(
            f"`rollout.exact`: the trainer's log-prob of a token is {off:.3g} nats from the sampler's, and they"
            " should be equal to the bit. This is a bug in a kernel: please report it with the model, the GPU and the"
            " version of torch. To continue without exact log-probs, set `rollout.exact: false`"
        )
