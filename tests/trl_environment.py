"""An environment as TRL's `environment_factory` makes them: public methods are tools, and `get_reward` rewards."""


class Counter:
    def __init__(self) -> None:
        self._count = 0

    def reset(self, target: int = 3, **row) -> str | None:
        self._target = target
        return f" Count to {target}."

    def increment(self, step: int) -> str:
        """Adds to the counter.

        Args:
            step: The amount to add.

        Returns:
            The counter.
        """
        self._count += step
        return f"the counter is {self._count}"

    def get_reward(self) -> float:
        return 1.0 if self._count == self._target else 0.0
