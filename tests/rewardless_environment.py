"""Tools without a reward: the task's scorer scores the last turn."""


class Tools:
    def double(self, number: int) -> int:
        """Doubles a number.

        Args:
            number: Any number.
        """
        return 2 * number
