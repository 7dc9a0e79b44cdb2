"""Episodes with slow tools: 512 episodes of 8 turns of 64 tokens, tools that take 0.2 s, 128 sequences decoding at
once.

    python benchmarks/environments.py [small]

episodes: as a run plays them. Every sequence goes on as soon as its tool has answered, from the KV cache that it kept.
lockstep: all 512 tools of a turn are waited for before the next turn. turn by turn: 128 episodes at a time in lockstep,
and every turn is a new generation of the whole conversation, as trainers do that call an engine's `generate`. End
tokens are ignored, so that the work is the same for all. small: a tiny model and 16 episodes, to try the script on a
CPU.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from common import Row, save

from ebbtide.config import load
from ebbtide.config.environment import EnvironmentConfig
from ebbtide.config.rollout import RolloutConfig
from ebbtide.model.load import LoadedModel, load_model
from ebbtide.progress import Progress, no_progress
from ebbtide.rollout.chat_turns import ChatTurns
from ebbtide.rollout.encoder import Encoder
from ebbtide.rollout.engine import Completion, Engine, Request, SamplingParams
from ebbtide.rollout.episode_runner import EpisodeRunner
from ebbtide.rollout.paged.engine import PagedEngine
from ebbtide.tasks.environment_pool import EnvironmentPool
from ebbtide.tasks.task import Problem

HERE = Path(__file__).parent
TURNS, TURN_TOKENS, SECONDS = 8, 64, 0.2


class GenerateOnly:
    """An engine without sessions."""

    def __init__(self, engine: PagedEngine) -> None:
        self._engine = engine

    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, progress: Progress
    ) -> list[list[Completion]]:
        return self._engine.generate(requests, sampling, no_progress)


def played(
    label: str, loaded: LoadedModel, engine: Engine, *, episodes: int, at_once: int, lockstep: bool
) -> list[Row]:
    environment = EnvironmentConfig(
        object="slow_tool:SlowTool",
        options={"seconds": SECONDS},
        max_turns=TURNS,
        max_turn_tokens=TURN_TOKENS,
        max_concurrent=at_once,
    )
    rollout = RolloutConfig(max_prompt_tokens=256, max_new_tokens=TURNS * (TURN_TOKENS + 64))
    problems = [Problem([], metadata={"seed": number}) for number in range(episodes)]
    with EnvironmentPool(environment) as pool:
        turns = ChatTurns(Encoder(loaded.tokenizer, templated=False))

        def play(most: int) -> tuple[EpisodeRunner, float, int]:
            limited = environment.model_copy(update={"max_turns": most})
            runner = EpisodeRunner(
                limited, rollout, pool, turns, tool_format="json", rows=loaded.vocabulary_rows, lockstep=lockstep
            )
            started = time.perf_counter()
            groups = runner.run(
                engine,
                problems,
                [[number] for number in range(episodes)],
                SamplingParams(TURN_TOKENS, ignore_eos=True),
                no_progress,
            )
            sampled = sum(len(turn.completion.tokens) for (episode,) in groups for turn in episode.turns)
            assert sampled == episodes * most * TURN_TOKENS, [episode.scored for (episode,) in groups][:3]
            return runner, time.perf_counter() - started, sampled

        play(1)  # captures graphs and starts processes
        runner, taken, sampled = play(TURNS)
    idle = runner.figures["environment_idle_seconds"]
    return [
        Row(label, "seconds", taken, "s"),
        Row(label, "sampled tokens a second", sampled / taken, "tok/s"),
        Row(label, "time in which a sequence could run", 100 * (1 - idle / taken), "%"),
        Row(label, "tokens prefilled twice", runner.figures["tokens_recomputed"], "tokens"),
    ]


def main() -> None:
    sys.path.insert(0, str(HERE))
    small = "small" in sys.argv[1:]
    episodes, decoding = (16, 4) if small else (512, 128)
    config = (
        load("quickstart", ["model.scratch.alphabet=null", "model.scratch.context=2048"])
        if small
        else load(str(HERE / "configs" / "qwen3-1.7b.yaml"))
    )
    loaded = load_model(config)
    longest = 256, TURNS * (TURN_TOKENS + 64)
    engine = PagedEngine(loaded, decoding, longest=longest)
    rows = played("episodes", loaded, engine, episodes=episodes, at_once=episodes, lockstep=False)
    rows += played("lockstep", loaded, engine, episodes=episodes, at_once=episodes, lockstep=True)
    plain = GenerateOnly(engine)
    rows += played("turn by turn", loaded, plain, episodes=episodes, at_once=decoding, lockstep=True)
    if small:
        for row in rows:
            print(f"{row.case:14} {row.metric:36} {row.value:12,.1f} {row.unit}")
    else:
        save("environments", rows)


if __name__ == "__main__":
    main()
