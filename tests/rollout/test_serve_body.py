"""No field is ignored that would change the answer."""

import json

import pytest

from ebbtide.rollout.serve.error import ApiError
from ebbtide.rollout.serve.schema import HARMLESS, NO_EFFECT_VALUES, ChatBody, CompletionBody, parse_body

MESSAGE = {"role": "user", "content": "u"}
COMPLETION, CHAT = (CompletionBody, {"prompt": "a"}), (ChatBody, {"messages": [MESSAGE]})


def read(kind, **body):
    return parse_body(kind, json.dumps(body).encode(), ["tiny"])


@pytest.mark.parametrize(("kind", "least"), [COMPLETION, CHAT])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("guided_json", {}),
        ("guided_regex", "a*"),
        ("guided_choice", ["a"]),
        ("guided_grammar", "g"),
        ("structured_outputs", {}),
        ("add_special_tokens", False),
        ("reasoning_effort", "low"),
        ("documents", [{}]),
        ("length_penalty", 0.5),
        ("typical_p", 0.5),
        ("logits_processors", ["p"]),
        ("prompt_embeds", "e"),
        ("thinking_token_budget", 1),
        ("frequency_penalty", 0.5),
        ("of_tomorrow", 0),
        ("x" * 1000, 0),
    ],
)
def test_what_is_not_known_is_refused_by_name(kind, least, name, value) -> None:
    with pytest.raises(ApiError, match=f"^`{name[:64]}` is not supported: leave it out$") as refused:
        read(kind, **least, **{name: value})
    assert (refused.value.status, refused.value.param) == (400, name[:64])
    read(kind, **least, **{name: None})


def test_a_field_of_the_other_kind_is_not_known() -> None:
    for name, value in (("max_completion_tokens", 3), ("top_logprobs", 2), ("messages", [MESSAGE])):
        with pytest.raises(ApiError, match=f"`{name}` is not supported"):
            read(CompletionBody, prompt="a", **{name: value})
    with pytest.raises(ApiError, match="`prompt` is not supported"):
        read(ChatBody, messages=[MESSAGE], prompt="a")


@pytest.mark.parametrize(
    ("body", "words", "param"),
    [
        (
            {"messages": [MESSAGE, MESSAGE | {"tool_calls": [{}]}]},
            r"`messages\[1\].tool_calls` is not supported",
            "messages",
        ),
        ({"messages": [MESSAGE | {"name": "n"}]}, r"`messages\[0\].name`", "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "", "more": 1}]}]},
            r"content.more`",
            "messages",
        ),
        (
            {"messages": [MESSAGE], "stream_options": {"continuous_usage_stats": True}},
            "`stream_options.continuous",
            "stream_options",
        ),
    ],
)
def test_nor_are_those_within(body, words, param) -> None:
    with pytest.raises(ApiError, match=words) as refused:
        read(ChatBody, **body)
    assert refused.value.param == param


def test_what_changes_nothing_is_taken() -> None:
    harmless = dict.fromkeys(HARMLESS, "anything")
    as_it_is = {name: values[-1] for name, values in NO_EFFECT_VALUES.items() if name != "top_logprobs"}
    answered = MESSAGE | {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    read(CompletionBody, prompt="a", **harmless, **as_it_is, top_logprobs=0)
    read(
        ChatBody,
        messages=[answered],
        stream_options={"include_obfuscation": False},
        **harmless,
        **as_it_is,
        top_logprobs=0,
    )
