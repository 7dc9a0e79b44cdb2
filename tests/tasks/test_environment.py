"""Environments by duck type, in every spelling; and the processes that they run in."""

import json
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest

from ebbtide.config.environment import EnvironmentConfig
from ebbtide.errors import UserError
from ebbtide.tasks.channel import Channel
from ebbtide.tasks.environment import Description, Environment, Opening, Outcome, Reply
from ebbtide.tasks.environment_message import Failed, decode_answer, encode_answer
from ebbtide.tasks.environment_pool import EnvironmentPool
from ebbtide.tasks.environments.python import make as python_environment
from ebbtide.tasks.task import ask
from patience import PATIENCE

SAID = [{"role": "user", "content": "warmer"}]


class Observation:
    """As OpenEnv has them: an observation with reward and done."""

    def __init__(self, text: str, reward: float | None, done: bool) -> None:
        self.message, self.reward, self.done = text, reward, done

    def model_dump(self):
        return {"message": self.message, "reward": self.reward, "done": self.done, "metadata": {}}


SPELLINGS = {
    "three": ("warmer", 0.5, False),
    "four": ("warmer", 0.5, False, {}),
    "Gymnasium": ("warmer", 0.5, False, False, {}),
    "SkyRL": {"observations": SAID, "reward": 0.5, "done": False, "metadata": {}},
    "OpenEnv observation": Observation("warmer", 0.5, False),
    "OpenEnv result": SimpleNamespace(observation=Observation("warmer", None, False), reward=0.5, done=False),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_of_step(spelling) -> None:
    made = SimpleNamespace(step=lambda text: SPELLINGS[spelling])
    environment = Environment(made)
    assert environment.describe() == Description([], True)
    assert environment.step("x", "x") == Reply(SAID, 0.5, False)
    assert environment.finish() == Outcome(0.0)


@pytest.mark.parametrize(
    ("returned", "done"),
    [
        (("", 1, True, False, {}), True),
        (("", 1, False, True, {}), True),
        ({"observations": [], "reward": None, "done": True}, True),
    ],
)
def test_the_end_of_an_episode(returned, done) -> None:
    reply = Environment(SimpleNamespace(step=lambda text: returned)).step("x", "x")
    assert (reply.messages, reply.done) == ([], done)


def test_what_is_no_step_says_what_to_return() -> None:
    with pytest.raises(TypeError, match="`step` returned NoneType: return"):
        Environment(SimpleNamespace(step=lambda text: None)).step("x", "x")
    with pytest.raises(TypeError, match="is no environment: give it a method `step"):
        Environment(SimpleNamespace())


@pytest.mark.parametrize(
    ("returned", "prompt"),
    [
        (None, [{"role": "user", "content": "hi "}]),
        ("there", [{"role": "user", "content": "hi there"}]),
        (("there", {"info": 1}), [{"role": "user", "content": "hi there"}]),
        ([{"role": "user", "content": "new"}], [{"role": "user", "content": "new"}]),
    ],
)
def test_every_spelling_of_reset(returned, prompt) -> None:
    made = SimpleNamespace(step=lambda text: None, reset=lambda **row: returned)
    assert Environment(made).reset(ask("hi "), {}, 0, "json") == Opening(prompt)


def test_reset_gets_of_the_row_what_it_takes() -> None:
    seen = {}

    class Some:
        def reset(self, answer, seed=None):
            seen.update(answer=answer, seed=seed)

        def step(self, text):
            return "", 0, True

    system = {"role": "system", "content": "be kind"}
    Environment(Some()).reset([system], {"answer": 4, "other": 5}, 7, "json")
    assert seen == {"answer": 4, "seed": 7}
    listed = SimpleNamespace(init=lambda prompt: ([*prompt, *ask("q")], {}), step=None, look=None)
    listed.step = lambda text: None
    assert Environment(listed).reset([system], {}, 0, "json").messages == [system, *ask("q")]


class Shop:
    """As TRL has them: public methods are tools."""

    def __init__(self) -> None:
        self._bought = 0

    def reset(self, **row) -> str:
        return f" The budget is {row['budget']}."

    def buy(self, item: str, count: int = 1, how: Literal["cash", "card"] = "cash") -> str:
        """Buys something.

        Args:
            item: What to buy.
            count: How many
                of it.

        Returns:
            What was bought.
        """
        self._bought += count
        return f"{count} {item}"

    async def look(self) -> dict:
        """Looks around."""
        return {"shelf": ["tea"]}

    def get_reward(self) -> float:
        return float(self._bought)


def test_tools_in_the_style_of_trl() -> None:
    environment = Environment(Shop())
    tools = {tool["function"]["name"]: tool["function"] for tool in environment.describe().tools}
    assert set(tools) == {"buy", "look"}
    assert tools["buy"] == {
        "name": "buy",
        "description": "Buys something.",
        "parameters": {
            "type": "object",
            "properties": {
                "item": {"type": "string", "description": "What to buy."},
                "count": {"type": "integer", "description": "How many of it."},
                "how": {"type": "string", "enum": ["cash", "card"]},
            },
            "required": ["item"],
        },
    }
    assert environment.reset(ask("Shop!"), {"budget": 3}, 0, "qwen").messages == ask("Shop! The budget is 3.")

    def call(text: str) -> Reply:
        return environment.step("", f"<tool_call>{text}</tool_call>")

    bought = call('{"name": "buy", "arguments": {"item": "tea", "count": 2}}')
    assert bought == Reply([{"role": "tool", "content": "2 tea"}], 0.0, False, ["buy"], 0)
    assert call('{"name": "look", "arguments": {}}').messages[0]["content"] == '{"shelf": ["tea"]}'
    wrong = {
        '{"name": "steal", "arguments": {}}': "no tool `steal`",
        '{"name": "buy", "arguments": {"cost": 1}}': "no argument `cost`",
        "{nonsense": "JSON",
    }
    for text, why in wrong.items():
        reply = call(text)
        assert (reply.failed_calls, reply.done) == (1, False)
        assert reply.messages[0]["role"] == "tool"
        assert why in reply.messages[0]["content"]
    assert environment.step("", "That is all.") == Reply([], 0.0, True)
    assert environment.finish() == Outcome(2.0)
    environment.close()


@pytest.mark.parametrize(
    "answer",
    [
        Description([{"name": "x"}], False),
        Opening(ask("hi")),
        Reply(SAID, 0.5, True, ["x"], 1),
        Outcome(None, {"a": 1.0}),
        Failed("error", "it broke"),
    ],
)
def test_answers_arrive_as_they_were_sent(answer) -> None:
    assert decode_answer(encode_answer(3, answer).rstrip(), 3) == answer
    with pytest.raises(ValueError, match="not an answer"):
        decode_answer(encode_answer(3, answer).rstrip(), 4)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[]",
        b'[1, "replied", [], "x", true, [], 0]',
        b'[1, "opened", []]',
        b"[" * 100_000,
        b"\xff",
        b'[1, "ended", 0, {"a": null}]',
        b'[1, "ended", 1' + b"0" * 400 + b", {}]",
        b'[1, "asked", [], null, [], false, []]',
        b'[1, "asked", [-1], null, [], false, []]',
        b'[1, "asked", [1], 0, [], false, []]',
        rb'[1, "asked", [], null, [{"role": "user", "content": "x"}], false, [{"name": "\ud800"}]]',
    ],
)
def test_garbage_is_no_answer(line) -> None:
    with pytest.raises(ValueError, match=r"not an answer|Expecting|codec|no turn"):
        decode_answer(line, 1)


def test_rewards_that_cannot_be_trained_on_are_failures() -> None:
    for reward, failure in ((float("nan"), "not_finite"), (1e9, "too_large")):
        for answer in (Reply([], reward), Outcome(reward)):
            found = decode_answer(encode_answer(1, answer).rstrip(), 1)
            assert isinstance(found, Failed)
            assert found.failure == failure
    found = decode_answer(encode_answer(1, Reply([{"role": "user", "content": "x" * 300_000}])).rstrip(), 1)
    assert isinstance(found, Failed)
    assert found.failure == "too_large"


def play(pool: EnvironmentPool, seed: int):
    """The last answer of an episode of two turns."""
    process = pool.open()
    for request in (("reset", [], {}, seed, "json"), ("step", "x", ""), ("step", "y", ""), ("finish",)):
        pool.ask(process, *request)
        while not (found := pool.answers(60.0)):
            pass
        ((_, answer),) = found
        if isinstance(answer, Failed):
            pool.close(process, hard=True)
            return answer
    pool.close(process, hard=False)
    return answer


def test_a_process_that_fails_is_replaced_and_others_are_reused() -> None:
    config = EnvironmentConfig(
        object="misbehaving_environment:Unruly", timeout_s=1.0, memory_mib=1024, options={"faults": True}
    )
    with EnvironmentPool(config) as pool:
        assert pool.describe() == Description([], True)
        kinds = {}
        for seed, fault in enumerate(("none", "hang", "crash", "flood", "garbage", "raise", "memory", "nan", "fork")):
            started = time.monotonic()
            kinds[fault] = play(pool, seed)
            assert time.monotonic() - started < 10
            good = play(pool, 0)
            assert good == Outcome(0.0, {"episodes": 1.0})  # a new environment for each episode
        assert kinds.pop("none") == Outcome(0.0, {"episodes": 1.0})
        assert {fault: answer.failure for fault, answer in kinds.items() if isinstance(answer, Failed)} == {
            "hang": "timeout",
            "crash": "crash",
            "flood": "too_large",
            "garbage": "error",
            "raise": "error",
            "memory": "error",
            "nan": "not_finite",
        }
        assert kinds["fork"] == Outcome(0.0, {"episodes": 1.0})


def test_what_a_crashed_environment_leaves_behind_ends_with_it(tmp_path) -> None:
    note = tmp_path / "number"
    with EnvironmentPool(
        EnvironmentConfig(object="misbehaving_environment:Leaves", options={"note": str(note)})
    ) as pool:
        answer = play(pool, 0)
        assert isinstance(answer, Failed)
        assert answer.failure == "crash"
        until = time.monotonic() + PATIENCE
        while _is_alive(int(note.read_text())):
            assert time.monotonic() < until


def _is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_an_environment_that_cannot_be_closed_keeps_its_reward() -> None:
    with EnvironmentPool(EnvironmentConfig(object="misbehaving_environment:Unclosable")) as pool:
        assert play(pool, 0) == Outcome(0.0)


def test_a_process_that_died_while_it_was_idle_is_not_used() -> None:
    with EnvironmentPool(EnvironmentConfig(object="misbehaving_environment:Unclosable")) as pool:
        first = pool.open()
        pool.close(first, hard=False)
        first.channel._socket.shutdown(socket.SHUT_RDWR)
        assert pool.open() is not first
        assert play(pool, 0) == Outcome(0.0)


def test_a_long_line_that_is_there_is_read_at_once() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.setblocking(False)
        sent = theirs.send(b"x" * 150_000 + b"\n")
        channel = Channel(ours, "the process", 1 << 22, lambda: "")
        if sent < 150_001:
            assert channel.receive() is None
            theirs.sendall(b"x" * (150_000 - sent) + b"\n")
        line = channel.receive()
        assert line is not None
        assert len(line) == 150_000
    channel.close()


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"object": "no_such_module:Thing"}, "cannot be imported"),
        ({"object": "misbehaving_environment:NUMBER"}, "is a int: name a class"),
        ({"object": "misbehaving_environment:Unruly", "options": {"x": 1}}, "gives no environment with"),
        ({"object": "misbehaving_environment:Nothing"}, "is no environment"),
        ({"object": "calculator", "options": {"digits": 0}}, "should be from 1 to 9"),
    ],
)
def test_what_is_no_environment_is_refused_at_the_start(config, why) -> None:
    def describe() -> None:
        with EnvironmentPool(EnvironmentConfig(**config)) as pool:
            pool.describe()

    with pytest.raises(UserError, match=why):
        describe()


def test_a_name_that_is_none() -> None:
    with pytest.raises(ValueError, match="write `module:name` of a class or function, or one of calculator, mcp"):
        EnvironmentConfig(object="chess")


def test_a_python_tool_runs_code_in_the_sandbox() -> None:
    try:
        environment = Environment(python_environment())
    except UserError as error:
        pytest.skip(f"the kernel cannot isolate code here: {error}")
    described = environment.describe()
    assert [tool["function"]["name"] for tool in described.tools] == ["python"]
    assert not described.gives_reward
    environment.reset(ask("6 * 7?"), {}, 0, "qwen")
    call = json.dumps({"name": "python", "arguments": {"code": "print(6 * 7)"}})
    assert environment.step("", f"<tool_call>{call}</tool_call>").messages == [{"role": "tool", "content": "42"}]
    assert environment.step("", "42") == Reply([], 0.0, True)
