"""Functions as tools: the schema that a model reads, and calls whose failures the model reads as well."""

import json
import subprocess
import sys
from typing import Literal

import pytest
from transformers.utils import get_json_schema

from ebbtide.errors import UserError
from ebbtide.tasks.tool_calls import ToolCall
from ebbtide.tasks.tool_functions import ToolError, call, checked_call, schema


def search(query: str, most: int = 3, kinds: list[str] | None = None, exact: bool = False, weight: float = 1.0) -> list:
    """Searches the library.

    It knows every book.

    Args:
        query: What to look for,
            in any language.
        most: How many to return.
        kinds: Only these.
        exact: Whether every word counts.
        weight: Of the title.

    Returns:
        The titles.
    """
    return [query, most, kinds, exact, weight]


def plain(a: int, b: Literal["x", "y"], c: list[int], d: dict[str, float]) -> None:
    """Does nothing.

    Args:
        a: A.
        b: B.
        c: C.
        d: D.
    """


class Game:
    def guess(self, number: int) -> str:
        """Guesses.

        Args:
            number (int): The guess.
        """
        return f"{number} is too low"

    async def later(self) -> dict:
        """Answers later."""
        return {"é": 1}


TOOLS = {"search": search, "guess": Game().guess, "later": Game().later}


def test_the_schema_of_plain_types_is_that_of_transformers() -> None:
    theirs = get_json_schema(plain)
    del theirs["function"]["return"]
    assert schema(plain) == theirs


def test_a_schema_says_what_is_optional() -> None:
    found = schema(search)["function"]
    assert found["description"] == "Searches the library.\n\nIt knows every book."
    assert found["parameters"]["required"] == ["query"]
    properties = found["parameters"]["properties"]
    assert properties["query"] == {"type": "string", "description": "What to look for, in any language."}
    assert properties["kinds"]["anyOf"] == [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]


def test_a_method_is_a_tool_without_its_self() -> None:
    assert schema(Game().guess) == {
        "type": "function",
        "function": {
            "name": "guess",
            "description": "Guesses.",
            "parameters": {
                "type": "object",
                "properties": {"number": {"type": "integer", "description": "The guess."}},
                "required": ["number"],
            },
        },
    }


def untyped(a):
    """Has no types."""


def undescribed(a: int) -> None: ...


def unnamed(*a: int) -> None:
    """Takes any number."""


def unknown(a: "Missing") -> None:  # noqa: F821
    """Has a type that does not exist."""


def foreign(a: type(sys)) -> None:
    """Has a type of no JSON."""


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (untyped, "the argument `a` of the tool `untyped` has no type"),
        (undescribed, "the tool `undescribed` has no description"),
        (unnamed, "the tool `unnamed` takes `\\*a: int`"),
        (unknown, "the types of the tool `unknown` cannot be found: name 'Missing' is not defined"),
        (foreign, "the argument `a` of the tool `foreign` has a type that JSON lacks"),
    ],
)
def test_a_function_that_is_no_tool_is_refused_by_name(function, why) -> None:
    with pytest.raises(UserError, match=why):
        schema(function)


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("search", {"query": "q"}, '["q", 3, null, false, 1.0]'),
        ("search", {"query": "3", "weight": 2}, '["3", 3, null, false, 2.0]'),
        ("search", {"query": "q", "most": "4", "exact": "True", "kinds": '["a"]'}, '["q", 4, ["a"], true, 1.0]'),
        ("search", {"query": "q", "kinds": "None"}, '["q", 3, null, false, 1.0]'),
        ("guess", {"number": 3}, "3 is too low"),
        ("later", {}, '{"é": 1}'),
    ],
)
def test_a_call_gives_the_result_as_text(name, arguments, result) -> None:
    assert call(TOOLS, ToolCall(name, arguments)) == result


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("gues\ns", {}, r"There is no tool `gues\ns`: the tools are `search`, `guess`, `later`."),
        ("guess", {}, "The tool `guess` needs the argument `number`."),
        ("guess", {"number": 1, "x": 2}, "The tool `guess` has no argument `x`: it has `number`."),
        ("later", {"x": 2}, "The tool `later` has no argument `x`: it has none."),
        ("guess", {"number": "three"}, "The argument `number` of the tool `guess` should be a valid integer."),
        ("guess", {"number": 1.5}, "The argument `number` of the tool `guess` should be a valid integer."),
        ("guess", {"number": True}, "The argument `number` of the tool `guess` should be a valid integer."),
        ("search", {"query": 3}, "The argument `query` of the tool `search` should be a valid string."),
        (
            "search",
            {"query": "q", "kinds": [1]},
            "The argument `kinds[0]` of the tool `search` should be a valid string.",
        ),
    ],
)
def test_a_call_that_does_not_fit_is_an_observation(name, arguments, why) -> None:
    assert call(TOOLS, ToolCall(name, arguments)) == why
    with pytest.raises(ToolError):
        checked_call(TOOLS, ToolCall(name, arguments))


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
        (SystemExit(3), "SystemExit: 3"),
        (UnspeakableError(), "UnspeakableError"),
        (RecursionError(), "RecursionError: "),
    ],
)
def test_what_a_tool_raises_is_an_observation(error, text) -> None:
    def fail() -> None:
        """Fails."""
        raise error

    assert call({"fail": fail}, ToolCall("fail", {})) == f"The tool `fail` failed: {text}"


def test_a_result_can_always_be_encoded() -> None:
    def half() -> str:
        """Returns half of a character."""
        return "a\ud800"

    def strange() -> object:
        """Returns what JSON lacks."""
        return {1: object, "nan": float("nan")}

    tools = {"half": half, "strange": strange}
    assert call(tools, ToolCall("half", {})) == "a?"
    assert json.loads(call(tools, ToolCall("strange", {}))) == {"1": "<class 'object'>", "nan": None}


def test_tools_need_no_torch() -> None:
    code = (
        "import sys\nfrom ebbtide.tasks.tool_functions import schema\ndef tool(a: int):\n    'Does it.'\n"
        "schema(tool)\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
