"""Python functions as tools: the JSON schema that a chat template shows to the model, and calls with checked arguments.
Imports no torch, which `transformers.utils.get_json_schema` does: environments have processes of their own."""

from __future__ import annotations

import asyncio
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from ebbtide.errors import UserError
from ebbtide.system.json_text import json_text
from ebbtide.system.printable import cut_middle, printable
from ebbtide.tasks.tool_calls import SHOWN, ToolCall

LONGEST_ERROR = 2000  # characters of an exception's text
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
"""What models write for these in XML, and their names in JSON."""

_SECTION = re.compile(r"^(Args|Arguments|Returns|Raises|Yields|Examples?|Notes?):[ \t]*$", re.MULTILINE)
_ARGUMENT = re.compile(r"(\w+)[ \t]*(?:\([^)]*\))?:[ \t]*(.*)")


class ToolError(Exception):
    """A call that failed; the text is an observation for the model."""


def schema(function: Callable[..., Any]) -> dict[str, Any]:
    """The JSON schema of a tool, from the types of a function and its docstring in Google's style; or what it has as
    `schema`, if it knows its own."""
    if isinstance(known := getattr(function, "schema", None), dict):
        return known
    description, arguments = _read_docstring(function)
    properties = {}
    for name, adapter in _adapters(function).items():
        # The names of the arguments are the schema's own: pydantic repeats them as titles.
        properties[name] = {key: value for key, value in adapter.json_schema().items() if key != "title"}
        if name in arguments:
            properties[name]["description"] = arguments[name]
    parameters = {"type": "object", "properties": properties, "required": _required(function)}
    named = {"name": function.__name__, "description": description, "parameters": parameters}
    return {"type": "function", "function": named}


def call(functions: Mapping[str, Callable[..., Any]], requested: ToolCall) -> str:
    """Calls a tool and returns its result as text. Where that fails, returns why, for the model to read."""
    try:
        return checked_call(functions, requested)
    except ToolError as error:
        return str(error)


def checked_call(
    functions: Mapping[str, Callable[..., Any]], requested: ToolCall, wait: Callable[[Any], Any] = asyncio.run
) -> str:
    """Calls a tool and returns its result as text: a text as it is, anything else as JSON. Raises ToolError if there is
    no such tool, if the arguments do not fit, or if the tool raises. `wait`: gets the result of a coroutine."""
    if (function := functions.get(requested.name)) is None:
        raise ToolError(
            f"There is no tool `{printable(requested.name, SHOWN)}`: the tools are {_listed(functions) or 'none'}."
        )
    arguments = dict(requested.arguments)
    if not hasattr(function, "schema"):  # one that knows its own checks them itself
        arguments = _check_arguments(requested.name, function, arguments)
    try:
        result = function(**arguments)
        if inspect.iscoroutine(result):
            result = wait(result)
        text = result if isinstance(result, str) else json_text(result)
    except (Exception, SystemExit) as error:  # foreign code: what it raises is an observation
        raise ToolError(f"The tool `{requested.name}` failed: {_describe(error)}") from error
    return text.encode(errors="replace").decode()


def _check_arguments(tool: str, function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    adapters = _adapters(function)
    if unknown := [name for name in given if name not in adapters]:
        raise ToolError(
            f"The tool `{tool}` has no argument `{printable(unknown[0], SHOWN)}`: it has {_listed(adapters) or 'none'}."
        )
    if missing := [name for name in _required(function) if name not in given]:
        raise ToolError(f"The tool `{tool}` needs the argument `{missing[0]}`.")
    return {name: _check_argument(tool, name, adapters[name], value) for name, value in given.items()}


def _check_argument(tool: str, name: str, adapter: TypeAdapter[Any], value: Any) -> Any:
    try:
        return adapter.validate_json(json_text(value), strict=True)
    except ValidationError as error:
        problem = error.errors()[0]
    if isinstance(value, str):  # an argument of a call in XML, or a number that the model put in quotes
        try:
            return adapter.validate_json(PYTHON_WORDS.get(value.strip(), value), strict=True)
        except ValidationError:
            pass
    where = "".join(f"[{part!r}]" for part in problem["loc"])
    wanted = problem["msg"].removeprefix("Input ")
    raise ToolError(f"The argument `{name}{where}` of the tool `{tool}` {wanted}.")


def _adapters(function: Callable[..., Any]) -> dict[str, TypeAdapter[Any]]:
    """What checks each argument of a tool."""
    tool = function.__name__
    try:
        hints = typing.get_type_hints(function)
    except NameError as error:
        raise UserError(f"the types of the tool `{tool}` cannot be found: {error}") from None
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UserError(f"the tool `{tool}` takes `{parameter}`: give each of its arguments a name")
        if name not in hints:
            raise UserError(f"the argument `{name}` of the tool `{tool}` has no type: write `{name}: int`, for example")
        try:
            found[name] = TypeAdapter(hints[name])
            found[name].json_schema()
        except PydanticUserError:
            raise UserError(
                f"the argument `{name}` of the tool `{tool}` has a type that JSON lacks: use int, float, str, bool,"
                " list, dict, Literal, or a union of them"
            ) from None
    return found


def _required(function: Callable[..., Any]) -> list[str]:
    return [one.name for one in inspect.signature(function).parameters.values() if one.default is one.empty]


def _read_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """What a docstring says about a function, and about each of its arguments."""
    text = inspect.getdoc(function) or ""
    description, *sections = _SECTION.split(text)
    if not description.strip():
        raise UserError(f"the tool `{function.__name__}` has no description: write a docstring, which the model reads")
    arguments: dict[str, list[str]] = {}
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        lines = inspect.cleandoc(body).splitlines() if title.startswith("Arg") else []
        for line in lines:
            if (found := _ARGUMENT.fullmatch(line)) is not None:  # A line that goes on begins with a space.
                arguments[found[1]] = [found[2]]
            elif arguments and line.strip():
                arguments[[*arguments][-1]].append(line.strip())
    return description.strip(), {name: " ".join(lines).strip() for name, lines in arguments.items()}


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {cut_middle(str(error), LONGEST_ERROR)}".encode(errors="replace").decode()
    except Exception:  # noqa: BLE001 (foreign code: its text is not to be had)
        return type(error).__name__
