"""An environment of OpenEnv for test_openenv.py, as an object and as a server; run by the Python of `openenv`."""

import sys

from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Say(Action):
    message: str


class Heard(Observation):
    text: str


class Echo(Environment[Say, Heard, State]):
    """Echoes; the reward is 1 for a message with a 1, and the second message ends it."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._turns = 0

    def reset(self, seed=None, episode_id=None, **_) -> Heard:
        self._turns = 0
        return Heard(text=f"{(seed or 0) % 7}.", done=False, reward=None)

    def step(self, action: Say, timeout_s=None, **_) -> Heard:
        self._turns += 1
        return Heard(text="again", done=self._turns == 2, reward=float("1" in action.message))

    @property
    def state(self) -> State:
        return State(episode_id="0", step_count=self._turns)


if __name__ == "__main__":
    import uvicorn

    uvicorn.run(create_fastapi_app(Echo, Say, Heard, max_concurrent_envs=64), port=int(sys.argv[1]), log_level="error")
