"""Curricula of reasoning-gym: the problems of each level, when a level rises or falls, and what is refused."""

import pytest

from ebbtide.config.task import CurriculumConfig, TaskConfig
from ebbtide.errors import UserError
from ebbtide.tasks.build import build_task
from ebbtide.tasks.curriculum import Curricula, LevelSampler
from ebbtide.tasks.sampler import MixedSampler, Sampler

LEVELS = {level: [f"{level}.{number}" for number in range(5)] for level in (1, 2, 3)}


def curriculum(**changes) -> CurriculumConfig:
    return CurriculumConfig(**{"start": 1, "top": 3, "raise_at": 0.75, "lower_at": 0.25, "window": 2, **changes})


def built(dataset: str = "chain_sum", seed: int = 0, options=None, size: int = 20, held_out: int = 7, **changes):
    gym = {"dataset": dataset, "options": options or {}, "curriculum": {"start": 0, "top": 2, **changes}}
    return build_task(TaskConfig.model_validate({"gym": gym, "size": size, "held_out": held_out, "system": "s"}), seed)


def test_a_level_rises_and_falls_by_the_mean_of_a_whole_window() -> None:
    order = LevelSampler(LEVELS, curriculum(), 7)
    rewards = [1.0, 0.4, 1.0, 0.5, 1.0, 0.4, 0.0, 0.0, 0.5, 0.1, 0.1, 0.0]
    seen = []
    for reward in rewards:
        order.reward(order.level, reward)
        seen.append(order.level)
    # 0.7 stays; 0.75 rises, which begins anew; 0.7; 0.2 falls; at the lowest level it stays.
    assert seen == [1, 1, 1, 2, 2, 2, 1, 1, 1, 1, 1, 1]
    order.reward(1, 1.0)
    order.reward(1, 1.0)
    for level in (1, 3):  # prompts of another level, which partial rollouts end with
        order.reward(level, 1.0)
    assert order.level == 2
    for _ in range(8):
        order.reward(order.level, 1.0)
    assert order.level == 3


def test_each_level_is_drawn_as_its_own_sampler_draws_and_resumes() -> None:
    def steps(order, drawn: list, numbers: range) -> None:
        for number in numbers:
            drawn += order.draw(3)
            for item in drawn[-3:]:
                order_of[id(order)].reward(int(item[0]), float(number % 3 > 0))

    order_of = {}
    for mixed in (False, True):
        for stop in range(9):
            runs = []
            for _ in range(2):
                leveled = LevelSampler(LEVELS, curriculum(), 7)
                order = MixedSampler([leveled, ["9.a", "9.b"]], [2, 1], 7) if mixed else leveled
                order_of[id(order)] = leveled
                runs.append((order, leveled))
            (first, before), (again, after) = runs
            drawn = []
            steps(first, drawn, range(stop))
            again.seek(first.epoch, first.position)
            Curricula({"a": after}).restore(Curricula({"a": before}).state())
            rest, same = [], []
            steps(first, rest, range(stop, 9))
            steps(again, same, range(stop, 9))
            assert same == rest
            assert before.state() == after.state()
            whole = [item for item in drawn + rest if item[0] == "1"]
            assert whole == Sampler(LEVELS[1], 7).draw(len(whole))
            assert {item[0] for item in drawn + rest} >= {"1", "2", "3"}


def test_problems_of_all_levels_and_held_out_ones_in_turn() -> None:
    problems = built().problems()
    assert [one.level for one in problems.held_out] == [0, 1, 2, 0, 1, 2, 0]
    terms = {level: set() for level in range(3)}
    for one in problems.train:
        terms[one.level].add(one.metadata["entry"]["num_terms"])
    assert terms == {0: {2}, 1: {2, 3}, 2: {2, 3, 4}}
    assert all(one.messages[0] == {"role": "system", "content": "s"} for one in problems.train)
    held_out = {one.metadata["question"] for one in problems.held_out}
    assert not held_out & {one.metadata["question"] for one in problems.train}
    last = built(mode="upper_bound").problems()
    assert {one.metadata["entry"]["num_terms"] for one in last.train if one.level == 2} == {4}
    assert built(seed=1).problems() != problems
    task = built()
    assert all(task.score(one, one.answer).value == 1 for one in problems.train)


@pytest.mark.parametrize(
    ("changes", "needle"),
    [
        ({"top": 400}, r"`task.gym.curriculum.top: 400` is above 10, the highest level of `chain_sum`"),
        ({"options": {"max_terms": 4}}, r"`task.gym.options` has `max_terms`, which the levels"),
        ({"dataset": "composite"}, r"has no curriculum for `composite`"),
    ],
)
def test_what_reasoning_gym_does_not_have_is_refused(changes, needle) -> None:
    with pytest.raises(UserError, match=needle):
        built(**changes)


@pytest.mark.parametrize(
    ("changes", "needle"),
    [({"start": 3}, "must be below `top: 3`"), ({"lower_at": 0.8}, "must be below `raise_at: 0.75`")],
)
def test_settings_that_contradict_each_other(changes, needle) -> None:
    with pytest.raises(ValueError, match=needle):
        curriculum(**changes)


def test_a_checkpoint_of_other_levels_is_refused() -> None:
    state = LevelSampler(LEVELS, curriculum(), 7).state()
    with pytest.raises(UserError, match=r"with the levels 1, 2, 3, and this run's `task.gym.curriculum` has 1, 2:"):
        LevelSampler({1: ["a"], 2: ["b"]}, curriculum(top=2), 7).restore(state)
    with pytest.raises(UserError, match="for different tasks"):
        Curricula({}).restore({"": state})
