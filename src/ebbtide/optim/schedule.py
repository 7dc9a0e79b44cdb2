"""The learning rate of each optimizer step."""

from __future__ import annotations

import math

from ebbtide.config.optimizer import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """The learning rate of optimizer step `step` (0 .. steps - 1): a linear warm-up, then the schedule."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return config.lr
    done = (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps)
    left = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    if config.min_lr is not None:
        return config.min_lr + (config.lr - config.min_lr) * left
    return config.lr * (config.final_lr_fraction + (1 - config.final_lr_fraction) * left)
