"""64 episodes, of which one has an environment that misbehaves."""

from collections.abc import Sequence

from ebbtide.config.environment import EnvironmentConfig
from ebbtide.rollout.chat_turns import ChatTurns
from ebbtide.rollout.encoder import Encoder
from ebbtide.rollout.engine import SamplingParams
from ebbtide.rollout.episode_runner import EpisodeRunner
from ebbtide.rollout.episodes import Episode
from ebbtide.tasks.environment_pool import EnvironmentPool
from ebbtide.tasks.task import Problem
from ebbtide.worker import Worker
from misbehaving_environment import FAULTS

EPISODES, BAD = 64, 20


def play(worker: Worker, fault: str, *, lockstep: bool) -> list[Episode]:
    """64 episodes, of which one has the seed of a fault."""
    config = EnvironmentConfig(
        object="misbehaving_environment:Unruly",
        options={"faults": fault != "none"},
        timeout_s=2.0,
        max_turn_tokens=6,
        max_concurrent=24,
    )
    seeds = [1000 + number for number in range(EPISODES)]
    seeds[BAD] = FAULTS.index(fault)
    with EnvironmentPool(config) as pool, worker.phase("generate"):
        turns = ChatTurns(Encoder(worker.policy.tokenizer, templated=True))
        rows = worker.policy.vocabulary_rows
        runner = EpisodeRunner(
            config, worker.config.rollout, pool, turns, tool_format="json", rows=rows, lockstep=lockstep
        )
        problems = [Problem([], metadata={"seed": seed}) for seed in seeds]
        groups = runner.run(
            worker.engine, problems, [[number] for number in range(EPISODES)], SamplingParams(6), lambda done, of: None
        )
    return [episode for (episode,) in groups]


def check_others(found: Sequence[Episode], faultless: Sequence[Episode], fault: str) -> None:
    """The bad one has failed, and all others are those of a run without faults."""
    assert len(found) == EPISODES
    for number, (one, other) in enumerate(zip(found, faultless, strict=True)):
        if number == BAD:
            assert one.scored is not None
            assert one.scored.value == 0.0
            assert one.scored.failure == {"hang": "timeout", "crash": "crash", "flood": "too_large"}.get(fault, "error")
            assert len(one.turns) == 2  # what was sampled before stays
        else:
            assert [branch.tokens for branch in one.branches] == [branch.tokens for branch in other.branches]
            assert one.scored == other.scored
            assert one.scored is not None
            assert one.scored.failure is None
            assert [turn.answer for turn in one.turns] == [turn.answer for turn in other.turns]
    assert len({one.scored.value for one in faultless if one.scored is not None}) > 1
