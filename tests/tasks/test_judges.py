"""Judges at a URL: what they are asked, how scores are read, and what becomes of those that hang, fail or say
garbage."""

import asyncio
import json
from pathlib import Path

import pytest

from ebbtide.config import load
from ebbtide.config.task import TaskConfig
from ebbtide.errors import UserError
from ebbtide.parallel.comm import Comm
from ebbtide.progress import WorkAbandoned
from ebbtide.rollout.partitioned_scoring import PartitionedScoring
from ebbtide.tasks.build import build_task
from ebbtide.tasks.judge_client import MAX_DELAY
from ebbtide.tasks.judgement import UnreadableAnswerError, read_score
from ebbtide.tasks.judges import Judges
from ebbtide.tasks.scoring import ScoringPool
from ebbtide.tasks.task import Problem, ask
from judge_server import judge_server
from patience import PATIENCE

ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1), "meta": {"hint": f"count {n}", "n": n}} for n in range(4)]


@pytest.fixture
def rows(tmp_path) -> str:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(file)


def judge(url: str = "http://x/v1", **changes):
    return {"url": url, "model": "m", "prompt": "{prompt}{completion}", "timeout_s": PATIENCE, **changes}


def config(train: str, rewards, **changes) -> TaskConfig:
    scoring = {"workers": 1, "timeout_s": PATIENCE}
    return TaskConfig.model_validate(
        {"file": {"train": train}, "held_out": 0, "rewards": rewards, "scoring": scoring, **changes}
    )


class Slept:
    """Waits for nothing, and remembers for how long."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


def answers(task: TaskConfig, work, sleep=None):
    """(answers of the judge `j`, its metrics)."""
    with Judges(task, sleep=sleep or Slept()) as judges:
        found = [one["j"] for one in judges.start(work).result()]
        return found, judges.drain()


def test_a_thousand_judgements_have_64_in_flight(rows) -> None:
    """The server answers only when 64 are waiting, or all that are left."""
    count, waiting, answered = 1000, list[asyncio.Future[None]](), [0]

    async def reply(number, request):
        waiting.append(asyncio.get_running_loop().create_future())
        mine = waiting[-1]
        if len(waiting) == 64 or len(waiting) + answered[0] == count:
            answered[0] += len(waiting)
            for one in waiting:
                one.set_result(None)
            waiting.clear()
        await mine
        return request["messages"][0]["content"]

    with judge_server(reply) as server:
        task = config(rows, {"j": {"judge": judge(server.url, prompt="{completion}", retries=0)}})
        found, figures = answers(task, [(Problem(ask("?")), str(n)) for n in range(count)])
        assert found == [str(n) for n in range(count)]
        assert server.most_inside == 64
        assert len(server.requests) == count
    assert (figures["judge/j/requests"], figures["judge/j/retries"], figures["judge/j/cached"]) == (count, 0, 0)


def test_ranks_share_the_requests_in_flight(rows) -> None:
    with judge_server(lambda number, request: "1") as server:
        task = config(rows, {"j": {"judge": judge(server.url, prompt="{completion}", concurrency=3)}})
        with Judges(task, ranks=2) as judges:
            judges.start([(Problem(ask("?")), str(n)) for n in range(40)]).result()
        assert server.most_inside <= 2


def test_a_request_is_what_the_config_says(rows, monkeypatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    asked = judge(prompt='{prompt}|{completion}|{answer}|{meta.hint}|{meta.n}|{"a": 1}|{{answer}}', system="be fair")
    asked |= {"options": {"max_tokens": 5}, "api_key_env": "JUDGE_KEY"}
    with judge_server(lambda number, request: "1") as server:
        task = config(rows, {"j": {"judge": {**asked, "url": server.url + "/"}}}, system="of the policy")
        problem = build_task(task, 0).problems().train[2]
        answers(task, [(problem, "x{answer}")])  # what a model wrote is not expanded again
        request = server.requests[0]
        assert server.headers[0]["Authorization"] == "Bearer sk-secret"
    assert request == {
        "path": "/v1/chat/completions",
        "model": "m",
        "messages": [
            {"role": "system", "content": "be fair"},
            {"role": "user", "content": '2+1=|x{answer}|3|count 2|2|{"a": 1}|{answer}'},
        ],
        "max_tokens": 5,
    }


def test_the_same_request_is_asked_once_and_the_cache_is_bounded(rows) -> None:
    with judge_server(lambda number, request: str(number)) as server:
        task = config(rows, {"j": {"judge": judge(server.url, prompt="{completion}", cache_size=2, concurrency=1)}})
        with Judges(task) as judges:

            def say(*texts: str) -> list[str]:
                return [one["j"] for one in judges.start([(Problem(ask("?")), text) for text in texts]).result()]

            assert say("a", "b", "a", "a") == ["0", "1", "0", "0"]
            assert judges.drain()["judge/j/cached"] == 2
            assert say("a") == ["0"]  # and so `b` is the older one
            assert (say("c"), say("a"), say("b")) == (["2"], ["0"], ["3"])
            assert judges.drain() == {
                "judge/j/requests": 2,
                "judge/j/cached": 2,
                "judge/j/retries": 0,
                "judge/j/seconds": pytest.approx(0, abs=PATIENCE),
            }
        uncached = config(rows, {"j": {"judge": judge(server.url, cache_size=0)}})
        found, _ = answers(uncached, [(Problem(ask("?")), "a")] * 3)
        assert len(set(found)) == 3


def test_the_cache_does_not_keep_the_requests(rows) -> None:
    with judge_server(lambda number, request: "1") as server:
        task = config(rows, {"j": {"judge": judge(server.url, prompt="{completion}")}})
        with Judges(task) as judges:
            judges.start([(Problem(ask("?")), f"{n}" * 10_000) for n in range(5)]).result()
            (client,) = judges._clients.values()
            assert [(len(key), answer) for key, answer in client._cache.items()] == [(32, "1")] * 5


def test_what_may_pass_is_tried_again_with_longer_and_longer_waits(rows) -> None:
    replies = [(500, b"no"), (200, b"<html>"), (429, b""), "0.5"]
    slept = Slept()
    with judge_server(lambda number, request: replies[number]) as server:
        task = config(rows, {"j": {"judge": judge(server.url)}})
        found, figures = answers(task, [(Problem(ask("?")), "a")], slept)
    assert found == ["0.5"]
    assert slept.seconds == [7, 1, 7]  # the server asks for 7 s where it refuses
    assert max(slept.seconds) <= MAX_DELAY
    assert figures["judge/j/retries"] == 3


@pytest.mark.parametrize(
    ("reply", "failure", "requests", "said"),
    [
        ((500, b"out of memory"), "judge_error", 3, "status 500: out of memory"),
        ((401, b"your key sk-secret is wrong"), "judge_error", 1, "your key *** is wrong"),
        ((302, b""), "judge_error", 1, "status 302"),
        ((200, b"\xff\xfe garbage"), "judge_error", 3, "no chat completion"),
        ((200, b'{"choices": []}'), "judge_error", 3, "no chat completion"),
        ((200, b"[" * 100_000), "judge_error", 3, "no chat completion"),
        ((200, b"x" * (1 << 21)), "judge_error", 1, "more than 1,048,576 bytes"),
        (None, "judge_timeout", 3, "did not answer within 0.05 s"),
    ],
    ids=["500", "401", "302", "bytes", "empty", "deep", "endless", "hangs"],
)
def test_a_judge_that_fails_costs_the_sample(rows, monkeypatch, reply, failure, requests, said) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    with judge_server(lambda number, request: reply if "bad" in str(request) else "1") as server:
        limits = {"retries": 2, "api_key_env": "JUDGE_KEY", **({"timeout_s": 0.05} if reply is None else {})}
        task = config(rows, {"j": {"judge": judge(server.url, **limits)}})
        found, _ = answers(task, [(Problem(ask("?")), "bad"), (Problem(ask("?")), "good")])
        assert sum("bad" in text for text in server.asked()) == requests
    assert found[1] == "1" or reply is None  # 0.05 s may be too little for an answer, too
    assert found[0].failure == failure
    assert found[0].value == 0
    assert said in found[0].message
    assert "sk-secret" not in found[0].message


def test_nobody_there_costs_samples(rows) -> None:
    with judge_server(lambda number, request: "1") as server:
        url = server.url
    found, figures = answers(config(rows, {"j": {"judge": judge(url)}}), [(Problem(ask("?")), "a")])
    assert (found[0].failure, figures["judge/j/retries"]) == ("judge_error", 3)
    assert "ConnectError" in found[0].message


def test_a_step_does_not_wait_longer_than_its_limit(rows) -> None:
    with judge_server(lambda number, request: None) as server:
        task = config(rows, {"j": {"judge": judge(server.url, concurrency=1, step_timeout_s=0.05)}})
        found, _ = answers(task, [(Problem(ask("?")), str(n)) for n in range(5)])
    assert [one.failure for one in found] == ["judge_timeout"] * 5
    assert "step_timeout_s" in found[0].message


def test_work_that_is_abandoned_is_not_waited_for(rows) -> None:
    def stop(done: int, of: int) -> None:
        raise WorkAbandoned

    with judge_server(lambda number, request: None) as server:
        task = config(rows, {"j": {"judge": judge(server.url)}})
        with Judges(task) as judges, pytest.raises(WorkAbandoned):
            judges.start([(Problem(ask("?")), "a")]).result(stop)


@pytest.mark.parametrize(
    ("how", "answer", "score"),
    [
        ({}, " 0.25\n", 0.25),
        ({"range": [1, 5]}, "2", 0.25),
        ({"regex": r"Score: (\d+)"}, "Score: 1? No.\nScore: 7", 7),
        ({"json_field": "score"}, 'So: {"score": 1}, or {"score": "0.5", "why": {"a": "}"}} {"other": 9}', 0.5),
        ({"json_field": "a.b"}, 'x {{"a": {"b": 3}} }', 3),
        ({"values": {"Yes": 1, "no": -1}}, "YES", 1),
        ({"regex": r"\[\[(\w)\]\]", "values": {"A": 1, "B": 0}}, "[[A]] or rather [[B]]", 0),
        ({"json_field": "ok", "values": {"true": 1, "false": 0}}, '{"ok": false}', 0),
        ({"json_field": "ok", "values": {"2": 1, "1": 0.5}}, '{"ok": 1}', 0.5),
        ({}, "nan", None),
        ({}, "-inf", None),
        ({}, "1e7", None),
        ({"range": [1, 5]}, "6", None),
        ({"range": [1, 5]}, "nan", None),
        ({}, "about 3", None),
        ({}, "", None),
        ({"regex": r"Score: (\d+)"}, "none", None),
        ({"json_field": "score"}, '{"score": [1]}', None),
        ({"json_field": "score"}, '{"score": true}', None),
        ({"json_field": "score"}, '{"a":' * 50_000, None),
        ({"json_field": "score"}, '{"score": ' + "9" * 5000 + "}", None),
        ({"values": {"yes": 1}}, "maybe", None),
    ],
)
def test_scores_are_read_from_answers(how, answer, score) -> None:
    task = TaskConfig.model_validate({"builtin": {"name": "copy"}, "rewards": {"j": {"judge": judge(**how)}}})
    config = task.rewards["j"].judge
    if score is None:
        with pytest.raises(UnreadableAnswerError):
            read_score(config, answer)
    else:
        assert read_score(config, answer) == score


def test_rewards_add_up_and_a_lost_part_costs_its_sample(rows) -> None:
    """By weight, and each a part; answers of judges are read in the scoring processes."""

    def reply(number, request):
        text = request["messages"][0]["content"]
        return {"2": "Score: 8", "3": "Score: 4", "4": (500, b""), "5": "I refuse"}[text]

    with judge_server(reply) as server:
        style = {"judge": judge(server.url, prompt="{completion}", regex=r"Score: (\d+)", range=[0, 10], retries=0)}
        rewards = {
            "right": {"scorer": "task", "weight": 2},
            "number": {"scorer": "numeric"},
            "peer": {"python": {"object": "peer_rewards:later"}, "weight": 2},
            "style": {**style, "weight": -1},
        }
        task = config(rows, rewards, extract=r"(\d)")
        problem = build_task(task, 0).problems().train[1]
        with Judges(task) as judges, ScoringPool(task, 0) as pool:
            scoring = PartitionedScoring(pool, Comm(), task, judges)
            found = scoring.score([(problem, text) for text in "2345"])
    right = {"extracted": 1, "right": 1, "right/exact": 1, "number": 1, "peer": 0.25, "style": 0.8}
    assert found[0].parts == right
    assert found[0].value == pytest.approx(2 + 1 + 0.5 - 0.8)
    assert found[1].value == pytest.approx(0.5 - 0.4)
    assert [(one.value, one.failure) for one in found[2:]] == [(0, "judge_error"), (0, "judge_unreadable")]
    assert "I refuse" in found[3].message


@pytest.mark.parametrize(
    ("rewards", "changes", "said"),
    [
        ({}, {}, "`task.rewards` is empty"),
        ({"a b": {"scorer": "task"}}, {}, "letters, digits"),
        ({"a": {}}, {}, "set now: none"),
        ({"a": {"scorer": "task", "judge": judge()}}, {}, "`scorer` and `judge`"),
        ({"a": {"judge": judge("localhost:8000")}}, {}, "is no address"),
        ({"a": {"judge": judge("http://user:secret@x")}}, {}, "`api_key_env`"),
        ({"a": {"judge": judge(api_key_env="sk-secret")}}, {}, "not the name of an environment variable"),
        ({"a": {"judge": judge(regex="(")}}, {}, "not a regular expression"),
        ({"a": {"judge": judge(regex="x")}}, {}, "0 groups"),
        ({"a": {"judge": judge(regex="(x)", json_field="y")}}, {}, "remove one of the two"),
        ({"a": {"judge": judge(range=[2, 1])}}, {}, "has to rise"),
        ({"a": {"judge": judge(values={"x": 1}, range=[0, 1])}}, {}, "remove one of the two"),
        ({"a": {"judge": judge(options={"stream": True})}}, {}, "`options.stream`"),
        ({"a": {"judge": judge()}}, {"extract": "(x)"}, "`task.extract`"),
        ({"a": {"judge": judge()}}, {"file": {"train": "x", "scorer": "gsm8k"}}, "`task.file.scorer` is set"),
        ({"a": {"scorer": "task"}}, {"file": {"train": "x", "answer_field": None}}, "no answers to score by"),
        ({"a": {"scorer": "exact"}}, {"file": None, "builtin": {"name": "copy"}}, "answers of `task.file`"),
        ({"a": {"python": {"object": "a:b"}}}, {"file": None, "builtin": {"name": "copy"}}, "rows of `task.file`"),
    ],
)
def test_rewards_that_cannot_be_are_refused_without_secrets(rewards, changes, said) -> None:
    with pytest.raises(ValueError, match="Value error") as error:
        config("x", rewards, **changes)
    text = "\n".join(problem["msg"] for problem in error.value.errors())
    assert said in text
    assert "secret" not in text


def test_an_unknown_field_of_a_row_is_refused_before_the_run(rows) -> None:
    task = config(rows, {"j": {"judge": judge(prompt="{meta.hunt}")}})
    with pytest.raises(UserError, match=r"`task\.rewards\.j\.judge\.prompt` has `\{meta\.hunt\}`"):
        build_task(task, 0).problems()
    one = {"file": {"train": rows}, "held_out": 0, "rewards": {"j": {"judge": judge(prompt="{meta.hunt}")}}}
    mixed = TaskConfig.model_validate({"mix": {"good": {"builtin": {"name": "copy"}}, "bad": one}})
    with pytest.raises(UserError, match=r"`task\.mix\.bad\.rewards\.j\.judge\.prompt` has"):
        build_task(mixed, 0).problems()


def test_a_key_that_is_not_there_is_refused(rows, monkeypatch) -> None:
    task = config(rows, {"j": {"judge": judge(api_key_env="NO_SUCH_KEY")}})
    for value, said in (("", "is not set"), ("a\nb", "no API key has")):
        monkeypatch.setenv("NO_SUCH_KEY", value)
        with pytest.raises(UserError, match=said), Judges(task):
            pass


def test_the_config_of_the_docs_loads(tmp_path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "judges.md").read_text()
    file = tmp_path / "judged.yaml"
    file.write_text(text.partition("```yaml\n")[2].partition("```")[0])
    found = load(str(file), ["task.rewards.style.judge.concurrency=8"]).task.rewards
    assert {name: one.weight for name, one in found.items()} == {
        "correct": 1.0,
        "brief": 0.1,
        "helpful": 0.5,
        "style": 0.3,
    }
    assert found["style"].judge.concurrency == 8
    assert read_score(found["style"].judge, "Clear enough.\nScore: 10") == 1.0


def test_a_list_of_rewards_is_a_mapping_to_overrides_too(tmp_path) -> None:
    file = tmp_path / "listed.yaml"
    file.write_text("model: x/y\ntask: {builtin: copy, rewards: [{name: a, scorer: task}, {scorer: task}]}\n")
    found = load(str(file), ["task.rewards.a.weight=2", "task.rewards.reward2.weight=-1"]).task.rewards
    assert {name: one.weight for name, one in found.items()} == {"a": 2.0, "reward2": -1.0}
    mixed = tmp_path / "mixed.yaml"
    task = "{name: %s, builtin: copy, rewards: [{scorer: task}]}"
    mixed.write_text(f"model: x/y\ntask: [{task % 'one'}, {task % 'two'}]\n")
    found = load(str(mixed), ["task.mix.two.rewards.reward1.weight=3"]).task.mix
    assert (found["one"].rewards["reward1"].weight, found["two"].rewards["reward1"].weight) == (1.0, 3.0)


@pytest.mark.parametrize("first", ["{name: reward2, scorer: task}", "{name: same, scorer: task}"])
def test_two_rewards_of_a_list_have_two_names(tmp_path, first) -> None:
    file = tmp_path / "twice.yaml"
    second = "{scorer: task, weight: 2}" if "reward2" in first else "{name: same, scorer: task, weight: 2}"
    file.write_text(f"model: x/y\ntask: {{builtin: copy, rewards: [{first}, {second}]}}\n")
    for overrides in ([], ["task.rewards.same.weight=3"]):
        with pytest.raises(UserError, match=r"two that are called '(reward2|same)'"):
            load(str(file), overrides)


def test_verdicts_that_yaml_takes_for_booleans_are_asked_for_in_quotes(tmp_path) -> None:
    file = tmp_path / "yes.yaml"
    text = (
        "model: x/y\ntask: {builtin: copy, rewards: {j: {judge: {url: 'http://x', model: m, prompt: p, values: %s}}}}\n"
    )
    file.write_text(text % "{yes: 1, no: 0}")
    with pytest.raises(UserError, match="key True is not a text: write it in quotes"):
        load(str(file), [])
    file.write_text(text % "{'yes': 1, 'no': 0}")
    assert load(str(file), []).task.rewards["j"].judge.values == {"yes": 1, "no": 0}


def test_a_pattern_that_never_ends_costs_the_sample(rows) -> None:
    """What judges say is searched in the scoring processes."""
    with judge_server(lambda number, request: "a" * 50) as server:
        endless = {"j": {"judge": judge(server.url, regex="((?:a|aa)+)b")}}
        task = config(rows, endless, scoring={"workers": 1, "timeout_s": 0.5})
        problem = build_task(task, 0).problems().train[0]
        with Judges(task) as judges, ScoringPool(task, 0) as pool:
            (found,) = PartitionedScoring(pool, Comm(), task, judges).score([(problem, "x")])
    assert found.failure == "timeout"
