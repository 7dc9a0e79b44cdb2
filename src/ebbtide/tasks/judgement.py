"""What a judge is asked about a completion, and the score in its answer. Both texts are data: what is put into the
question is never expanded again, and an answer is only searched."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import Any

from ebbtide.config.rewards import JudgeConfig
from ebbtide.errors import UserError
from ebbtide.system.printable import printable
from ebbtide.tasks.files import Row
from ebbtide.tasks.score_message import MAX_REWARD
from ebbtide.tasks.task import Problem, Problems

FIELD = re.compile(r"\{\{([A-Za-z_][\w.]*)\}\}|\{([A-Za-z_][\w.]*)\}")
MOST_FAILED = 1000  # Braces in an answer that begin no JSON: each may take as long as the rest of the answer.
SHOWN = 200  # Characters of an answer in an error message.


class UnreadableAnswerError(Exception):
    """A judge's answer has no score."""


def read_api_key(config: JudgeConfig, key: str) -> str | None:
    """The API key, from the environment. `key`: where the judge is configured, for error messages."""
    if config.api_key_env is None:
        return None
    secret = os.environ.get(config.api_key_env, "").strip()
    if not secret or not secret.isascii() or not secret.isprintable():
        lacks = "has characters that no API key has" if secret else "is not set"
        raise UserError(
            f"`{key}.api_key_env`: the environment variable {config.api_key_env} {lacks}: set it to the key"
        )
    return secret


def check_prompts(judge: JudgeConfig, problems: Problems, key: str) -> None:
    """Raises if the question names a field that a problem does not have. `key`: where the judge is configured."""
    for problem in (*problems.train, *problems.held_out):
        try:
            ask_about(judge, problem, "")
        except KeyError as error:
            known = ["prompt", "completion", *(["answer"] if problem.answer is not None else []), *problem.metadata]
            raise UserError(
                f"`{key}.prompt` has `{{{error.args[0]}}}`, which the problem that begins {problem.question[:40]!r}"
                f" does not have; it has: {', '.join(map(str, known))}. Write `{{{{{error.args[0]}}}}}` for a text in"
                " braces"
            ) from None


def ask_about(judge: JudgeConfig, problem: Problem, completion: str) -> list[dict[str, str]]:
    """The messages of a request about a completion."""

    def replace(found: re.Match[str]) -> str:
        literal, name = found.groups()
        return f"{{{literal}}}" if literal is not None else _field(problem, completion, name)

    asked = {"role": "user", "content": FIELD.sub(replace, judge.prompt)}
    return [asked] if judge.system is None else [{"role": "system", "content": judge.system}, asked]


def _field(problem: Problem, completion: str, name: str) -> str:
    if name == "completion":
        return completion
    if name == "prompt":
        return prompt_text(problem)
    if name == "answer" and problem.answer is not None:
        return _text(problem.answer)
    return _text(Row(problem.metadata)[name])


def prompt_text(problem: Problem) -> str:
    """The prompt as a text: a single message as it is, and several with their roles. The system message is for the
    policy, and no part of it."""
    asked = [message for message in problem.messages if message["role"] != "system"]
    if len(asked) == 1:
        return asked[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in asked)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def read_score(judge: JudgeConfig, answer: str) -> float:
    """The score in a judge's answer; raises `UnreadableAnswerError` if there is none."""
    found = _verdict(judge, answer)
    if judge.values is not None:
        worth = {name.strip().casefold(): value for name, value in judge.values.items()}
        if (value := worth.get(_text(found).strip().casefold())) is None:
            raise UnreadableAnswerError(
                f"the judge's verdict is {_shown(found)}, which is none of {', '.join(judge.values)}"
            )
        return value
    try:
        if isinstance(found, bool) or not isinstance(found, str | int | float):
            raise ValueError
        score = float(found)
    except (ValueError, OverflowError):
        raise UnreadableAnswerError(f"the judge's score is {_shown(found)}, which is no number") from None
    low, high = judge.range or (-MAX_REWARD, MAX_REWARD)
    if not low <= score <= high:
        raise UnreadableAnswerError(f"the judge's score is {score:g}, which is not from {low:g} to {high:g}")
    return score if judge.range is None else (score - low) / (high - low)


def _verdict(judge: JudgeConfig, answer: str) -> Any:
    """What the answer has where the score should be."""
    if judge.regex is not None:
        matches = re.findall(judge.regex, answer, re.DOTALL)
        if not matches:
            raise UnreadableAnswerError(f"the judge's answer does not match `regex`: {_shown(answer)}")
        return matches[-1]
    if judge.json_field is None:
        return answer.strip()
    found = [row[judge.json_field] for row in _objects(answer) if judge.json_field in row]
    if not found:
        raise UnreadableAnswerError(f"the judge's answer has no JSON with `{judge.json_field}`: {_shown(answer)}")
    return found[-1]


def _objects(text: str) -> Iterator[Row]:
    """The JSON objects in a text, whatever is around them."""
    decoder, place, failed = json.JSONDecoder(), text.find("{"), 0
    while place >= 0 and failed < MOST_FAILED:
        try:
            found, after = decoder.raw_decode(text, place)
            yield Row(found)
        except (ValueError, RecursionError):
            after, failed = place + 1, failed + 1
        place = text.find("{", after)


def _shown(found: Any) -> str:
    return repr(printable(str(found), SHOWN))
