"""Encodes texts and chats as tokens. Control tokens come only from the chat template, and from the tokenizer's own rule
for how a text begins and ends: in data, their texts are plain text.

A text without them is encoded by the tokenizer itself. One that contains some is encoded by a copy of the tokenizer in
which the control tokens have secret names. Those that the template wrote are given these names; everything else is
plain text to the copy. So the result is what the tokenizer would give if the texts of control tokens meant nothing to
it, with the same merges across them and the same spaces around them.
"""

from __future__ import annotations

import copy
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple

from jinja2 import TemplateError
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerBase as Tokenizer

from ebbtide.config.model import ModelConfig
from ebbtide.errors import UserError
from ebbtide.tasks.task import Message

REASONING_MARKS = {"<think>", "</think>", "<seed:think>", "</seed:think>"}
"""Tokens of data that a template may write as well: at the end of a generation prompt, or around an empty reasoning."""


@dataclass(frozen=True)
class Encoded:
    """A text and its tokens."""

    text: str
    tokens: list[int]
    has_control_text: bool
    """Whether its data contain the text of a control token."""


class Prepared(NamedTuple):
    """A text that is ready for the tokenizer."""

    text: str
    """As it reads."""
    renamed: str | None
    """What the copy of the tokenizer encodes, if the data contain the text of a control token."""
    special: bool
    """Whether the tokenizer adds what it begins and ends a text with."""


class Encoder:
    """Encodes with one tokenizer and its chat template."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        templated: bool,
        day: str | None = None,
        tools: Sequence[dict[str, Any]] = (),
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """`templated`: chats are rendered by the chat template, if there is one; else their texts are joined.

        `day`: the date for templates that contain one, as Llama 3's do; None: the current date, at each chat. `tools`:
        the schemas of tools, for templates that describe them. `arguments`: more arguments of the template
        (`model.chat_template_kwargs`).
        """
        self._tools, self._arguments = list(tools) or None, dict(arguments or {})
        self._template = _dated(tokenizer.chat_template, day)
        self._tokenizer, self._templated = tokenizer, templated and bool(tokenizer.chat_template)
        added = list(tokenizer.added_tokens_decoder.values())
        turns = _turn_tokens(tokenizer, _any_of(token.content for token in added))
        control = [token for token in added if token.content and (token.special or token.content in turns)]
        secret = secrets.randbelow(10**18)  # digits and brackets: no template changes these in a text
        self._before, self._after = f"[{secret}(", f"){secret}]"
        self._secret_names = {token.content: f"[{secret}.{number}]" for number, token in enumerate(control)}
        self._backend: Backend | None = getattr(tokenizer, "backend_tokenizer", None)
        self._normalizer = None if self._backend is None else self._backend.normalizer
        if not any(token.normalized for token in control):  # the usual case: they are matched in the text as it is
            self._normalizer = None
        normalized = (
            [] if self._normalizer is None else [self._normalizer.normalize_str(token.content) for token in control]
        )
        names, before, after = _any_of(self._secret_names), re.escape(self._before), re.escape(self._after)
        self._control, self._normalized = re.compile(names), re.compile(_any_of([*self._secret_names, *normalized]))
        self._written = re.compile(
            f"{before}(?P<quoted>{names}){after}|{before}|{after}|(?P<added>{_any_of(t.content for t in added)})"
        )

    @classmethod
    def configured(cls, tokenizer: Tokenizer, config: ModelConfig, tools: Sequence[dict[str, Any]] = ()) -> Encoder:
        """As `model` says."""
        return cls(
            tokenizer,
            templated=config.chat_template,
            day=config.chat_date,
            tools=tools,
            arguments=config.chat_template_kwargs,
        )

    def with_tools(self, tools: Sequence[dict[str, Any]]) -> Encoder:
        """The same with other tools."""
        found = copy.copy(self)
        found._tools = list(tools) or None
        return found

    def with_arguments(self, arguments: Mapping[str, Any]) -> Encoder:
        """The same with these arguments of the template as well."""
        if not arguments:
            return self
        found = copy.copy(self)
        found._arguments = {**self._arguments, **arguments}
        return found

    @property
    def is_templated(self) -> bool:
        """Whether chats are rendered by a chat template."""
        return self._templated

    def text(self, text: str) -> Encoded:
        """Encodes a text that is all data."""
        return self._encoded(self.prepare_text(text))

    def chat(self, messages: Sequence[Message]) -> Encoded:
        """Encodes messages, with the generation prompt after them. Roles and contents are data."""
        return self._encoded(self.prepare_chat(messages))

    def _encoded(self, prepared: Prepared) -> Encoded:
        (tokens,) = self.tokenize([prepared])
        return Encoded(prepared.text, tokens, has_control_text=prepared.renamed is not None)

    def is_control(self, token: int) -> bool:
        """Whether a token is special, or one with which the chat template marks turns."""
        return token in self._control_ids

    @cached_property
    def _control_ids(self) -> frozenset[int]:
        return frozenset(self._tokenizer.convert_tokens_to_ids(list(self._secret_names)))

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """The text of tokens, with or without special ones. A control token that ends them is never part of it."""
        if special and tokens and self.is_control(tokens[-1]):
            tokens = tokens[:-1]
        return str(self._tokenizer.decode(tokens, skip_special_tokens=not special))

    def tokenize(self, texts: Sequence[Prepared]) -> list[list[int]]:
        """The tokens of each text. The tokenizer gets all of them at once, and so uses all cores."""
        kinds: dict[tuple[bool, bool], list[int]] = {}
        for place, one in enumerate(texts):
            kinds.setdefault((one.renamed is not None, one.special), []).append(place)
        found: dict[int, list[int]] = {}
        for (renamed, special), places in kinds.items():
            if renamed:
                secret = [texts[place].renamed or "" for place in places]
                encodings = self._plain_tokenizer.encode_batch(secret, add_special_tokens=special)
                tokens = [list(one.ids) for one in encodings]
            else:
                plain = [texts[place].text for place in places]
                tokens = self._tokenizer(plain, add_special_tokens=special)["input_ids"]
            found |= zip(places, tokens, strict=True)
        return [found[place] for place in range(len(texts))]

    def prepare_text(self, text: str, *, continues: bool = False) -> Prepared:
        """A text that is all data; `continues`: it follows other tokens."""
        return Prepared(text, text if self._quotes(text) else None, special=not continues)

    def prepare_chat(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> Prepared:
        """A chat, with the generation prompt after it."""
        if not self._templated:
            return self.prepare_text("".join(message["content"] for message in messages))
        if not any(self._quotes(str(text)) for message in messages for text in message.values()):
            return Prepared(self._rendered(messages, generation_prompt), None, special=False)
        marked = [{key: self._marked(str(text)) for key, text in message.items()} for message in messages]
        rendered = self._rendered(marked, generation_prompt)
        text = self._written.sub(lambda found: found["quoted"] or found["added"] or "", rendered)
        return Prepared(text, self._written.sub(self._renamed, rendered), special=False)

    def _rendered(self, messages: Sequence[Mapping[str, Any]], generation_prompt: bool) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages,
                tools=self._tools,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                chat_template=self._template,
                **self._arguments,
            )
        except TemplateError:
            raise
        except Exception as error:  # noqa: BLE001  # a template is foreign code: any error is about these messages
            raise TemplateError(f"{type(error).__name__}: {error}") from None
        return text

    def _quotes(self, text: str) -> bool:
        if self._control.search(text):
            return True
        return (
            self._normalizer is not None and self._normalized.search(self._normalizer.normalize_str(text)) is not None
        )

    def _marked(self, text: str) -> str:
        """Puts marks around the texts of control tokens. They stay in the text, as templates may search for them."""
        return self._control.sub(lambda found: self._before + found[0] + self._after, text)

    def _renamed(self, found: re.Match[str]) -> str:
        """Returns what replaces a match: a text between marks is data and stays, a mark that a template separated from
        its text is removed, and a control token without marks is the template's own and gets its secret name."""
        return found["quoted"] or self._secret_names.get(found["added"], found["added"] or "")

    @cached_property
    def _plain_tokenizer(self) -> Backend:
        """The copy of the tokenizer in which the control tokens have secret names."""
        if self._backend is None:
            raise UserError(
                f"a prompt contains the text of a control token, and {type(self._tokenizer).__name__} cannot encode it"
                " as plain text: remove it, or use a tokenizer that has a tokenizer.json"
            )
        tree = json.loads(self._backend.to_str())
        names = self._secret_names
        for token in tree["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        _rename(tree["model"], names)
        copy = Backend.from_str(json.dumps(tree | {"truncation": None, "padding": None}))
        assert all(
            copy.token_to_id(name) == self._tokenizer.convert_tokens_to_ids(content) for content, name in names.items()
        )
        return copy


def _dated(template: Any, day: str | None) -> Any:
    """Returns the template with a fixed date in place of its calls of `strftime_now` with a literal format."""
    if day is None or not isinstance(template, str):
        return template
    clock = datetime.fromisoformat(day)
    return re.sub(
        r"""strftime_now\(\s*(['"])(.*?)\1\s*\)""", lambda call: json.dumps(clock.strftime(call[2])), template
    )


def _rename(model: dict[str, Any], names: dict[str, str]) -> None:
    """Renames control tokens in a tokenizer model's vocabulary too: some models would find them there by their text."""
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(piece, piece): number for piece, number in model["vocab"].items()}
    else:  # a Unigram model: pieces with their scores
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if "merges" in model:
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [pair for pair in pairs if not {*pair, "".join(pair)} & names.keys()]
    if "unk_token" in model:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])


def _turn_tokens(tokenizer: Tokenizer, added: str) -> set[str]:
    """Returns the added tokens that the chat template writes around messages, unless they are words, spaces or the
    marks of reasoning, which are part of what an assistant writes: some tokenizers do not mark these control tokens as
    special."""
    found: set[str] = set()
    chat: list[Message] = [
        {"role": "user", "content": "0"},
        {"role": "assistant", "content": "0"},
        {"role": "user", "content": "0"},
    ]
    for messages in (chat, [{"role": "system", "content": "0"}, *chat]) if tokenizer.chat_template else ():
        with suppress(TemplateError, TypeError):  # the template accepts no system message, or not these messages
            found |= set(
                re.findall(added, tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
            )
    found -= REASONING_MARKS
    return {name for name in found if not (name[0].isalnum() or name[-1].isalnum() or name.isspace())}


def _any_of(texts: Iterable[str]) -> str:
    """Returns a pattern that matches any of the texts, the longest first, as a tokenizer does. It is a prefix tree, so
    that matching does not try each of thousands of names."""
    tree: dict[str, Any] = {}
    for text in filter(None, texts):
        node = tree
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return _pattern_of(tree) or "(?!)"


def _pattern_of(tree: dict[str, Any]) -> str:
    pattern = ""
    while len(tree) == 1 and "" not in tree:
        ((character, tree),) = tree.items()
        pattern += re.escape(character)
    branches = [re.escape(character) + _pattern_of(more) for character, more in tree.items() if character]
    return pattern + (f"(?:{'|'.join(branches)}){'?' if '' in tree else ''}" if branches else "")
