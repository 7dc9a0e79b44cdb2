"""Tool calls as models write them: read exactly, and never an exception, whatever the text."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.tasks.tool_calls import MOST, Parsed, ToolCall, detect, parse

FORMATS = ("qwen", "hermes", "llama3", "mistral", "json")
ADD = ToolCall("add", {"a": 1, "b": [2, {"c": "x"}]})
AS_JSON = json.dumps({"name": "add", "arguments": ADD.arguments})
WITH_PARAMETERS = json.dumps({"name": "add", "parameters": ADD.arguments})
ARGUMENTS = json.dumps(ADD.arguments)
IN_OPENAI_STYLE = json.dumps({"type": "function", "function": {"name": "add", "arguments": ARGUMENTS}})


@pytest.mark.parametrize(
    ("format", "text", "calls", "content"),
    [
        ("qwen", f"I add.\n<tool_call>\n{AS_JSON}\n</tool_call>", [ADD], "I add."),
        (
            "hermes",
            f"<tool_call>{AS_JSON}</tool_call>\n<tool_call>{AS_JSON}</tool_call><|im_end|>",
            [ADD, ADD],
            "<|im_end|>",
        ),
        ("qwen", f"<tool_call>\n{AS_JSON}", [ADD], ""),
        ("qwen", f"<tool_call>{IN_OPENAI_STYLE}</tool_call> more", [ADD], "more"),
        (
            "qwen",
            "<tool_call>\n<function=run>\n<parameter=code>\nif a:\n    b()\n</parameter>\n"
            "<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>",
            [ToolCall("run", {"code": "if a:\n    b()", "n": "3"})],
            "",
        ),
        ("llama3", f"<|python_tag|>{WITH_PARAMETERS}<|eom_id|>", [ADD], "<|eom_id|>"),
        ("llama3", f"<|python_tag|>{WITH_PARAMETERS}; {WITH_PARAMETERS}", [ADD, ADD], ""),
        ("llama3", WITH_PARAMETERS, [ADD], ""),
        ("llama3", f"{WITH_PARAMETERS};{WITH_PARAMETERS}", [ADD, ADD], ""),
        ("llama3", '{"answer": 3}', [], '{"answer": 3}'),
        ("mistral", f"Sure.[TOOL_CALLS] [{AS_JSON}, {AS_JSON}]</s>", [ADD, ADD], "Sure.</s>"),
        ("mistral", f"[TOOL_CALLS]add[ARGS]{ARGUMENTS}[TOOL_CALLS]add[CALL_ID]a1[ARGS]{ARGUMENTS}", [ADD, ADD], ""),
        ("mistral", f"[TOOL_CALLS]add{ARGUMENTS}", [ADD], ""),
        ("json", f"I add.\n```json\n{AS_JSON}\n```\nDone.", [ADD], "I add.\n\nDone."),
        ("json", f"I add.\n{AS_JSON}", [ADD], "I add."),
        ("json", f"[{AS_JSON}, {WITH_PARAMETERS}]", [ADD, ADD], ""),
        ("json", 'The set {1, 2}\nand\n```json\n{"x": 1}\n```', [], 'The set {1, 2}\nand\n```json\n{"x": 1}\n```'),
        ("json", '{"name": "now"}', [ToolCall("now", {})], ""),
    ],
)
def test_calls_are_found_with_the_text_around_them(format, text, calls, content) -> None:
    assert parse(text, format) == Parsed(content, calls, [])


def test_a_call_may_contain_what_ends_a_call() -> None:
    for format, around in {"qwen": "<tool_call>{}</tool_call>", "mistral": "[TOOL_CALLS][{}]", "json": "{}"}.items():
        code = 'x = "</tool_call> [TOOL_CALLS] ```"\n{'
        text = around.replace("{}", json.dumps({"name": "run", "arguments": {"code": code}}))
        assert parse(text, format) == Parsed("", [ToolCall("run", {"code": code})], [])


def test_a_line_break_inside_of_a_string_is_accepted() -> None:
    text = '<tool_call>{"name": "run", "arguments": {"code": "a\nb"}}</tool_call>'
    assert parse(text, "qwen").calls == [ToolCall("run", {"code": "a\nb"})]


@pytest.mark.parametrize("format", FORMATS)
def test_calls_in_the_thinking_are_not_made(format) -> None:
    marked = f"<tool_call>{AS_JSON}</tool_call>\n[TOOL_CALLS][{AS_JSON}]\n<|python_tag|>{AS_JSON}\n{AS_JSON}\n"
    for text in (f"<think>{marked}</think>", f"{marked}</think>", f"<think>{marked}"):
        assert parse(text, format) == Parsed(text.strip(), [], [])
    assert parse(f"{marked}</think>{marked}", format).calls == [ADD]


@pytest.mark.parametrize(
    ("format", "text", "why"),
    [
        ("qwen", '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>', "wrong at character 38"),
        ("qwen", "<tool_call></tool_call>", "wrong at character 1"),
        ("qwen", "<tool_call>[1]</tool_call>", "it is not an object"),
        ("qwen", '<tool_call>{"arguments": {}}</tool_call>', "it does not name a tool"),
        ("qwen", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "its arguments are not an object"),
        ("qwen", '<tool_call>{"name": "add", "arguments": "{1"}</tool_call>', "wrong at character 2"),
        ("qwen", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "not finite"),
        ("qwen", '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>', "not finite"),
        ("qwen", '<tool_call>{"name": "a", "arguments": {"a": ' + "1" * 9999 + "}}</tool_call>", "too many digits"),
        ("qwen", '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>', "half of a character"),
        ("qwen", '<tool_call>{"name": "a", "arguments": {"a": ' + "[" * 99_999, "nested too deeply"),
        ("qwen", '<tool_call>{"name": "a", "arguments": {"a": ' + "[" * 200 + "]" * 200 + "}}", "nested too deeply"),
        ("qwen", "<tool_call><function=run><parameter=code>1</function></tool_call>", "`code` has no end"),
        ("qwen", "<tool_call><function=run><parameter=code>1</parameter></tool_call>", "no `</function>`"),
        ("qwen", "<tool_call><function=></function></tool_call>", "it does not name a tool"),
        ("llama3", "<|python_tag|>print(1)", "wrong at character 1"),
        ("llama3", '{"name": "add", "parameters": {', "wrong at character 32"),
        ("mistral", '[TOOL_CALLS][{"name": "add"', "wrong at character 16"),
        ("mistral", "[TOOL_CALLS]add[ARGS]{1}", "wrong at character 2"),
        ("json", '```json\n{"name": "add", }\n```', "wrong at character 17"),
    ],
)
def test_a_malformed_call_is_one_sentence(format, text, why) -> None:
    found = parse(text, format)
    assert found.calls == []
    (error,) = found.errors
    assert error.startswith("The tool call could not be read: ")
    assert why in error
    assert error.endswith(".")
    assert len(error) < 200
    assert "\n" not in error


def test_what_follows_a_malformed_call_is_read() -> None:
    text = f"<tool_call>{{</tool_call> and <tool_call><tool_call>{AS_JSON}</tool_call> so"
    found = parse(text, "qwen")
    assert (found.calls, len(found.errors), found.content) == ([ADD], 2, "and  so")


PARTS = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<function=f>",
            "</function>",
            "<parameter=a>",
            "</parameter>",
            "[TOOL_CALLS]",
        ),
        *("[ARGS]", "[CALL_ID]", "<|python_tag|>", "```json\n", "```", "<think>", "</think>", "\n", ";", ",", "{", "}"),
        *("[", "]", '"', '{"name": ', '"name": "f"', '"arguments": ', '"parameters": {}', "\\ud800", "1e999", "NaN"),
        *("name", AS_JSON, "\0", "\u2028", "9" * 5000),
    ]
)


@given(st.lists(PARTS | st.text(max_size=5), max_size=30).map("".join), st.sampled_from(FORMATS))
def test_no_text_raises(text, format) -> None:
    found = parse(text, format)
    for call in found.calls:
        assert isinstance(call.name, str)
        assert call.name
        assert isinstance(call.arguments, dict)
        json.dumps(call.arguments, allow_nan=False, ensure_ascii=False).encode()
    assert all(error.startswith("The tool call could not be read: ") for error in found.errors)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.text("abc_", min_size=1), st.dictionaries(st.text(), VALUES, max_size=3), st.booleans(), st.sampled_from(FORMATS)
)
def test_every_call_is_read_as_it_was_meant(name, arguments, is_ascii, format) -> None:
    key = "parameters" if format == "llama3" else "arguments"
    text = json.dumps({"name": name, key: arguments}, ensure_ascii=is_ascii)
    marked = {"mistral": f"[TOOL_CALLS][{text}]", "llama3": f"<|python_tag|>{text}", "json": text}
    # What looks like the end of thinking comes before all else.
    if "</think>" not in text:
        assert parse(marked.get(format, f"<tool_call>\n{text}\n</tool_call>"), format) == Parsed(
            "", [ToolCall(name, arguments)], []
        )


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "part", ["<tool_call>", "<tool_call>{", "[TOOL_CALLS]", "<|python_tag|>", '{"name":', '\n{"a":', "[\n", "```{", " "]
)
def test_a_flood_of_calls_ends_at_the_limit(part, format) -> None:
    """At the limit and not after a minute, which 100,000 errors with their places would take."""
    assert len(parse(part * 100_000, format).errors) <= MOST + 1


def test_a_message_has_a_limited_number_of_calls() -> None:
    assert len(parse(f"<tool_call>{AS_JSON}</tool_call>" * MOST, "qwen").calls) == MOST
    found = parse(f"[TOOL_CALLS][{', '.join([AS_JSON] * (MOST + 9))}]", "mistral")
    assert (len(found.calls), len(found.errors)) == (MOST, 1)
    assert found.errors[0].startswith("There are more than 128 tool calls")


def test_the_chat_template_says_which_format() -> None:
    assert detect("{{ '<|im_start|>' }} <tool_call>\n{\"name\": ...}") == "qwen"
    assert detect("{{ '<|start_header_id|>' }} <|python_tag|>") == "llama3"
    assert detect("{{ '<|start_header_id|>' }}") == "llama3"
    assert detect("[AVAILABLE_TOOLS] [TOOL_CALLS]") == "mistral"
    assert detect("{{ messages[0].content }}") == "json"


def test_errors_show_little_of_what_the_model_wrote() -> None:
    (error,) = parse(f"<tool_call><function=f><parameter={'x' * 9999}>", "qwen").errors
    assert len(error) < 200
