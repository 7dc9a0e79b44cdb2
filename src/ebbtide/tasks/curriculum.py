"""Curricula: problems of rising levels, of which a level is drawn until its rewards are high enough for the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from ebbtide.config.task import CurriculumConfig
from ebbtide.errors import UserError
from ebbtide.tasks.sampler import Sampler

Item = TypeVar("Item")


class LevelSampler(Generic[Item]):
    """Draws items of one level, as a sampler of its own does. Its state is the level, how many items of each level were
    drawn, and the rewards since the level was reached."""

    def __init__(self, levels: Mapping[int, Sequence[Item]], config: CurriculumConfig, seed: int) -> None:
        self._config, self._levels = config, {level: levels[level] for level in sorted(levels)}
        self._samplers = {level: Sampler(items, seed) for level, items in self._levels.items()}
        self.level, self._rewards = config.start, list[float]()
        self.epoch, self.position = 0, 0

    def seek(self, epoch: int, position: int) -> None:
        """The rest of where another sampler was is its state."""
        self.epoch, self.position = epoch, position

    def draw(self, count: int) -> list[Item]:
        self.position += count
        return self._samplers[self.level].draw(count)

    def reward(self, level: int, reward: float) -> None:
        """The mean reward of a prompt's completions. Prompts of another level, which partial rollouts end with, do not
        count."""
        config = self._config
        if level != self.level:
            return
        self._rewards = [*self._rewards, reward][-config.window :]
        mean = sum(self._rewards) / len(self._rewards)
        if len(self._rewards) < config.window:
            return
        if mean >= config.raise_at and level < config.top:
            self.level, self._rewards = level + 1, []
        elif config.lower_at is not None and mean < config.lower_at and level > config.start:
            self.level, self._rewards = level - 1, []

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        drawn = {str(level): [one.epoch, one.position] for level, one in self._samplers.items()}
        return {"level": self.level, "rewards": self._rewards, "drawn": drawn}

    def restore(self, state: Mapping[str, Any]) -> None:
        if {str(level) for level in self._samplers} != state["drawn"].keys():
            raise UserError(
                f"the checkpoint is of a run with the levels {', '.join(state['drawn'])}, and this run's"
                f" `task.gym.curriculum` has {', '.join(map(str, self._samplers))}: resume with that of the checkpoint"
            )
        self.level, self._rewards = state["level"], list(state["rewards"])
        for level, sampler in self._samplers.items():
            sampler.seek(*state["drawn"][str(level)])


class Curricula:
    """The curricula of a run, by the name of their task in a mix; that of a single task has an empty name."""

    def __init__(self, samplers: Mapping[str, LevelSampler[Any]]) -> None:
        self.samplers = samplers

    def reward(self, task: str | None, level: int | None, reward: float) -> None:
        if level is not None:
            self.samplers[task or ""].reward(level, reward)

    def metrics(self) -> dict[str, float]:
        return {
            f"task/{name}/curriculum_level" if name else "curriculum_level": float(one.level)
            for name, one in self.samplers.items()
        }

    def state(self) -> dict[str, Any]:
        return {name: one.state() for name, one in self.samplers.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        if state.keys() != self.samplers.keys():
            raise UserError(
                "the checkpoint and this run have `task.gym.curriculum` for different tasks: resume with the `task` of"
                " the checkpoint"
            )
        for name, one in self.samplers.items():
            one.restore(state[name])
