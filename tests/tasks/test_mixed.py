"""Tasks that are mixed: exact shares of every step, scores by each task's own scorer, and what is refused."""

from collections import Counter
from itertools import islice

import pytest

from ebbtide.config.load import load
from ebbtide.config.task import TaskConfig
from ebbtide.errors import UserError
from ebbtide.tasks.build import build_task
from ebbtide.tasks.mixed import turns
from ebbtide.tasks.sampler import MixedSampler, Sampler

MIX = {
    "copying": {"weight": 3, "builtin": {"name": "copy", "options": {"digits": 2}}, "size": 10, "held_out": 3},
    "reversing": {
        "builtin": {"name": "reverse", "options": {"digits": 2}},
        "size": 6,
        "held_out": 5,
        "system": "brief",
    },
}


@pytest.mark.parametrize("weights", [[3, 1], [1, 1, 1], [0.7, 0.2, 0.1], [5, 3, 2, 7], [1e-3, 1]])
def test_every_whole_period_has_exact_shares(weights) -> None:
    total = sum(weights)
    period = round(1000 * total) if max(weights) < 1 or min(weights) < 0.1 else round(total)
    taken = turns(weights)
    for _ in range(3):
        found = Counter(islice(taken, period))
        assert [found[place] for place in range(len(weights))] == [round(period * one / total) for one in weights]


@pytest.mark.parametrize("weights", [[3, 1], [0.7, 0.2, 0.1], [1, 2, 3], [5, 50, 50, 5, 1, 1, 1], [20, 1, 20, 20, 1]])
def test_no_share_is_ever_off_by_a_whole_turn(weights) -> None:
    counts = [0] * len(weights)
    for done, turn in enumerate(islice(turns(weights), 200), start=1):
        counts[turn] += 1
        assert all(abs(count - done * one / sum(weights)) < 1 for count, one in zip(counts, weights, strict=True))


def test_a_sampler_of_several_lists_draws_of_each_as_its_own_would_and_resumes() -> None:
    lists, weights = [[f"a{n}" for n in range(5)], [f"b{n}" for n in range(3)]], [2, 1]
    drawn = MixedSampler(lists, weights, 7).draw(30)
    assert Counter(one[0] for one in drawn) == {"a": 20, "b": 10}
    assert [one for one in drawn if one[0] == "a"] == Sampler(lists[0], 7).draw(20)
    assert [one for one in drawn if one[0] == "b"] == Sampler(lists[1], 7).draw(10)
    for done in range(30):
        first = MixedSampler(lists, weights, 7)
        first.draw(done)
        again = MixedSampler(lists, weights, 7)
        again.seek(first.epoch, first.position)
        assert again.draw(30 - done) == drawn[done:]
    with pytest.raises(UserError, match=r"is of a run with one task, and this run has `task.mix`"):
        MixedSampler(lists, weights, 7).seek(2, 1)


def test_each_task_has_its_own_problems_and_scorer() -> None:
    task = build_task(TaskConfig.model_validate({"mix": MIX}), 0)
    problems = task.problems()
    assert Counter(problem.task for problem in problems.train) == {"copying": 10, "reversing": 6}
    assert [problem.task for problem in problems.held_out[:4]] == ["copying", "copying", "reversing", "copying"]
    assert Counter(problem.task for problem in problems.held_out) == {"copying": 3, "reversing": 5}
    for problem in problems.train:
        assert (problem.messages[0]["role"] == "system") == (problem.task == "reversing")
        asked = problem.question.rstrip("=")
        wanted = asked if problem.task == "copying" else asked[::-1]
        assert task.score(problem, wanted).value == 1.0


def test_a_list_in_place_of_a_task_is_a_mix(tmp_path) -> None:
    file = tmp_path / "mixed.yaml"
    file.write_text(
        "model: {scratch: {alphabet: '0123456789='}}\n"
        "evaluate: null\n"
        "rollout: {max_prompt_tokens: 8, max_new_tokens: 8}\n"
        "task:\n"
        "  - {name: copying, weight: 3, builtin: copy}\n"
        "  - {builtin: {name: reverse, options: {digits: 3}}, size: 1e2}\n"
    )
    found = load(str(file), ["task.mix.copying.weight=2"]).task.mix
    assert [(name, one.weight, one.builtin.name) for name, one in found.items()] == [
        ("copying", 2.0, "copy"),
        ("task2", 1.0, "reverse"),
    ]
    assert found["task2"].size == 100
    with pytest.raises(
        UserError, match=r"unknown key `task.mix.copying.wieght`.* Did you mean `task.mix.copying.weight`"
    ):
        load(str(file), ["task.mix.copying.wieght=2"])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"mix": {"one": MIX["copying"]}}, "needs two tasks or more"),
        ({"mix": MIX, "builtin": {"name": "copy"}}, "`task.builtin` is set beside `task.mix`"),
        ({"mix": MIX, "system": "x"}, "move it to `task.mix.copying.system`"),
        (
            {"mix": {**MIX, "own": {**MIX["copying"], "reasoning_parser": "think"}}},
            "`task.mix.own.reasoning_parser` would be for one task",
        ),
        ({"mix": {**MIX, "a/b": MIX["copying"]}}, "has a task named 'a/b'"),
        ({"mix": {**MIX, "none": {}}}, "set exactly one of `builtin`, `gym`, `file` and `python` for each"),
        ({"mix": {**MIX, "far": {**MIX["copying"], "weight": 0}}}, "greater than 0"),
    ],
)
def test_what_does_not_apply_is_refused(settings, said) -> None:
    with pytest.raises(ValueError, match=said):
        TaskConfig.model_validate(settings)


def test_held_out_problems_are_those_of_all(tiny) -> None:
    evaluated = {"task": {"mix": MIX}, "evaluate": {"every": 1, "problems": 9}}
    with pytest.raises(ValueError, match=r"`evaluate.problems: 9` exceeds the `task.mix.\*.held_out: 8` problems"):
        tiny(evaluated)
    assert tiny({**evaluated, "evaluate.problems": 8}).task.held_out_problems == 8
