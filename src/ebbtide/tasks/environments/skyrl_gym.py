"""Environments of the package `skyrl-gym`: `{object: skyrl_gym, options: {env: gsm8k_multi_turn}}`.

A row of the task becomes the environment's `extras`, with the answer as its `reward_spec` where it has none.
"""

from __future__ import annotations

from typing import Any

from ebbtide.errors import UserError
from ebbtide.tasks.task import Message

try:
    import skyrl_gym
except ImportError:
    raise UserError(
        "`task.environment.object: skyrl_gym` needs the package skyrl-gym: pip install 'ebbtide[skyrl]'"
    ) from None


class SkyRLEnvironment:
    """One episode."""

    def __init__(self, env: str, extras: dict[str, Any] | None = None, **options: Any) -> None:
        known = sorted(skyrl_gym.registry)
        if env not in known:
            raise UserError(f"`task.environment.options.env: {env}` is no environment of skyrl-gym: {', '.join(known)}")
        self._env, self._extras, self._options = env, extras or {}, options
        self._made: Any = None

    def reset(self, prompt: list[Message], **row: Any) -> list[Message]:
        known = {"reward_spec": {"method": "rule", "ground_truth": row.get("answer")}, "extra_info": {}}
        self._made = skyrl_gym.make(self._env, extras={**known, **row, **self._extras}, **self._options)
        messages, _ = self._made.init(prompt)
        found: list[Message] = messages
        return found

    def step(self, text: str) -> Any:
        return self._made.step(text)

    def get_metrics(self) -> dict[str, float]:
        found: dict[str, float] = self._made.get_metrics()
        return found

    def close(self) -> None:
        if self._made is not None:
            self._made.close()


make = SkyRLEnvironment
