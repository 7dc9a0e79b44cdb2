"""An episode under way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ebbtide.rollout.chat_turns import Conversation
from ebbtide.rollout.engine import Completion
from ebbtide.rollout.episodes import Branch, Turn
from ebbtide.rollout.prompts import Prompt
from ebbtide.rollout.turn_sessions import Sequenced
from ebbtide.tasks.environment_pool import EnvironmentProcess
from ebbtide.tasks.policy_handle import Asked
from ebbtide.tasks.task import Problem


@dataclass(eq=False)
class Play:
    """An episode under way."""

    place: tuple[int, int]
    """Its group, and its place in the group."""
    problem: Problem
    seed: int
    process: EnvironmentProcess
    prompt: Prompt
    is_reset: bool = False
    """Whether its environment has been reset."""
    limit: int = 0
    """The most tokens of its sequence."""
    conversation: Conversation | None = None
    sequence: Sequenced | None = None
    branches: list[Branch] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    turn: Completion | None = None
    """The turn that its environment has not answered yet."""
    asked: Asked | None = None
    """What its environment has asked for last, if that drives the episode."""
    refusals: int = 0
    """How often such an environment was told that it gets no more turns."""
    finish: Literal["stop", "length"] = "stop"
    is_over: bool = False
    """Whether only its outcome is missing."""
