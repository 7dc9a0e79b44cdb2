"""The policy as an environment has it that drives its episodes: it is asked for turns, by token ids or by messages of a
chat."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from dataclasses import dataclass, field
from typing import Any

from ebbtide.config.environment import ToolFormat
from ebbtide.tasks.task import Message
from ebbtide.tasks.tool_calls import parse

MODEL = "policy"
"""The name of the model, where one is asked for."""


@dataclass(frozen=True)
class PolicyFacts:
    """What an environment that drives its episodes may know of the policy."""

    tokenizer: str = ""
    """A folder with the tokenizer, and its chat template."""
    max_model_len: int = 0
    """The most tokens of a sequence."""
    end_tokens: list[int] = field(default_factory=list)
    """Tokens that end a turn."""
    tool_format: ToolFormat = "json"
    """How the policy writes tool calls."""


NOTHING_KNOWN = PolicyFacts()


@dataclass(frozen=True)
class Asked:
    """A turn of the policy that an environment asks for."""

    tokens: list[int]
    """All that the policy is to have in its context; empty if there are messages."""
    max_tokens: int | None = None
    messages: list[Message] = field(default_factory=list)
    """A conversation, or, if it `continues`, what follows the policy's last turn in it."""
    continues: bool = False
    tools: list[dict[str, Any]] = field(default_factory=list)
    """Schemas of tools, for the chat template."""


@dataclass(frozen=True)
class Sampled:
    """A turn of the policy."""

    tokens: list[int]
    logprobs: list[float]
    finish: str
    """`stop`, or `length` if a limit has ended it."""
    text: str = ""
    special_text: str = ""
    """The text with the special tokens that mark tool calls."""


class PolicyError(Exception):
    """The policy cannot be asked for this, or not any more; the text says why."""


class Policy:
    """The policy, as an environment has it."""

    def __init__(self, facts: PolicyFacts) -> None:
        self.facts, self.model = facts, MODEL
        self.asks: queue.Queue[Asked | BaseException | None] = queue.Queue()
        """What the environment asks; what it raised, or None, when its episode is over."""
        self.answers: queue.Queue[Sampled | PolicyError] = queue.Queue()
        self._one_at_a_time = threading.Lock()
        self._known: tuple[list[dict[str, Any]], list[dict[str, Any]]] | None = None  # the last chat, and its tools
        self._calls = 0

    def sample(self, token_ids: list[int], max_tokens: int | None = None) -> Sampled:
        """Samples a turn after these tokens, with the run's sampling parameters."""
        with self._one_at_a_time:
            self._known = None
            return self._ask(Asked([int(token) for token in token_ids], max_tokens))

    async def generate(self, token_ids: list[int], max_tokens: int | None = None) -> Sampled:
        """The same as `sample`, for asynchronous environments."""
        return await asyncio.to_thread(self.sample, token_ids, max_tokens)

    def chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, max_tokens: int | None = None
    ) -> tuple[dict[str, Any], Sampled]:
        """(the policy's message in a conversation, its turn). Messages are OpenAI's. As long as a conversation is only
        added to, its tokens stay as they were sampled; any other conversation is encoded anew."""
        tools = tools or []
        with self._one_at_a_time:
            known = self._known
            continues = known is not None and tools == known[1] and _same(messages[: len(known[0])], known[0])
            new = messages[len(known[0]) :] if continues and known is not None else messages
            texts = [_text_message(message, is_new=continues) for message in new]
            if not texts:
                raise PolicyError("`messages` must end with something that the policy has not answered")
            self._known = None  # Unless there is an answer, the whole conversation has to be sent again.
            sampled = self._ask(Asked([], max_tokens, texts, continues, tools))
            said = self._message(sampled, has_tools=bool(tools))
            self._known = [*messages, said], tools
        return said, sampled

    def _message(self, sampled: Sampled, *, has_tools: bool) -> dict[str, Any]:
        """A turn as OpenAI's message, with its tool calls if there are tools."""
        self._calls += 1
        parsed = parse(sampled.special_text or sampled.text, self.facts.tool_format) if has_tools else None
        if parsed is None or not parsed.calls:
            return {"role": "assistant", "content": sampled.text}
        calls = [
            {
                "id": f"call-{self._calls}-{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for number, call in enumerate(parsed.calls)
        ]
        return {"role": "assistant", "content": parsed.content, "tool_calls": calls}

    def _ask(self, asked: Asked) -> Sampled:
        self.asks.put(asked)
        answer = self.answers.get()
        if isinstance(answer, PolicyError):
            raise answer
        return answer


def _same(messages: list[dict[str, Any]], known: list[dict[str, Any]]) -> bool:
    """Whether a client has sent the messages of before: it may have left out or added what is empty."""

    def parts(message: dict[str, Any]) -> tuple[Any, ...]:
        calls = [(call["id"], call["function"]) for call in message.get("tool_calls") or []]
        return message.get("role"), message.get("content") or "", calls

    return [parts(one) for one in messages] == [parts(one) for one in known]


def _text_message(message: dict[str, Any], *, is_new: bool) -> Message:
    """A message of OpenAI's as a role and a text."""
    role, content = message.get("role"), message.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if message.get("tool_calls") or (is_new and role == "assistant"):
        raise PolicyError(
            "the conversation is not the one of before, and has tool calls or an answer of its own: send the messages"
            " that were sent and answered before, and add to them"
        )
    if not isinstance(role, str) or not isinstance(content, str):
        raise PolicyError("each of `messages` must have a `role` and a `content` of text")
    return {"role": role, "content": content}
