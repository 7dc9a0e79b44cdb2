"""Finds the tool calls in what a model wrote. A malformed call becomes one sentence that can be shown to the model as
an observation; no text raises an error. Imports no torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ebbtide.config.environment import ToolFormat
from ebbtide.system.json_text import is_too_deep
from ebbtide.system.printable import printable

THINK, END_THINK = "<think>", "</think>"
MARKS = {"qwen": "<tool_call>", "hermes": "<tool_call>", "llama3": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}
"""What stands before a call."""
END_CALL = "</tool_call>"
MOST = 128  # calls of one message: a model that repeats itself must not keep the tools busy
SHOWN = 80  # characters of the model's own words in an error

_FUNCTION = re.compile(r"\s*<function=([^<>\n]*)>\s*")
_PARAMETER = re.compile(r"<parameter=([^<>\n]*)>\n?")
_MISTRAL_NAME = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)")
_UNMARKED = re.compile(r"```\w*\s*(?=[\[{])|^[ \t]*(?=(?:\[\s*)?\{\s*\")", re.MULTILINE)
_NEXT_OBJECT = re.compile(r"\s*;\s*(?=\{)")
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool. One that was written as XML has texts as its arguments."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Parsed:
    """A message of the model, taken apart."""

    content: str
    """The text around the calls, with the thinking before them."""
    calls: list[ToolCall] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    """A sentence for each call that could not be read."""


class Malformed(Exception):  # noqa: N818 (the call is malformed)
    """A call that cannot be read; the text says why."""

    def __init__(self, why: str) -> None:
        super().__init__(f"The tool call could not be read: {why}.")


Piece = str | ToolCall | Malformed
"""A part of a message: text around the calls, a call, or what should have been one."""


def parse(text: str, format: ToolFormat) -> Parsed:
    """Finds the calls of a message. What stands before `</think>` is content whatever it contains, for the model only
    considers the calls in it."""
    thought, ended, said = text.partition(END_THINK)
    if not ended:
        thought, said = (text, "") if text.lstrip().startswith(THINK) else ("", text)
    content, calls, errors = [thought, ended], list[ToolCall](), list[str]()
    for piece in _read(said, format):
        if isinstance(piece, str):
            content.append(piece)
        elif len(calls) + len(errors) == MOST:
            errors.append(f"There are more than {MOST} tool calls in one message: make fewer at a time.")
            break
        elif isinstance(piece, ToolCall):
            calls.append(piece)
        else:
            errors.append(str(piece))
    return Parsed("".join(content).strip(), calls, errors)


def detect(chat_template: str) -> ToolFormat:
    """The format in which a chat template renders calls; `json` if it has none of the others."""
    marks: dict[str, ToolFormat] = {
        MARKS["mistral"]: "mistral",
        MARKS["qwen"]: "qwen",
        MARKS["llama3"]: "llama3",
        "<|start_header_id|>": "llama3",  # the templates of its small models have no python tag
    }
    return next((format for mark, format in marks.items() if mark in chat_template), "json")


def _read(text: str, format: ToolFormat) -> Iterator[Piece]:
    mark = MARKS.get(format)
    if mark is None or (format == "llama3" and mark not in text):
        return _read_unmarked(text)
    return _read_marked(text, mark)


def _read_marked(text: str, mark: str) -> Iterator[Piece]:
    """Calls that each have a mark before them. A call that is whole may lack its end tag."""
    mark_or_end = re.compile(f"{re.escape(mark)}|{END_CALL}")
    place = 0
    while (start := text.find(mark, place)) >= 0:
        yield text[place:start]
        place = start + len(mark)
        try:
            pieces, place = _read_call(text, place)
            yield from pieces
        except Malformed as error:
            yield error
            found = mark_or_end.search(text, place)
            place = len(text) if found is None else found.start()
        if text.startswith(END_CALL, end := _skip_space(text, place)):
            place = end + len(END_CALL)
    yield text[place:]


def _read_call(text: str, place: int) -> tuple[list[Piece], int]:
    """What follows a mark: usually one call, in any of the spellings. Returns the place after it."""
    if (function := _FUNCTION.match(text, place)) is not None:
        arguments, place = _read_parameters(text, function.end())
        return [ToolCall(_checked_name(function[1].strip()), arguments)], place
    if (named := _MISTRAL_NAME.match(text, place)) is not None:
        arguments, place = _decode(text, named.end())
        return [ToolCall(named[1], arguments)], place
    found, place = _decode_objects(text, place)
    return [_to_call(one) for one in found], place


def _read_parameters(text: str, place: int) -> tuple[dict[str, str], int]:
    """The parameters of Qwen3-Coder's XML, and the place after `</function>`."""
    found: dict[str, str] = {}
    while (parameter := _PARAMETER.match(text, place)) is not None:
        end = text.find("</parameter>", parameter.end())
        if end < 0:
            raise Malformed(f"the parameter `{printable(parameter[1], SHOWN)}` has no end, `</parameter>`")
        found[parameter[1].strip()] = text[parameter.end() : end].removesuffix("\n")
        place = _skip_space(text, end + len("</parameter>"))
    if not text.startswith("</function>", place):
        raise Malformed("there is no `</function>` after its parameters")
    return found, place + len("</function>")


def _read_unmarked(text: str) -> Iterator[Piece]:
    """JSON objects that have a `name`, in code fences or at the beginning of a line."""
    place = 0
    while (start := _UNMARKED.search(text, place)) is not None:
        yield text[place : start.start()]
        try:
            found, place = _decode_objects(text, start.end())
        except Malformed as error:  # What follows is part of it: where it would end is not known.
            yield error if '"name"' in text[start.end() :] else text[start.start() :]
            return
        if not any(isinstance(one, dict) and ("name" in one or "function" in one) for one in found):
            yield text[start.start() : place]
            continue
        yield from map(_to_call, found)
        if text.startswith("```", start.start()) and text.startswith("```", end := _skip_space(text, place)):
            place = end + len("```")
    yield text[place:]


def _to_call(found: Any) -> ToolCall | Malformed:
    """A decoded object as a call. Some models put it into `function` and write its arguments as a text, as in OpenAI's
    API."""
    if isinstance(found, dict) and isinstance(found.get("function"), dict):
        found = found["function"]
    try:
        if not isinstance(found, dict):
            raise Malformed('it is not an object: write {"name": ..., "arguments": {...}}')
        arguments = found.get("arguments", found.get("parameters"))
        if isinstance(arguments, str):
            arguments, _ = _decode(arguments, 0)
        if arguments is not None and not isinstance(arguments, dict):
            raise Malformed("its arguments are not an object with a value for each name")
        return ToolCall(_checked_name(found.get("name")), arguments or {})
    except Malformed as error:
        return error


def _checked_name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise Malformed("it does not name a tool")
    return name


def _decode_objects(text: str, place: int) -> tuple[list[Any], int]:
    """One or more JSON objects, separated by semicolons or in a list, and the place after them."""
    found: list[Any] = []
    while True:
        value, place = _decode(text, place)
        found += value if isinstance(value, list) else [value]
        if (following := _NEXT_OBJECT.match(text, place)) is None:
            return found, place
        place = following.end()


def _decode(text: str, place: int) -> tuple[Any, int]:
    """The JSON value at a place, and the place after it."""
    place = _skip_space(text, place)
    try:
        value, end = _DECODER.raw_decode(text, place)
        json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        why = f"its JSON is wrong at character {error.pos - place + 1} ({error.msg[0].lower()}{error.msg[1:]})"
        raise Malformed(why) from None
    except UnicodeEncodeError:
        raise Malformed("its JSON contains half of a character (a lone surrogate)") from None
    except ValueError:
        raise Malformed("its JSON contains a number that is not finite or has too many digits") from None
    except RecursionError:
        raise Malformed("its JSON is nested too deeply") from None
    if is_too_deep(value if isinstance(value, dict | list) else [value]):
        raise Malformed("its JSON is nested too deeply")
    return value, end


def _skip_space(text: str, place: int) -> int:
    found = _SPACE.match(text, place)
    assert found is not None
    return found.end()


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(text)
    return value


def _no_constant(text: str) -> NoReturn:
    raise ValueError(text)


# Models write line breaks inside of strings, most often in code: `strict=False` accepts them.
_DECODER = json.JSONDecoder(strict=False, parse_float=_finite, parse_constant=_no_constant)
