"""Episodes of several turns with tools that take 0.2 s: 512 of 8 turns of 64 tokens, 128 decoding at once, in the
Qwen3-1.7B shape.

    python benchmarks/environments.py [--episodes 512] [--turns 8] [KEY=VALUE ...]

as they come: an episode goes on as soon as its tool has answered, while others are sampled. in lockstep: the same work
turn by turn, each turn of all episodes before the next. Random weights; a turn ends after 64 tokens. KEY=VALUE are
settings of the config.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from common import Row, save
from plan import CONFIG

from ebbtide.algorithms.episodes import PlayedEpisodes
from ebbtide.config import load
from ebbtide.progress import no_progress
from ebbtide.rollout.engine import SamplingParams
from ebbtide.rollout.prompts import Prompt
from ebbtide.tasks.task import Problem
from ebbtide.worker import Worker

GROUP, TOKENS, DECODING, SECONDS, TIMES = 8, 64, 128, 0.2, 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--episodes", type=int, default=512)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("settings", nargs="*")
    given = parser.parse_intermixed_args()
    # The prompt has 100 tokens, and each answer of the tool 5.
    new = given.turns * (TOKENS + 5)
    environment = {"object": "slow_tool:SlowTool", "options": {"turns": given.turns, "seconds": SECONDS}}
    environment |= {"max_turns": given.turns, "max_turn_tokens": TOKENS, "max_concurrent": given.episodes}
    config = load(
        CONFIG,
        [
            *("task.builtin=null", f"task.environment={environment}", "checkpoint=null"),
            *(f"rollout.max_num_seqs={DECODING}", "rollout.max_prompt_tokens=128", f"rollout.max_new_tokens={new}"),
            *given.settings,
        ],
    )
    rows: list[Row] = []
    seeds = [[GROUP * number + place for place in range(GROUP)] for number in range(given.episodes // GROUP)]
    prompts = [Prompt(Problem([], metadata={"seed": number}), "", []) for number in range(len(seeds))]
    with Worker(config) as worker, worker.phase("generate"), PlayedEpisodes(worker) as played:
        taken: dict[bool, list[float]] = {False: [], True: []}
        figures: dict[bool, dict[str, float]] = {}
        for turn in range(TIMES + 1):
            for lockstep in (False, True):
                played.runner.lockstep = lockstep
                began = time.perf_counter()
                episodes = played.play(prompts, seeds, SamplingParams(new, ignore_eos=True), no_progress)
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                if turn or not TIMES:  # The first compiles and captures, and starts the processes.
                    taken[lockstep].append(time.perf_counter() - began)
                    figures[lockstep] = played.figures
                assert all(len(episode.turns) == given.turns for episode in episodes)
                assert all(episode.scored is not None and episode.scored.failure is None for episode in episodes)
    sampled = given.episodes * given.turns * TOKENS
    for lockstep, label in ((False, "as they come"), (True, "in lockstep")):
        seconds, found = statistics.median(taken[lockstep]), figures[lockstep]
        rows += [
            Row(label, "seconds", seconds, "s"),
            Row(label, "tokens a second", sampled / seconds, "tok/s"),
            Row(label, "no sequence could run", 100 * found["environment_idle_seconds"] / seconds, "% of the time"),
            Row(label, "tokens prefilled twice", found["tokens_recomputed"], "tokens"),
        ]
    times = statistics.median(taken[True]) / statistics.median(taken[False])
    rows.append(Row("as they come", "times as fast as in lockstep", times, "x"))
    save("environments", rows)


if __name__ == "__main__":
    main()
