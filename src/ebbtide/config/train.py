"""The section `train`: how the data of a step become updates."""

from __future__ import annotations

from typing import Literal

from ebbtide.config.base import Count, Section


class TrainConfig(Section):
    """How the data of a step become updates."""

    steps: Count = 100
    """Steps of the run. One of RL generates, scores and trains; one of SFT or DPO is one update."""

    minibatches: Count = 1
    """Optimizer steps per pass over the samples of one step (RL and distillation)."""

    epochs: Count = 1
    """Passes over the samples of one step (RL and distillation)."""

    microbatch_tokens: Count = 16384
    """Tokens per forward and backward; sequences are packed into a micro-batch without padding (sequence packing)."""

    head_chunk_tokens: Count = 2048
    """Tokens per chunk of the output head, whose logits exist at the same time: its largest tensor is
    [head_chunk_tokens, vocabulary]."""

    @property
    def mixes_shares(self) -> bool:
        """Whether the updates of a step cut its data anew, so that a rank trains on other data than those of which it
        computed values before."""
        return self.minibatches > 1


Rehearsal = Literal["built", "none"]
"""Whether a rehearsal (dry run) builds an optimizer."""
