"""Episodes that an environment drives: it asks the policy for turns when and as often as it likes.

What is asked goes to the run, which samples it together with all other episodes.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any

from ebbtide.tasks.policy_endpoint import ServedPolicy
from ebbtide.tasks.policy_handle import Asked, PolicyError, PolicyFacts, Sampled


class DrivenEpisode:
    """One episode, which runs in a thread of its own until it asks for a turn."""

    def __init__(self, run: Callable[..., Any], facts: PolicyFacts, named: dict[str, Any]) -> None:
        self._run, self._named, self._policy = run, named, ServedPolicy(facts)
        self.result: Any = None
        threading.Thread(target=self._play, daemon=True).start()

    def _play(self) -> None:
        try:
            found = self._run(policy=self._policy, **self._named)
            self.result = asyncio.run(_awaited(found)) if inspect.isawaitable(found) else found
        except BaseException as error:  # noqa: BLE001 (foreign code: what it raises costs this episode)
            self._policy.asks.put(error)
            return
        self._policy.asks.put(None)

    def asks(self) -> Asked | None:
        """The next turn that it asks for; None when it is over. Raises what it raised."""
        found = self._policy.asks.get()
        if isinstance(found, BaseException):
            raise RuntimeError(f"{type(found).__name__}: {found}") from found
        return found

    def close(self) -> None:
        """Ends what served the policy."""
        self._policy.close()

    def give(self, answer: Sampled | PolicyError) -> None:
        """Answers what it asked."""
        self._policy.answers.put(answer)


async def _awaited(found: Any) -> Any:
    return await found
