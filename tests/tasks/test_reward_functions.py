"""Reward functions of TRL and verl, as they are: how they are told apart, what they are called with, and what becomes
of what they return. They run in the scoring process as any scorer does."""

import json

import pytest

from ebbtide.config.task import PythonTaskConfig, TaskConfig
from ebbtide.errors import UserError
from ebbtide.tasks.build import build_task
from ebbtide.tasks.scoring import ScoringPool
from ebbtide.tasks.scoring_worker import score_one
from patience import PATIENCE

CHAT = [{"role": "user", "content": "2+2="}]
TRL_ROW = {"prompt": CHAT, "solution": "4", "task": "math", "level": 3}
VERL_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": CHAT,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"split": "train", "index": 7},
}


@pytest.fixture
def task(tmp_path):
    """task("exact", row): the config of a task of one row, scored by that function."""

    def make(name: str, row: dict, options=None, **changes) -> TaskConfig:
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
        file = {"train": str(tmp_path / "rows.jsonl"), "answer_field": None, **changes.pop("file", {})}
        python = {"object": f"peer_rewards:{name}", "options": options or {}}
        return TaskConfig.model_validate({"file": file, "python": python, "held_out": 0, **changes})

    return make


def scored(config: TaskConfig, completion: str):
    built = build_task(config, 0)
    return score_one(built, built.problems().train[0], completion)


def test_they_run_in_the_scoring_process(task) -> None:
    config = task("exact", TRL_ROW, scoring={"workers": 1, "timeout_s": PATIENCE})
    problem = build_task(config, 0).problems().train[0]
    with ScoringPool(config, seed=0) as pool:
        found = pool.score([(problem, "4"), (problem, "5")])
    assert [one.value for one in found] == [1.0, 0.0]
    assert [one.failure for one in found] == [None, None]


def test_a_function_of_a_file_of_python(task, tmp_path) -> None:
    code = "from dataclasses import dataclass\n\n\n@dataclass\nclass Row:\n    truth: str\n\n\n"
    code += "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    code += "    return float(Row(ground_truth).truth == solution_str)\n"
    (tmp_path / "my-rewards.py").write_text(code)
    python = {"object": f"{tmp_path}/my-rewards.py:compute_score"}
    file = {"answer_field": "reward_model.ground_truth"}
    assert (
        scored(task("", VERL_ROW, file=file).model_copy(update={"python": PythonTaskConfig(**python)}), "72").value == 1
    )
    (tmp_path / "bad.py").write_text("import nowhere_at_all\n")
    for name, needle in (("bad.py:f", "nowhere_at_all"), ("none.py:f", "none.py"), ("my-rewards.py:f", "no attribute")):
        wrong = task("", VERL_ROW).model_copy(update={"python": PythonTaskConfig(object=f"{tmp_path}/{name}")})
        with pytest.raises(UserError, match=needle):
            build_task(wrong, 0)


def test_a_function_of_trl_is_given_columns_and_messages(task) -> None:
    said = scored(task("sees", TRL_ROW, system="be brief"), "5").message
    system = [{"role": "system", "content": "be brief"}, *CHAT]
    columns = {"solution": ["4"], "task": ["math"], "level": [3]}
    assert f"{[system]!r} {[[{'role': 'assistant', 'content': '5'}]]!r} {columns!r}" in said
    assert "['level', 'log_extra', 'log_metric', 'solution', 'task']" in said


def test_prompts_that_are_texts_have_completions_that_are(task) -> None:
    row = {"q": {"text": "2+2="}, "solution": "4"}
    said = scored(task("sees", row, file={"prompt_field": "q.text"}), "5").message
    assert f"['2+2='] ['5'] { ({'q': [row['q']], 'solution': ['4']})!r}" in said
    assert scored(task("closer_to_20_characters", {"prompt": "x"}), "12345").value == -15.0


@pytest.mark.parametrize(("kind", "value", "parts"), [("math", 1.0, {}), ("code", 0.0, {"none": 1.0})])
def test_none_is_no_reward_and_metrics_are_parts(task, kind, value, parts) -> None:
    found = scored(task("only_math", {"prompt": "2+2=", "task": kind}), "4")
    assert (found.value, found.parts) == (value, {**parts, "length": 1.0})


def test_functions_that_are_asynchronous_or_objects_or_take_few_arguments(task) -> None:
    assert scored(task("later", TRL_ROW), "x").value == 0.25
    assert scored(task("Scaled", {"prompt": "x"}, {"scale": 0.5}), "four").value == 2.0
    assert scored(task("strict", {"prompt": "x", "solution": "4", "level": 3}), "4").value == 1.0


@pytest.mark.parametrize(
    ("name", "needle"),
    [("not_a_list", "returned a float"), ("two_for_one", "returned 2 rewards for 1 completion")],
)
def test_what_is_no_list_of_rewards_costs_the_sample(task, name, needle) -> None:
    found = scored(task(name, TRL_ROW), "x")
    assert (found.value, found.failure) == (0.0, "error")
    assert needle in found.message


@pytest.mark.parametrize("field", [None, "reward_model.ground_truth"])
def test_a_function_of_verl_is_given_the_ground_truth_of_the_row(task, field) -> None:
    config = task("compute_score", VERL_ROW, file={"answer_field": field})
    assert [scored(config, text).value for text in ("so #### 72", "so #### 71", "72")] == [1.0, 0.0, 0.0]


def test_a_dict_of_verl_has_a_score_and_parts(task) -> None:
    found = scored(task("compute_score_dict", VERL_ROW, {"bonus": 0.5}), "72")
    assert (found.value, found.parts) == (1.5, {"acc": 1.0, "index": 7.0})
    found = scored(task("compute_score_without", VERL_ROW), "72")
    assert found.failure == "error"
    assert "a dict without `score`; it has: acc" in found.message


def test_extraction_comes_first(task) -> None:
    config = task("compute_score_dict", VERL_ROW, extract=r"<a>(.*?)</a>")
    assert scored(config, "hm <a>72</a>").value == 1.0
    assert scored(config, "72").parts == {"extracted": 0.0}


@pytest.mark.parametrize(
    ("name", "row", "needle"),
    [
        ("with_ids", TRL_ROW, "asks for `completion_ids`, which is neither a field of the rows"),
        ("strict", {"prompt": "x"}, r"asks for `solution`, which is neither a field of the rows \(they have: prompt\)"),
        ("compute_score", TRL_ROW, "rows have no `reward_model.ground_truth`"),
        ("plain", TRL_ROW, "is not a reward function for the rows of `task.file`"),
        ("absent", TRL_ROW, "cannot be imported"),
    ],
)
def test_what_cannot_work_is_refused_before_the_run(task, name, row, needle) -> None:
    with pytest.raises(UserError, match=needle):
        build_task(task(name, row), 0).problems()


def test_a_reward_function_has_no_problems_of_its_own() -> None:
    for name, whose in (("exact", "TRL"), ("compute_score", "verl")):
        config = TaskConfig.model_validate({"python": {"object": f"peer_rewards:{name}"}})
        with pytest.raises(UserError, match=f"is a reward function as {whose} has it, and has no problems: name those"):
            build_task(config, 0)


def test_settings_that_contradict_a_reward_function(task) -> None:
    with pytest.raises(ValueError, match=r"`task.file.scorer: exact` and the reward function in `task.python` both"):
        task("exact", TRL_ROW, file={"scorer": "exact"})
    with pytest.raises(ValueError, match="set exactly one of"):
        task("exact", TRL_ROW, builtin={"name": "copy"})


def test_held_out_rows_are_those_of_the_file(task) -> None:
    assert not task("exact", TRL_ROW).has_own_held_out
    assert task("exact", TRL_ROW, file={"held_out": "x"}).has_own_held_out
    assert task("exact", TRL_ROW).is_scored
