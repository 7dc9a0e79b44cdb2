"""The tokens between turns: what an environment says, as the chat template's own suffix of the conversation.

Sampled tokens are never decoded and encoded again. A template appends a message to a conversation by writing a suffix:
the end of the turn before, the message, and the generation prompt. The suffix alone is encoded, and follows the sampled
tokens. Some templates rewrite what came before, such as those that drop earlier thinking: then the conversation, as the
template now has it, is the prompt of a new sample.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import TemplateError

from ebbtide.rollout.encoder import Encoded, Encoder, Prepared
from ebbtide.rollout.engine import Completion
from ebbtide.tasks.task import Message

PROBES = ("0", "<think>\n0\n</think>\n\n1", '<tool_call>\n{"name": "0", "arguments": {}}\n</tool_call>')
"""What an assistant may write that templates are known to change once it is history."""


@dataclass
class Conversation:
    """A conversation so far."""

    messages: list[Message]
    text: str
    """As the policy has it in its context: rendered prompts and suffixes, with what was sampled between them."""


@dataclass(frozen=True)
class Continuation:
    """What the policy reads before its next turn."""

    tokens: list[int]
    """Appended to the sequence, or, if it `forks`, the prompt of a new one."""
    forks: bool = False


class ChatTurns:
    """Continues conversations with one tokenizer and its chat template."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._mark = f"[{secrets.randbelow(10**18)}]"  # digits and brackets: no template changes these in a text
        self._roles = {"tool": "tool"}
        if encoder.is_templated and not self._renders("tool"):
            self._roles["tool"] = "user"
        self._rewrites = {role: encoder.is_templated and self._is_rewritten(role) for role in ("user", "tool")}

    def with_tools(self, tools: Sequence[dict[str, Any]]) -> ChatTurns:
        """The same for a policy that has these tools."""
        return ChatTurns(self._encoder.with_tools(tools)) if tools else self

    @property
    def may_fork(self) -> bool:
        """Whether the template rewrites what an assistant may have written."""
        return any(self._rewrites.values())

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        return self._encoder.decode(tokens)

    def whole_text(self, turn: Completion) -> Completion:
        """A turn with all of its text: a stop text that ended it is for the environment to see."""
        return replace(turn, text=self._encoder.decode(turn.tokens))

    def special_text(self, turn: Completion) -> str:
        """The text of a turn with its special tokens, but for the end: in some formats they mark tool calls."""
        return self._encoder.decode(turn.tokens, special=True)

    def open(self, messages: Sequence[Message]) -> tuple[Conversation, Encoded]:
        """Begins a conversation: its prompt, with the generation prompt."""
        encoded = self._encoder.chat(messages)
        return Conversation(list(messages), encoded.text), encoded

    def answer(self, conversation: Conversation, turn: Completion, said: Sequence[Message]) -> Continuation:
        """Adds a turn of the policy and what the environment said to a conversation. It raises TemplateError if the
        template refuses that."""
        said = self._renamed(said)
        conversation.messages += [{"role": "assistant", "content": turn.text}, *said]
        suffix = self._suffix(said)
        conversation.text += turn.text + suffix.text
        if any(self._rewrites.get(one["role"], self._encoder.is_templated) for one in said):
            whole = self._encoder.chat(conversation.messages)
            if _squash(whole.text) != _squash(conversation.text):
                conversation.text = whole.text
                return Continuation(whole.tokens, forks=True)
        (tokens,) = self._encoder.tokenize([suffix])
        if tokens[:1] == turn.tokens[-1:] and self._encoder.is_control(
            tokens[0]
        ):  # the policy has ended its turn itself
            tokens = tokens[1:]
        return Continuation(tokens)

    def _renamed(self, said: Sequence[Message]) -> list[Message]:
        """What an environment said, in roles that the template has. Messages of tools that become a user's are one:
        templates without a role for tools tend to want users and assistants in turns."""
        found: list[Message] = []
        for one in said:
            role = self._roles.get(one["role"], one["role"])
            if role != one["role"] and found and found[-1]["role"] == role:
                found[-1] = {"role": role, "content": f"{found[-1]['content']}\n{one['content']}"}
            else:
                found.append({"role": role, "content": one["content"]})
        return found

    def _suffix(self, said: Sequence[Message]) -> Prepared:
        """What the template writes after an assistant's text, up to the policy's next turn."""
        if not self._encoder.is_templated:
            return self._encoder.prepare_text("".join(one["content"] for one in said), continues=True)
        before: list[Message] = [{"role": "user", "content": "0"}, {"role": "assistant", "content": self._mark}]
        prepared = self._encoder.prepare_chat([*before, *said])
        text, renamed = (
            None if one is None else one.rpartition(self._mark)[2] for one in (prepared.text, prepared.renamed)
        )
        assert text is not None
        return Prepared(text, renamed, special=False)

    def _renders(self, role: str) -> bool:
        """Whether the template writes messages of this role."""
        try:
            return "0.5" in self._suffix([{"role": role, "content": "0.5"}]).text
        except TemplateError:
            return False

    def _is_rewritten(self, role: str) -> bool:
        """Whether the template changes an assistant's text when a message of this role follows: once or twice."""
        role = self._roles.get(role, role)
        for probe in PROBES:
            messages: list[Message] = [{"role": "user", "content": "0"}]
            text = self._encoder.prepare_chat(messages).text
            for content in ("1", "2"):
                said: Message = {"role": role, "content": content}
                messages += [{"role": "assistant", "content": probe}, said]
                try:
                    text += probe + self._suffix([said]).text
                    whole = self._encoder.prepare_chat(messages).text
                except TemplateError:
                    return True
                if _squash(whole) != _squash(text):
                    return True
        return False


def _squash(text: str) -> str:
    """A text without white space, which templates trim and the policy may write."""
    return "".join(text.split())
