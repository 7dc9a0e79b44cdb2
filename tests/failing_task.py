"""A task whose scorer always raises."""

from ebbtide.tasks.task import Problem, Problems, Score, ask


class Failing:
    def problems(self) -> Problems:
        return Problems([Problem(ask(str(i))) for i in range(8)], [])

    def score(self, problem: Problem, completion: str) -> Score:
        raise NameError("what is this")
