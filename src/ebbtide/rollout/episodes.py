"""Episodes: turns of the policy and of an environment, and the data that are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ebbtide.policy.datum import Datum
from ebbtide.rollout.engine import Completion
from ebbtide.rollout.prompts import Prompt
from ebbtide.tasks.score_message import ScoreResult


@dataclass(frozen=True)
class Turn:
    """A turn of the policy, and what the environment answered."""

    completion: Completion
    answer: str
    answer_tokens: int
    """Tokens of the answer that the policy has read: 0 after the last turn."""
    reward: float = 0.0
    calls: list[str] = field(default_factory=list)
    """The tools that were called, by name."""
    failed_calls: int = 0


@dataclass
class Branch:
    """A sequence of tokens as the policy had it in its context, and which of them it sampled. An episode has one, and
    another one from where a chat template rewrote the history."""

    tokens: list[int]
    sampled: list[int] = field(default_factory=list)
    """Positions of the sampled tokens."""
    logprobs: list[float] = field(default_factory=list)
    """The sampler's log-probs of these."""
    turns: list[int] = field(default_factory=list)
    """The turn of the episode in which each of them was sampled."""

    def add(self, turn: Completion, number: int) -> None:
        """Appends a turn of the policy, the one of this number in its episode."""
        self.turns += [number] * len(turn.tokens)
        self.sampled += range(len(self.tokens), len(self.tokens) + len(turn.tokens))
        self.tokens += turn.tokens
        self.logprobs += turn.logprobs


@dataclass(frozen=True)
class Episode:
    """An episode that has ended."""

    prompt: Prompt
    turns: list[Turn]
    branches: list[Branch]
    finish: Literal["stop", "length"]
    """`length`: a limit of turns or tokens has ended it."""
    scored: ScoreResult | None
    """None: the environment gives no reward, and the task's scorer scores the last turn."""
    seconds: float = 0.0
    """How long it waited for its environment."""

    @property
    def last_turn(self) -> tuple[list[int], Completion]:
        """(the tokens before the last turn of the policy, that turn)."""
        if not self.turns:
            return self.prompt.tokens, Completion([], [], [], self.finish, "")
        turn, branch = self.turns[-1].completion, self.branches[-1]
        first = branch.sampled[-len(turn.tokens)] if turn.tokens else len(branch.tokens)
        return branch.tokens[:first], turn

    def turn_rewards(self, scored: ScoreResult) -> list[float]:
        """The rewards of its turns. What it gained at its end, or lost by a failure, is the last turn's."""
        rewards = [turn.reward for turn in self.turns] if scored.failure is None else [0.0] * len(self.turns)
        return [*rewards[:-1], scored.value - sum(rewards[:-1])] if rewards else []

    def completion(self) -> Completion:
        """All that was sampled, as one completion."""
        turns = [turn.completion for turn in self.turns]
        return Completion(
            [token for turn in turns for token in turn.tokens],
            [value for turn in turns for value in turn.logprobs],
            [value for turn in turns for value in turn.plain_logprobs],
            self.finish,
            "".join(turn.text for turn in turns),
        )


def episode_data(branches: Sequence[Branch], advantages: Sequence[float], weight: float) -> list[Datum]:
    """A datum for each branch, from the advantages of the episode's turns. Sampled tokens alone carry loss, each of
    them in one branch: what a later branch repeats of an earlier one is context there. All have the same weight, so
    that an episode counts as much with forks as without."""
    return [
        Datum(
            branch.tokens,
            branch.sampled,
            {
                "advantages": [advantages[turn] for turn in branch.turns],
                "weights": weight,
                "rollout_logprobs": branch.logprobs,
            },
        )
        for branch in branches
        if branch.sampled
    ]


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """The metrics of episodes, for metrics.jsonl: means over episodes."""
    turns = [turn for episode in episodes for turn in episode.turns]
    totals = {
        "turns": len(turns),
        "tool_calls": sum(len(turn.calls) for turn in turns),
        "tool_call_failures": sum(turn.failed_calls for turn in turns),
        "environment_tokens": sum(turn.answer_tokens for turn in turns),
        "environment_seconds": sum(episode.seconds for episode in episodes),
        "branches": sum(len(episode.branches) for episode in episodes),
    }
    return {name: total / len(episodes) for name, total in totals.items()}
