"""The section `report`: what is printed and logged."""

from __future__ import annotations

from typing import Literal

from ebbtide.config.base import Natural, Section


class WandbConfig(Section):
    """Weights & Biases (package `wandb`)."""

    project: str
    """Name of the W&B project."""

    mode: Literal["online", "offline"] = "online"
    """`offline` writes to the run folder only."""


class ReportConfig(Section):
    """What is printed and logged in addition to metrics.jsonl."""

    samples_every: Natural = 20
    """Steps between prints of a few sample completions; 0 prints them at the end only."""

    rollouts: bool = True
    """Write every completion to rollouts.jsonl."""

    token_logprobs: Natural = 65_536
    """Tokens per step whose log-probs are written to rollouts.jsonl as well: whole completions, starting with the
    step's first; 0 is none."""

    wandb: WandbConfig | None = None
    """If set, also log to Weights & Biases."""
