"""The section `train`: how a batch of rollouts becomes updates."""

from __future__ import annotations

from typing import Literal

from ebbtide.config.base import Count, Section


class TrainConfig(Section):
    """How a batch of rollouts becomes updates."""

    steps: Count = 100
    """RL steps, each of which generates, scores and trains."""

    minibatches: Count = 1
    """Optimizer steps per pass over the rollouts of one RL step."""

    epochs: Count = 1
    """Passes over the rollouts of one RL step."""

    microbatch_tokens: Count = 16384
    """Tokens per forward and backward; sequences are packed into a micro-batch without padding (sequence packing)."""

    head_chunk_tokens: Count = 2048
    """Tokens per chunk of the output head, whose logits exist at the same time: its largest tensor is
    [head_chunk_tokens, vocabulary]."""


Rehearsal = Literal["built", "none"]
"""Whether a rehearsal (dry run) builds an optimizer."""
