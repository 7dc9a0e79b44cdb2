"""Tasks: built-in, reasoning-gym, files, Python objects; and the frame around them."""

import json
from types import SimpleNamespace

import pytest

from ebbtide.config.task import TaskConfig
from ebbtide.errors import UserError
from ebbtide.tasks.build import build_task
from ebbtide.tasks.sampler import Sampler
from ebbtide.tasks.score_message import ScoreResult
from ebbtide.tasks.scorers import find_scorer
from ebbtide.tasks.scoring_worker import score_one
from ebbtide.tasks.task import Problem, Problems, ask


def build(seed: int = 0, **options):
    return build_task(TaskConfig.model_validate(options), seed)


def text(problem) -> str:
    return problem.messages[-1]["content"]


@pytest.mark.parametrize(("name", "answer"), [("copy", "{0}"), ("reverse", "{1}")])
def test_digits(name, answer) -> None:
    task = build(builtin={"name": name, "options": {"digits": 3}}, size=50, held_out=10)
    problems = task.problems()
    assert (len(problems.train), len(problems.held_out)) == (50, 10)
    assert len({text(problem) for problem in problems.train + problems.held_out}) == 60
    problem = problems.train[0]
    digits = text(problem).removesuffix("=")
    assert problem.answer == answer.format(digits, digits[::-1])
    assert task.score(problem, problem.answer).value == 1.0
    assert task.score(problem, problem.answer[:2]).value == pytest.approx(2 / 3)
    assert task.score(problem, problem.answer + "0").value == pytest.approx(3 / 4)
    assert task.score(problem, problem.answer + "\n").value == pytest.approx(3 / 4)  # an answer that goes on is no end
    assert task.score(problem, "").value == 0.0
    assert task.score(problem, "abc").value == 0.0


def test_add() -> None:
    task = build(builtin={"name": "add", "options": {"below": 10, "shots": 2}}, held_out=20)
    problems = task.problems()
    assert len(problems.train) + len(problems.held_out) + 2 == 55
    for problem in problems.train + problems.held_out:
        *examples, asked = text(problem).split("\n")
        assert len(examples) == 2
        a, b = asked.removesuffix("=").split("+")
        assert int(a) + int(b) == int(problem.answer)
        assert asked not in [f"{line.split('=')[0]}=" for line in examples]
    problem = problems.train[0]
    assert task.score(problem, f"{problem.answer}\n").value == 1.0
    assert task.score(problem, f"{problem.answer}1").value == 0.0
    assert task.score(problem, "\n").value == 0.0


def test_the_seed_decides_the_problems() -> None:
    def made(seed: int):
        return build(seed, builtin={"name": "copy"}).problems()

    assert made(0) == made(0)
    assert made(0) != made(1)


@pytest.mark.parametrize(
    ("options", "needle"),
    [
        ({"builtin": {"name": "cpoy"}}, "`task.builtin.name` is `cpoy`"),
        ({"builtin": {"name": "copy", "options": {"digit": 3}}}, "`task.builtin.options.digit`"),
        ({"builtin": {"name": "copy", "options": {"digits": "x"}}}, "`task.builtin.options.digits` is 'x'"),
        ({"builtin": {"name": "copy", "options": {"digits": 1}}}, "10 problems"),
        ({"builtin": {"name": "add"}, "held_out": 55}, "leave none to train on"),
        ({"gym": {"dataset": "leg_countin"}}, "leg_counting"),
        ({"gym": {"dataset": "leg_counting", "options": {"nope": 1}}}, "`task.gym.options: {'nope': 1}`"),
        ({"python": {"object": "nowhere"}}, "`module:name`"),
        ({"python": {"object": "nowhere:thing"}}, "cannot be imported"),
        ({"python": {"object": "misbehaving:not_a_task"}}, "`problems` and `score`"),
        ({"python": {"object": "misbehaving:Misbehaving", "options": {"x": 1}}}, "`task.python.options`"),
        ({"python": {"object": "misbehaving:ready_made", "options": {"x": 1}}}, "remove them"),
        ({"builtin": {"name": "copy"}, "extract": "("}, "not a regular expression"),
        ({"builtin": {"name": "copy"}, "extract": "abc"}, "has 0 groups: write exactly one"),
    ],
)
def test_bad_tasks_say_why(options, needle) -> None:
    with pytest.raises(UserError) as caught:
        build(**options)
    assert needle in str(caught.value)


@pytest.mark.parametrize("dataset", ["leg_counting", "basic_arithmetic", "simple_equations"])
def test_reasoning_gym(dataset) -> None:
    task = build(gym={"dataset": dataset}, size=12, held_out=4)
    problems = task.problems()
    assert (len(problems.train), len(problems.held_out)) == (12, 4)
    for problem in problems.train:
        assert task.score(problem, f" {problem.answer}\n").value == 1.0
    assert task.score(problems.train[0], "certainly not").value < 0.5
    assert build(1, gym={"dataset": dataset}, size=12, held_out=4).problems() != problems


def test_reasoning_gym_holds_out_what_it_does_not_train_on() -> None:
    problems = build(gym={"dataset": "coin_flip"}, size=200, held_out=32).problems()
    assert problems.train
    assert not {text(problem) for problem in problems.train} & {text(problem) for problem in problems.held_out}


def test_an_empty_match_is_no_answer() -> None:
    """`(.*)` and `(\\d*)` match once more, nothing, at the end of every text."""
    task = build(builtin={"name": "copy"}, extract="(\\d*)")
    problem = task.problems().train[0]
    assert task.score(problem, f"{problem.answer}.").value == 1.0
    assert task.score(problem, "none").parts == {"extracted": 0.0}


def test_reasoning_gym_with_extraction_gives_no_credit_for_wrapping() -> None:
    task = build(gym={"dataset": "basic_arithmetic"}, size=3, held_out=1, extract="<answer>(.*?)</answer>")
    problem = task.problems().train[0]
    assert task.score(problem, f"so <answer>{problem.answer}</answer>").value == 1.0
    assert task.score(problem, f"The answer is {problem.answer}").value == 0.0
    assert task.score(problem, f"<answer>0.123</answer> no, <answer>{problem.answer}</answer>").value == 1.0


def rows(count: int):
    return [{"prompt": f"{i}+1=", "answer": i + 1, "level": "easy"} for i in range(count)]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_files(tmp_path, kind) -> None:
    path = tmp_path / f"data.{kind}"
    write(path, rows(10))
    task = build(file={"train": str(path), "scorer": "numeric"}, held_out=3)
    problems = task.problems()
    assert [text(problem) for problem in problems.train] == [f"{i}+1=" for i in range(7)]
    assert [problem.answer for problem in problems.held_out] == [8, 9, 10]
    assert problems.train[0].metadata == {"level": "easy"}
    assert task.score(problems.train[0], "it is 1").value == 1.0


def test_size_limits_a_file_and_nothing_is_held_out_without_evaluation(tmp_path) -> None:
    write(tmp_path / "a.jsonl", rows(10))
    options = {"file": {"train": str(tmp_path / "a.jsonl")}, "size": 4}
    assert len(build(**options, held_out=3).problems().train) == 4
    everything = build_task(TaskConfig.model_validate({**options, "size": None}), 0, evaluated=False).problems()
    assert (len(everything.train), len(everything.held_out)) == (10, 0)


def write(path, lines) -> None:
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(lines), path)
    else:
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_files_with_messages_and_their_own_held_out_file(tmp_path) -> None:
    conversation = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    write(tmp_path / "a.jsonl", [{"q": conversation, "answer": 1}])
    write(tmp_path / "b.jsonl", [{"q": "text", "answer": 1}])
    files = {"train": str(tmp_path / "a.jsonl"), "held_out": str(tmp_path / "b.jsonl"), "prompt_field": "q"}
    problems = build(file=files, system="be brief").problems()
    assert problems.train[0].messages == [{"role": "system", "content": "be brief\n\ns"}, *conversation[1:]]
    assert [message["content"] for message in problems.held_out[0].messages] == ["be brief", "text"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_dotted_name_is_a_field_of_a_field(tmp_path, kind) -> None:
    path = tmp_path / f"data.{kind}"
    row = {"data": {"prompt": "1+1="}, "reward_model": {"style": "rule", "ground_truth": "2"}, "a.b": "3", "a": "x"}
    write(path, [row])

    def problem(**fields):
        files = {"train": str(path), "prompt_field": "data.prompt", **fields}
        return build(file=files, held_out=0).problems().train[0]

    found = problem(answer_field="reward_model.ground_truth")
    assert (text(found), found.answer) == ("1+1=", "2")
    assert found.metadata == row  # its other parts may be of use to a scorer
    assert problem(answer_field="a.b").answer == "3"  # a field of the whole name comes first
    for name in ("reward_model.truth", "reward_model.ground_truth.deeper", "a.c", "none.at.all"):
        with pytest.raises(UserError, match=rf"has no field `{name}` \(`task.file.answer_field`\)"):
            problem(answer_field=name)


@pytest.mark.parametrize(
    ("scorer", "answer"),
    [
        ("numeric", "so 40+2\n#### 42"),
        ("numeric", "$42"),
        ("numeric", "nan"),
        ("numeric", "3,14"),
        ("numeric", "1_0"),
        ("gsm8k", "#### none"),
        ("regex", "("),
        ("exact", None),
        ("exact", [1]),
        ("math_verify", " "),
    ],
)
def test_an_answer_that_cannot_be_judged_by_is_named_with_its_row(tmp_path, scorer, answer) -> None:
    write(tmp_path / "a.jsonl", [{"prompt": "x", "answer": "1"}, {"prompt": "y", "answer": answer}])
    with pytest.raises(UserError, match=f"line 2, has an answer that `task.file.scorer: {scorer}` cannot use"):
        build(file={"train": str(tmp_path / "a.jsonl"), "scorer": scorer}, held_out=1).problems()


def test_files_of_the_hub(tmp_path, monkeypatch) -> None:
    write(tmp_path / "a.jsonl", [{"prompt": "x", "answer": "1"}, {"prompt": "y", "answer": "2"}])

    def download(repo: str, file: str, repo_type: str) -> str:
        assert (repo, file, repo_type) == ("openai/gsm8k", "main/a.jsonl", "dataset")
        return str(tmp_path / "a.jsonl")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert len(build(file={"train": "hf://datasets/openai/gsm8k/main/a.jsonl"}, held_out=1).problems().train) == 1


@pytest.mark.parametrize(
    ("path", "needle"),
    [
        ("hf://datasets/openai/gsm8k", "should be `hf://datasets/OWNER/NAME/FILE`"),
        (
            "hf://datasets/openai/not-in-the-cache/a.jsonl",
            "the hub cannot be reached, and there is no copy in its cache",
        ),
        ("hf://datasets/openai/two--dashes..x/a.jsonl", "could not be downloaded"),
    ],
)
def test_files_that_the_hub_does_not_give(path, needle) -> None:
    with pytest.raises(UserError, match=needle):
        build(file={"train": path}, held_out=1).problems()


@pytest.mark.parametrize(
    ("name", "content", "needle"),
    [
        ("a.jsonl", "", "is empty: write one row per problem"),
        ("a.jsonl", '{"question": "x", "answer": 1}\n', "no field `prompt`"),
        ("a.jsonl", '{"prompt": "x"}\n', "no field `answer`"),
        ("a.jsonl", '{"prompt": "x", "answer": 1}\n{"prompt"\n', "line 2, is not JSON in UTF-8"),
        ("a.jsonl", b"\xff\xfe", "not JSON in UTF-8"),
        ("a.jsonl", "[1]\n", "line 1, must be a JSON object"),
        ("a.jsonl", '{"prompt": 3, "answer": 1}\n', "must be a text or a list of messages"),
        ("a.jsonl", '{"prompt": [], "answer": 1}\n', "must be a text or a list of messages"),
        ("a.jsonl", '{"prompt": "half \\ud83d", "answer": 1}\n', "half of a character"),
        ("a.jsonl", '{"prompt": "x", "answer": ' + "9" * 5000 + "}\n", "line 1, is not JSON"),
        ("a.jsonl", "[" * 100_000 + "\n", "line 1, is not JSON"),
        (
            "a.jsonl",
            '{"prompt": "x", "answer": 1, "more": ' + "[" * 900 + "]" * 900 + "}\n",
            "line 1, has lists or objects nested more than 100 deep",
        ),
        ("a.jsonl", '{"prompt": "x", "answer": ' + '{"a": ' * 101 + "1" + "}" * 102 + "\n", "line 1, has lists"),
        ("a.jsonl", '{"prompt": "x", "answer": null}\n', "cannot use, 'None': there is none"),
        ("a.jsonl", '{"prompt": "x", "answer": 1}\n', "sets all 1 problems of"),
        ("a.csv", "prompt,answer\n", "must end in .jsonl or .parquet"),
        ("a.parquet", "not parquet", "not a readable Parquet file"),
        (None, "", "does not exist"),
    ],
)
def test_bad_files_say_where_and_why(tmp_path, name, content, needle) -> None:
    path = tmp_path / (name or "missing.jsonl")
    if name:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as caught:
        build(file={"train": str(path)}, held_out=1).problems()
    assert needle in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "completion", "answer", "value"),
    [
        ("exact", " 42\n", 42, 1.0),
        ("exact", "42.", 42, 0.0),
        ("gsm8k", "48 + 24 = 72\n#### 72", "so <<48/2=24>>24\n#### 72", 1.0),
        ("gsm8k", "#### 72\nThat took 3 steps.", "#### 72", 1.0),
        ("gsm8k", "the answer is \\boxed{1,072}.", "#### 1072", 1.0),
        ("gsm8k", "72, which is not 73", "#### 72", 0.0),
        ("gsm8k", "72\n####", "#### 72", 0.0),
        ("gsm8k", "#### -$5", "#### -5", 1.0),
        ("gsm8k", "#### 5 apples and 2 pears", "#### 5", 1.0),
        ("numeric", "first 3, then 1,200.50", "1200.5", 1.0),
        ("numeric", "12345678", "12345679", 0.0),
        ("numeric", "1000001", 1000000, 0.0),
        ("numeric", "0", "1e-10", 0.0),
        ("numeric", "0.3333333", "0.33333334", 1.0),
        ("numeric", "3 then 4", 3, 0.0),
        ("numeric", "none", 3, 0.0),
        ("numeric", "-.5e1", -5, 1.0),
        ("numeric", "10-7", 7, 1.0),
        ("numeric", "it is \N{MINUS SIGN}5", 5, 0.0),
        ("numeric", "it is \N{MINUS SIGN}5", "\N{MINUS SIGN}5", 1.0),
        ("numeric", "it is \N{MINUS SIGN}5", -5, 1.0),
        ("numeric", "10 - -7", -7, 1.0),
        ("numeric", "1,2", 2, 1.0),
        ("numeric", "12,345,678.", 12345678, 1.0),
        ("regex", "cat", "c.t", 1.0),
        ("regex", "cats", "c.t", 0.0),
        ("math_verify", "so $\\frac{1}{2}$", "0.5", 1.0),
        ("math_verify", "so $\\frac{1}{3}$", "0.5", 0.0),
        ("math_verify", "(1,2)", "(1,2)", 1.0),
        ("math_verify", "(1,3)", "(1,2)", 0.0),
    ],
)
def test_scorers(name, completion, answer, value) -> None:
    assert find_scorer(name)(completion, answer) == value


def test_sampler_visits_everything_once_an_epoch_in_the_seeds_order() -> None:
    first, again, other = (Sampler(list(range(10)), seed) for seed in (0, 0, 1))
    epochs = [first.draw(10), first.draw(10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert again.draw(3) + again.draw(17) == epochs[0] + epochs[1]
    assert other.draw(10) != epochs[0]


class Odd:
    """A task of a user's own, with what it is told as its problems."""

    def __init__(self, problems: str) -> None:
        self._problems = problems

    def problems(self):
        ask_one = Problem(ask("1="), 1)
        return {
            "a list": [ask_one],
            "nothing": None,
            "a generator": Problems(iter([ask_one]), []),
            "none held out": Problems([ask_one], None),
            "a row": Problems([ask_one, {"prompt": "1"}], []),
            "a text": Problems([Problem("12=", 1)], []),
            "no role": Problems([Problem([{"content": "x"}], 1)], []),
            "parts": Problems([Problem([{"role": "user", "content": [{"type": "text", "text": "x"}]}], 1)], []),
            "half": Problems([], [Problem(ask("\ud800"), 1)]),
        }[self._problems]

    def score(self, problem, completion):
        return 0.5


@pytest.mark.parametrize(
    ("what", "needle"),
    [
        ("a list", r"returns a list as its problems: return `Problems\("),
        ("nothing", "returns a NoneType as its problems"),
        ("a generator", "has a list_iterator as `Problems.train`"),
        ("none held out", "has a NoneType as `Problems.held_out`"),
        ("a row", "has a dict as problem 1 of `train`"),
        ("a text", "has problem 0 of `train` with messages that are not a list"),
        ("no role", "messages that are not all texts with a `role`"),
        ("parts", "messages that are not all texts"),
        ("half", "problem 0 of `held_out` with messages that contain half of a character"),
    ],
)
def test_problems_of_a_python_task_are_looked_at(what, needle) -> None:
    with pytest.raises(UserError, match=needle):
        build(python={"object": "test_tasks:Odd", "options": {"problems": what}}).problems()


def test_a_python_task_that_cannot_be_imported(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "leaves.py").write_text("import sys; sys.exit(0)")
    with pytest.raises(UserError, match=r"exits the process when it is imported \(exit code 0\)"):
        build(python={"object": "leaves:Task"})
    with pytest.raises(UserError, match="cannot be imported"):
        build(python={"object": "./leaves:Task"})


def test_a_score_may_be_a_number() -> None:
    task = build(python={"object": "test_tasks:Odd", "options": {"problems": "a list"}})
    assert score_one(task, Problem(ask("1="), 1), "x") == ScoreResult(0.5)
    odd = SimpleNamespace(score=lambda *_: "right")
    assert "`score` returned str: return a number, or Score" in score_one(odd, Problem(ask("1="), 1), "x").message
