"""The turns of an episode as they stand in rollouts.jsonl."""

from __future__ import annotations

from ebbtide.report.token_spans import TokenSpans
from ebbtide.rollout.episodes import Episode
from ebbtide.tasks.score_message import ScoreResult


def turn_lines(episode: Episode, scored: ScoreResult | None, spans: TokenSpans | None) -> list[dict[str, object]]:
    """A line for each turn: what was sampled, what the environment answered, the tools that were called, and the
    reward. With `spans`, log-probs per token."""
    rewards = episode.turn_rewards(scored) if scored is not None else [turn.reward for turn in episode.turns]
    lines: list[dict[str, object]] = []
    for turn, reward in zip(episode.turns, rewards, strict=True):
        completion = turn.completion
        line: dict[str, object] = {
            "completion": completion.text,
            "answer": turn.answer,
            "reward": reward,
            "calls": turn.calls,
            "failed_calls": turn.failed_calls,
            "tokens": len(completion.tokens),
            "answer_tokens": turn.answer_tokens,
            "finish": completion.finish,
        }
        if spans is not None:
            line["token_chars"] = spans.lengths(completion.tokens, completion.text)
            line["logprobs"] = [round(value, 4) for value in completion.logprobs]
        lines.append(line)
    return lines
