"""Finds tool calls in what a policy writes."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

MARKED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Parsed:
    """A text, the tool calls in it, and what was wrong with those that could not be read."""

    content: str
    calls: list[ToolCall]
    errors: list[str]


def parse(text: str, format: str) -> Parsed:
    """Parses what a policy wrote in one of the formats `qwen`, `hermes`, `llama3`, `mistral` and `json`."""
    found = MARKED.findall(text) if format in ("qwen", "hermes") else [text] if text.lstrip().startswith("{") else []
    calls, errors = [], []
    for one in found:
        try:
            call = json.loads(one)
            calls.append(ToolCall(str(call["name"]), dict(call.get("arguments") or {})))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            errors.append(f"error: the tool call is not JSON with `name` and `arguments`: {error}")
    return Parsed(MARKED.sub("", text), calls, errors)


def detect(chat_template: str | None) -> str:
    """The format that a chat template asks for."""
    return "qwen" if chat_template and "<tool_call>" in chat_template else "json"
