"""Environments by duck type: whatever an object calls its methods, it becomes one with `describe`, `reset`,
`step` and `finish`.

Three styles are known. An object with `step` gets what the policy wrote, and answers in the spelling of Gymnasium (a
tuple), SkyRL-gym (a dict) or OpenEnv (an object with `reward` and `done`). In any other object, as TRL has them, the
public methods are tools, which the policy calls, and `get_reward()` gives the reward at the end. An object with
`run(policy)` drives its episodes itself (driving.py).
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ebbtide.config.environment import ToolFormat
from ebbtide.tasks.driving import DrivenEpisode
from ebbtide.tasks.policy_handle import NOTHING_KNOWN, Asked, PolicyError, PolicyFacts, Sampled
from ebbtide.tasks.task import Message, find_message_problem
from ebbtide.tasks.tool_calls import parse
from ebbtide.tasks.tool_functions import ToolError, checked_call, schema

RESERVED = frozenset({"reset", "init", "step", "close", "get_reward", "get_metrics", "state", "done"})
"""Names that are never tools."""
MESSAGE = ("role", "content")


@dataclass(frozen=True)
class Description:
    """What a run has to know of an environment before its first episode."""

    tools: list[dict[str, Any]]
    """The schemas of the tools that the policy may call."""
    gives_reward: bool
    """Whether rewards come from it: otherwise the task's scorer scores the last turn."""
    drives: bool = False
    """Whether it drives its episodes: it asks for the policy's turns by token ids."""


@dataclass(frozen=True)
class Opening:
    """How an episode begins: its prompt."""

    messages: list[Message]


@dataclass(frozen=True)
class Reply:
    """What an environment answers to a turn of the policy."""

    messages: list[Message]
    reward: float = 0.0
    done: bool = False
    calls: list[str] = field(default_factory=list)
    """The tools that were called, by name."""
    failed_calls: int = 0
    """Calls that could not be read, of tools that do not exist, or that raised."""


@dataclass(frozen=True)
class Outcome:
    """How an episode ended: the reward in addition to those of its turns, None if the environment gives none at all,
    and figures to report."""

    reward: float | None
    parts: dict[str, float] = field(default_factory=dict)


class Environment:
    """The environment of one episode, around an object of whatever style."""

    def __init__(self, made: Any, facts: PolicyFacts = NOTHING_KNOWN) -> None:
        self._made, self._facts = made, facts
        self._format: ToolFormat = "json"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._steps, self._drives = callable(getattr(made, "step", None)), _drives(made)
        self._episode: DrivenEpisode | None = None
        self._tools = {} if self._steps or self._drives else _tools_of(made)
        if not self._steps and not self._drives and not self._tools:
            raise TypeError(
                f"{type(made).__name__} is no environment: give it a method `step(text)`, public methods as tools, or a"
                " method `run(policy)`"
            )

    def describe(self) -> Description:
        """Describes the environment, before any episode."""
        tools = [schema(tool) for tool in self._tools.values()]
        rewards = self._steps or self._drives or callable(getattr(self._made, "get_reward", None))
        return Description(tools, rewards, self._drives)

    def reset(
        self, messages: list[Message], row: Mapping[str, Any], seed: int, tool_format: ToolFormat
    ) -> Opening | Asked | Reply:
        """Begins the episode of a problem, with what the problem's own prompt is."""
        self._format = tool_format
        if self._drives:
            run = self._made.run
            named = _accepted(run, {"prompt": messages, **row, "seed": seed})
            self._episode = DrivenEpisode(run, replace(self._facts, tool_format=tool_format), named)
            return self._next()
        if callable(begin := getattr(self._made, "reset", None)):
            found = self._call(begin, **_accepted(begin, {"prompt": messages, **row, "seed": seed}))
        elif callable(begin := getattr(self._made, "init", None)):
            found = self._call(begin, messages)
        else:
            found = None
        return Opening(_prompt(messages, _first(found)))

    def step(self, text: str, special_text: str) -> Reply:
        """Answers what the policy wrote in its turn: a text without special tokens, and with them, which in some
        formats mark tool calls."""
        if self._steps:
            return _reply(self._call(self._made.step, text))
        parsed = parse(special_text, self._format)
        answers, failed = [], len(parsed.errors)
        for call in parsed.calls:
            try:
                answers.append(checked_call(self._tools, call, self._wait))
            except ToolError as error:
                failed += 1
                answers.append(str(error))
        said: list[Message] = [{"role": "tool", "content": text} for text in (*answers, *parsed.errors)]
        done = not said or getattr(self._made, "done", False) is True
        return Reply(said, 0.0, done, [call.name for call in parsed.calls], failed)

    def sampled(
        self, tokens: list[int], logprobs: list[float], finish: str, text: str, special_text: str
    ) -> Asked | Reply:
        """Gives an environment that drives its episodes the turn that it asked for."""
        return self._answered(Sampled(tokens, logprobs, finish, text, special_text))

    def refused(self, why: str) -> Asked | Reply:
        """Tells such an environment why it gets no turn."""
        return self._answered(PolicyError(why))

    def _answered(self, answer: Sampled | PolicyError) -> Asked | Reply:
        assert self._episode is not None
        self._episode.give(answer)
        return self._next()

    def _next(self) -> Asked | Reply:
        assert self._episode is not None
        return self._episode.asks() or Reply([], done=True)

    def finish(self) -> Outcome:
        """Ends the episode, whether the environment or a limit has ended it."""
        reward, figures = None, {}
        if self._episode is not None:
            found = self._episode.result
            reward, figures = found if isinstance(found, tuple) else (found, {})
        if reward is None and callable(rewarded := getattr(self._made, "get_reward", None)):
            reward = self._call(rewarded)
        elif reward is None and (self._steps or self._drives):
            reward = 0.0
        if callable(measured := getattr(self._made, "get_metrics", None)):
            figures = self._call(measured) or {}
        parts = {str(name): float(value) for name, value in figures.items()}
        return Outcome(None if reward is None else float(reward), parts)

    def close(self) -> None:
        try:
            if self._episode is not None:
                self._episode.close()
            if callable(closed := getattr(self._made, "close", None)):
                self._call(closed)
        finally:
            if self._loop is not None:
                self._loop.close()

    def _call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        found = function(*arguments, **named)
        return self._wait(found) if inspect.isawaitable(found) else found

    def _wait(self, found: Awaitable[Any]) -> Any:
        """The result of something asynchronous, in one event loop for all that the environment does."""
        self._loop = self._loop or asyncio.new_event_loop()
        return self._loop.run_until_complete(found)


def _drives(made: Any) -> bool:
    """Whether an object drives its episodes: its `run` takes a policy. In others that is the name of a tool."""
    run = getattr(made, "run", None)
    return callable(run) and "policy" in inspect.signature(run).parameters


def _tools_of(made: Any) -> dict[str, Callable[..., Any]]:
    """The tools of an object: what it names in `tools`, a mapping of names to functions, or its public methods."""
    named = getattr(made, "tools", None)
    if isinstance(named, Mapping):
        return dict(named)
    names = [name for name in dir(type(made)) if not name.startswith("_") and name not in RESERVED]
    return {name: getattr(made, name) for name in names if inspect.isroutine(getattr(type(made), name))}


def _accepted(function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """Those of the arguments that a function accepts by name."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return given
    names = {one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    return {name: value for name, value in given.items() if name in names}


def _first(found: Any) -> Any:
    """What `reset` returned, without the info beside it."""
    return found[0] if isinstance(found, tuple) and len(found) == 2 else found


def _prompt(messages: list[Message], found: Any) -> list[Message]:
    """The prompt of an episode: a list of messages from `reset` is all of it but the system message, and any other
    result becomes a part of the last user message."""
    if found is None:
        return messages
    if isinstance(found, list):
        said = _messages(found)
        system = [one for one in messages[:1] if one["role"] == "system"]
        return said if said and said[0]["role"] == "system" else [*system, *said]
    text = as_text(found)
    if messages and messages[-1]["role"] == "user":
        return [*messages[:-1], {"role": "user", "content": messages[-1]["content"] + text}]
    return [*messages, {"role": "user", "content": text}]


def _reply(found: Any) -> Reply:
    """What `step` returned, in any of the spellings."""
    if isinstance(found, Mapping) and "done" in found:  # SkyRL-gym
        observed, reward, done = found.get("observations", found.get("observation")), found.get("reward"), found["done"]
    elif isinstance(found, tuple) and len(found) == 5:  # Gymnasium
        observed, reward, done = found[0], found[1], bool(found[2]) or bool(found[3])
    elif isinstance(found, tuple) and len(found) in (3, 4):  # its older form, with or without info
        observed, reward, done = found[:3]
    elif hasattr(found, "done") and hasattr(found, "reward"):  # OpenEnv: a result, or an observation that is one
        observed, reward, done = getattr(found, "observation", found), found.reward, found.done
    else:
        raise TypeError(
            f"`step` returned {type(found).__name__}: return (observation, reward, done), Gymnasium's five values, or"
            " a dict or an object with `reward` and `done`"
        )
    said = _messages(observed) if isinstance(observed, list) else []
    if observed is not None and not isinstance(observed, list) and (text := as_text(observed)):
        said = [{"role": "user", "content": text}]
    return Reply(said, float(reward) if reward is not None else 0.0, bool(done))


def _messages(found: list[Any]) -> list[Message]:
    said: list[dict[str, Any]] = [
        one if isinstance(one, dict) else {name: getattr(one, name, None) for name in MESSAGE} for one in found
    ]
    if said and (why := find_message_problem(said)) is not None:
        raise TypeError(f"the messages of the environment {why}")
    return [{"role": one["role"], "content": one["content"]} for one in said]


def as_text(found: Any) -> str:
    """What an environment says as text: as it is, or as JSON; of an object its one field that is a text, or all."""
    if isinstance(found, str):
        return found
    if callable(dumped := getattr(found, "model_dump", None)):
        fields = {name: value for name, value in dumped().items() if name not in ("done", "reward", "metadata")}
        found = next(iter(fields.values())) if len(fields) == 1 else fields
        return found if isinstance(found, str) else json.dumps(found, default=str)
    try:
        return json.dumps(found, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(found)
