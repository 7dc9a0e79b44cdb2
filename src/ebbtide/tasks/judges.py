"""The judges of a task: a thread keeps their requests in flight while the run waits, or computes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from threading import Thread
from typing import Self

from ebbtide.config.task import TaskConfig, reward_key
from ebbtide.progress import Progress, no_progress
from ebbtide.tasks.judge_client import JudgeClient, Sleep
from ebbtide.tasks.judgement import ask_about
from ebbtide.tasks.score_message import ScoreResult
from ebbtide.tasks.task import Problem

PATIENCE = 0.1  # Seconds between two looks at the progress.

Answers = list[dict[str, str | ScoreResult]]
"""For each completion, the answer of each of its judges, or why there is none, by the name of the reward."""


@dataclass
class Asked:
    """Questions that are on their way."""

    count: int
    done: int = 0
    future: Future[Answers] = field(default_factory=Future)

    def result(self, progress: Progress = no_progress) -> Answers:
        """Waits for all answers."""
        while not self.future.done():
            progress(self.done, self.count)
            wait([self.future], timeout=PATIENCE)
        return self.future.result()


class Judges:
    """All judges of a task. It is a context, in which a thread asks them."""

    def __init__(self, config: TaskConfig, ranks: int = 1, sleep: Sleep = asyncio.sleep) -> None:
        self._configs = {
            place: reward.judge for place, reward in config.rewards_with("judge").items() if reward.judge is not None
        }
        self._ranks, self._sleep = ranks, sleep
        self._clients: Mapping[tuple[str | None, str], JudgeClient] = {}

    def __enter__(self) -> Self:
        self._clients = {
            place: JudgeClient(config, f"{reward_key(*place)}.judge", ranks=self._ranks, sleep=self._sleep)
            for place, config in self._configs.items()
        }
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="judges", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        mine = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not mine]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for client in self._clients.values():
            await client.close()

    def start(self, work: Sequence[tuple[Problem, str]]) -> Asked:
        """Begins to ask about completions."""
        places: dict[tuple[str | None, str], list[int]] = {place: [] for place in self._clients}
        for index, (problem, _) in enumerate(work):
            for place, indices in places.items():
                if place[0] == problem.task:
                    indices.append(index)
        asked = Asked(sum(map(len, places.values())))
        asked.future = asyncio.run_coroutine_threadsafe(self._ask(work, places, asked), self._loop)
        return asked

    async def _ask(
        self,
        work: Sequence[tuple[Problem, str]],
        places: Mapping[tuple[str | None, str], Sequence[int]],
        asked: Asked,
    ) -> Answers:
        def count() -> None:
            asked.done += 1

        async def one(place: tuple[str | None, str], indices: Sequence[int]) -> None:
            chats = [ask_about(self._configs[place], *work[index]) for index in indices]
            for index, answer in zip(indices, await self._clients[place].ask(chats, count), strict=True):
                found[index][place[1]] = answer

        found: Answers = [{} for _ in work]
        await asyncio.gather(*(one(place, indices) for place, indices in places.items()))
        return found

    def drain(self) -> dict[str, float]:
        """Metrics of the requests since the last call."""
        return {
            f"judge/{'/'.join(filter(None, place))}/{name}": value
            for place, client in self._clients.items()
            for name, value in client.drain().items()
        }
