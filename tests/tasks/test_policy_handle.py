"""What an environment asks for when it chats with the policy: a conversation that is only added to continues."""

import json

import pytest

from ebbtide.tasks.policy_handle import Asked, Policy, PolicyError, PolicyFacts, Sampled

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ASK = {"role": "user", "content": "1+1?"}


def said(policy: Policy, text: str, messages: list, tools: list | None = None) -> tuple[dict, Asked]:
    """(the policy's message, what it was asked), for a policy that says this."""
    policy.answers.put(Sampled([1], [-0.5], "stop", text))
    message, _ = policy.chat(messages, tools)
    asked = policy.asks.get_nowait()
    assert isinstance(asked, Asked)
    return message, asked


def test_tool_calls_are_openais_and_their_results_continue() -> None:
    policy = Policy(PolicyFacts(tool_format="qwen"))
    message, asked = said(policy, CALL, [ASK], TOOLS)
    assert asked == Asked([], None, [ASK], False, TOOLS)
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 1})
    result = {"role": "tool", "content": "2", "tool_call_id": call["id"]}
    _, asked = said(policy, "2", [ASK, {**message, "refusal": None}, result], TOOLS)
    assert asked == Asked([], None, [{"role": "tool", "content": "2"}], True, TOOLS)


def test_without_tools_a_call_is_text() -> None:
    message, _ = said(Policy(PolicyFacts(tool_format="qwen")), CALL, [ASK])
    assert message == {"role": "assistant", "content": CALL}


@pytest.mark.parametrize("change", ["content", "tools", "tokens"])
def test_what_was_changed_begins_anew(change) -> None:
    policy = Policy(PolicyFacts())
    message, _ = said(policy, "2", [ASK])
    if change == "tokens":
        policy.answers.put(Sampled([1], [-0.5], "stop"))
        policy.sample([3])
        policy.asks.get_nowait()
    first = {**ASK, "content": "other"} if change == "content" else ASK
    _, asked = said(policy, "3", [first, message, ASK], TOOLS if change == "tools" else None)
    assert (asked.continues, asked.messages) == (False, [first, {"role": "assistant", "content": "2"}, ASK])


def test_text_comes_in_parts_too() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1?"}]}
    assert said(Policy(PolicyFacts()), "2", [parts])[1].messages == [ASK]


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "user"}],
        [{"content": "x"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [ASK, {"role": "assistant", "content": "", "tool_calls": [{"id": "0", "function": {}}]}],
    ],
)
def test_what_is_no_conversation_is_refused(messages) -> None:
    with pytest.raises(PolicyError, match="messages"):
        Policy(PolicyFacts()).chat(messages)


def test_an_answer_of_its_own_after_a_turn_is_refused() -> None:
    policy = Policy(PolicyFacts())
    message, _ = said(policy, "2", [ASK])
    with pytest.raises(PolicyError, match="not the one of before"):
        policy.chat([ASK, message, {"role": "assistant", "content": "no, 3"}])
