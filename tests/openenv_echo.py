"""An environment of OpenEnv: it says how long what it was told is, three times."""

from uuid import uuid4

from openenv.core import Action, Environment, Observation, State


class Told(Action):
    message: str


class Heard(Observation):
    text: str


class Lengths(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(episode_id=str(uuid4()), step_count=0)

    def reset(self, seed=None, episode_id=None, **kwargs) -> Heard:
        self._state = State(episode_id=episode_id or str(uuid4()), step_count=0)
        return Heard(text=f"seed {seed}", done=False, reward=None)

    def step(self, action: Told, timeout_s=None, **kwargs) -> Heard:
        self._state.step_count += 1
        length = len(action.message)
        return Heard(text=f"{length} characters", done=self._state.step_count == 3, reward=float(length % 2))

    @property
    def state(self) -> State:
        return self._state
