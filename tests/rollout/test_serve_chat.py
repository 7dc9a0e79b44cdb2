"""Chats of models that reason, over HTTP: arguments of the template, and reasoning beside the answer."""

import json

import pytest
from test_serve import LONGEST, expected, loaded, serving  # noqa: F401 (`loaded` is a fixture)

from ebbtide.rollout.engine import SamplingParams
from ebbtide.rollout.reasoning import ReasoningParser
from ebbtide.rollout.serve.error import ApiError
from ebbtide.rollout.serve.schema import ChatBody, parse_body

TEMPLATE = (
    "{% for m in messages %}{{ m.reasoning_content | default('') }}{{ m.content }}{% endfor %}"
    "{{ '!' if enable_thinking is defined and not enable_thinking else '?' }}"
)
MESSAGES = [{"role": "user", "content": "u"}]


@pytest.fixture
def templated(loaded, monkeypatch):  # noqa: F811
    monkeypatch.setattr(loaded.tokenizer, "chat_template", TEMPLATE)
    return loaded


def test_a_request_has_its_own_arguments_of_the_template(templated) -> None:
    def prompt(server, **body) -> str:
        answer = server.post("chat/completions", messages=MESSAGES, max_tokens=1, return_token_ids=True, **body)
        return templated.tokenizer.decode(answer.json()["prompt_token_ids"])

    off = {"chat_template_kwargs": {"enable_thinking": False}}
    with serving(templated) as server:
        assert prompt(server) == "u?"
        assert prompt(server, **off) == "u!"
        assert prompt(server) == "u?"  # and no other has them
        refused = server.post("chat/completions", messages=MESSAGES, chat_template_kwargs={"tools": []})
    assert refused.status_code == 400
    assert "`tools` is set by Ebbtide itself" in refused.json()["error"]["message"]
    with serving(templated, chats={"arguments": {"enable_thinking": False}}) as server:
        assert prompt(server) == "u!"
        assert prompt(server, chat_template_kwargs={"enable_thinking": True}) == "u?"


def test_arguments_are_a_mapping() -> None:
    with pytest.raises(ApiError, match="`chat_template_kwargs` should be"):
        parse_body(ChatBody, json.dumps({"messages": MESSAGES, "chat_template_kwargs": "a"}).encode(), ["tiny"])


def test_reasoning_of_history_is_the_templates_to_render(templated) -> None:
    said = {"role": "assistant", "content": "b", "reasoning_content": "a"}
    with serving(templated) as server:
        answer = server.post("chat/completions", messages=[*MESSAGES, said], max_tokens=1, return_token_ids=True)
    assert templated.tokenizer.decode(answer.json()["prompt_token_ids"]) == "uab?"


def test_reasoning_is_beside_the_answer(templated) -> None:
    """Whole and streamed, for samples that end their reasoning, and for those that do not. The prompt opens it."""
    sampling, seeds = SamplingParams(30, 1.0), range(12)
    found = expected(templated, "u?", sampling, seeds)
    texts = [one.text for one in found]
    end = max("abcdefghijklmnopqrstuvwxyzABCDEFGHIJ", key=lambda letter: min(sum(letter in text for text in texts), 6))
    assert 0 < sum(end in text for text in texts) < len(texts)
    how = {"messages": MESSAGES, "n": len(seeds), "seed": 0, "max_tokens": 30, "temperature": 1.0}
    with serving(templated, chats={"reasoning": ["?", end]}) as server:
        whole = server.post("chat/completions", **how).json()["choices"]
        streamed = server.post("chat/completions", **how, stream=True).text
        plain = server.post("completions", prompt="u?", max_tokens=30, seed=0, temperature=1.0).json()
    assert plain["choices"][0]["text"] == texts[0]  # a completion is as it is
    deltas = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    for index, text in enumerate(texts):
        reasoning, _, answer = text.partition(end)
        message = whole[index]["message"]
        assert (message.get("reasoning_content", ""), message["content"]) == (reasoning, answer)
        parts = [choice["delta"] for one in deltas for choice in one["choices"] if choice["index"] == index]
        for key, expected_text in (("reasoning_content", reasoning), ("content", answer)):
            assert "".join(part.get(key, "") for part in parts) == expected_text
        assert parts[0]["role"] == "assistant"
    assert LONGEST > 30


def test_marks_that_are_special_tokens_are_seen(loaded) -> None:  # noqa: F811
    """In the text of a completion these are not."""
    from test_reasoning import completion_of, tokenizer_of

    from ebbtide.rollout.serve.detokenize import Detokenizer

    tokenizer = tokenizer_of()
    parser = ReasoningParser("harmony", tokenizer, "reasoning_parser")
    text = "<|channel|>analysis<|message|>so é<|end|><|start|>assistant<|channel|>final<|message|>42<|return|>"
    tokens = completion_of(text, tokenizer).tokens
    shown, splitter = Detokenizer(tokenizer, [], parser.special), parser.splitter("")
    parts = [
        splitter.add(shown.add([token], last=place == len(tokens) - 1), last=place == len(tokens) - 1)
        for place, token in enumerate(tokens)
    ]
    assert tuple("".join(part) for part in zip(*parts, strict=True)) == ("so é", "42")
