"""Examples of files as data: conversations, prompts with completions, and texts, with the tokens that carry loss."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from jinja2 import TemplateError

from ebbtide.config.data import DataConfig, ExamplesConfig
from ebbtide.config.root import Config
from ebbtide.errors import UserError
from ebbtide.model.load import LoadedModel
from ebbtide.policy.datum import Datum
from ebbtide.progress import Progress
from ebbtide.rollout.encoder import Encoder
from ebbtide.tasks.files import read_messages, read_rows
from ebbtide.tasks.task import Message

T = TypeVar("T")
Rows = list[tuple[dict[str, Any], str]]
"""The rows of a file, each with its place in the file for error messages."""


Side = str | Sequence[Message]
"""A prompt or a completion: a text, or messages."""


@dataclass(frozen=True)
class ExampleRows:
    """The rows to train on, and those held out for evaluation."""

    train: Rows
    held_out: Rows


def read_example_rows(config: DataConfig, *, evaluated: bool) -> ExampleRows:
    rows = list(read_rows(config.train, "data"))
    held_out: Rows = []
    if evaluated and config.held_out is not None:
        held_out = list(read_rows(config.held_out, "data"))
    elif evaluated:
        cut = len(rows) - config.held_out_rows
        if cut < 1:
            raise UserError(
                f"`data.held_out_rows: {config.held_out_rows}` sets all {len(rows)} rows of {config.train} aside:"
                " lower it, or name a file in `data.held_out`"
            )
        rows, held_out = rows[:cut], rows[cut:]
    if evaluated and not held_out:
        raise UserError("`evaluate` needs held-out examples: raise `data.held_out_rows`, or set `evaluate: null`")
    if not rows:
        raise UserError(f"the dataset {config.train} is empty: write one row per example")
    return ExampleRows(rows, held_out)


class ExampleEncoder:
    """Encodes examples for one model."""

    def __init__(self, loaded: LoadedModel, config: Config, limit: int, overlong: str) -> None:
        self._encoder = Encoder(loaded.tokenizer, templated=config.model.chat_template, day=config.model.chat_date)
        self._rows, self._ends = loaded.vocabulary_rows, loaded.end_tokens
        self._limit, self._overlong = limit, overlong

    def conversation(self, messages: Sequence[Message], where: str, *, all_tokens: bool = False) -> list[Datum]:
        """A conversation whose assistant turns carry loss, each up to and with its end-of-turn token. It is one datum,
        or several where the chat template rewrites earlier turns, such as by dropping their thinking: then no datum
        has all turns as the model would see them."""
        data: list[tuple[list[int], list[int]]] = [] if self._encoder.is_templated else self._joined(messages)
        for place, message in enumerate(messages if self._encoder.is_templated else ()):
            if message["role"] != "assistant":
                continue
            before = self._chat(messages[:place], where, prompt=True)
            after = self._chat(messages[: place + 1], where, prompt=False)
            if after[: len(before)] != before:
                raise UserError(
                    f"{where} has an assistant turn (message {place}) that the model's chat template does not append"
                    " to the prompt before it, so its tokens cannot be told: set `model.chat_template: false`, or use"
                    " a template that does"
                )
            targets = list(range(len(before), self._end(after, len(before))))
            if data and before[: len(data[-1][0])] == data[-1][0]:
                targets = data.pop()[1] + targets
            data.append((after[: targets[-1] + 1], targets))
        if not data:
            raise UserError(f"{where} has no message of the role `assistant`: nothing in it carries loss")
        if all_tokens:
            data = [(tokens, list(range(1, len(tokens)))) for tokens, _ in data]
        return [datum for tokens, targets in data if (datum := self._fitting(tokens, targets, where)) is not None]

    def _joined(self, messages: Sequence[Message]) -> list[tuple[list[int], list[int]]]:
        """A conversation without a chat template: its texts, with an end of text after each assistant turn."""
        tokens: list[int] = []
        targets: list[int] = []
        for message in messages:
            first = len(tokens)
            text = message["content"]
            tokens += self._encoder.continuation(text) if tokens else self._encoder.text(text).tokens
            if message["role"] == "assistant":
                tokens += self._ends[:1]
                targets += range(max(1, first), len(tokens))
        return [(tokens[: targets[-1] + 1], targets)] if targets else []

    def completion(self, prompt: Side, completion: Side, where: str, *, all_tokens: bool = False) -> list[Datum]:
        """A prompt and its completion. Texts are joined as they are, and the end of text follows; messages are a
        conversation."""
        if not isinstance(prompt, str) or not isinstance(completion, str):
            asked = [Message(role="user", content=prompt)] if isinstance(prompt, str) else list(prompt)
            answer = [Message(role="assistant", content=completion)] if isinstance(completion, str) else completion
            return self.conversation([*asked, *answer], where, all_tokens=all_tokens)
        before = self._encoder.text(prompt).tokens
        tokens = [*before, *self._encoder.continuation(completion), *self._ends[:1]]
        first = 1 if all_tokens else max(1, len(before))
        datum = self._fitting(tokens, list(range(first, len(tokens))), where)
        return [datum] if datum is not None else []

    def text(self, text: str, where: str) -> list[Datum]:
        """A plain text, all of which carries loss, and the end of text."""
        tokens = [*self._encoder.text(text).tokens, *self._ends[:1]]
        datum = self._fitting(tokens, list(range(1, len(tokens))), where)
        return [datum] if datum is not None else []

    def _chat(self, messages: Sequence[Message], where: str, *, prompt: bool) -> list[int]:
        try:
            return self._encoder.chat(messages, generation_prompt=prompt).tokens
        except TemplateError as error:
            raise UserError(f"the model's chat template refuses {where.rstrip(',')}: {error}") from None

    def _end(self, tokens: Sequence[int], start: int) -> int:
        """Where a turn that begins at `start` ends: after its last end-of-turn token, if it has one. What templates
        write behind it, such as a line break, is never sampled."""
        ends = [place for place in range(start, len(tokens)) if tokens[place] in self._ends]
        return ends[-1] + 1 if ends else len(tokens)

    def _fitting(self, tokens: list[int], targets: list[int], where: str) -> Datum | None:
        """The datum, or None where it is too long and left out."""
        if len(tokens) > self._limit and self._overlong == "error":
            raise UserError(
                f"{where} has {len(tokens)} tokens, more than `data.max_tokens` = {self._limit}: raise the limit, or"
                " set `data.overlong` to drop or truncate"
            )
        if len(tokens) > self._limit and self._overlong == "drop":
            return None
        tokens, targets = tokens[: self._limit], [target for target in targets if target < self._limit]
        if not targets or targets[0] < 1:
            return None
        if (last := max(tokens)) >= self._rows:
            raise UserError(
                f"{where} has the token {last}, and the model's embedding has only {self._rows} rows: check"
                " `model.path` and `model.tokenizer`"
            )
        return Datum(tokens, targets)


def encode_examples(
    rows: Rows, encoder: ExampleEncoder, config: ExamplesConfig, progress: Progress
) -> list[list[Datum]]:
    """The data of each example that is not left out."""
    whole = config.loss_on == "all"
    found = []
    for number, (row, where) in enumerate(rows):
        if config.messages_field in row:
            messages = read_messages(row[config.messages_field], f"{where} field `{config.messages_field}`,")
            data = encoder.conversation(messages, where, all_tokens=whole)
        elif config.prompt_field in row and config.completion_field in row:
            prompt = read_side(row, config.prompt_field, where)
            completion = read_side(row, config.completion_field, where)
            data = encoder.completion(prompt, completion, where, all_tokens=whole)
        elif isinstance(row.get(config.text_field), str):
            data = encoder.text(row[config.text_field], where)
        else:
            raise UserError(
                f"{where} has neither `{config.messages_field}`, nor `{config.prompt_field}` and"
                f" `{config.completion_field}`, nor `{config.text_field}` (`data.*_field`); its fields are:"
                f" {', '.join(map(str, row)) or 'none'}"
            )
        found += [data] if data else []
        if number % 1000 == 999:
            progress(number + 1, len(rows))
    if rows and not found:
        raise UserError(
            f"all {len(rows)} examples have more than `data.max_tokens` tokens, and so were dropped: raise the limit"
        )
    return found


def read_side(row: Mapping[str, Any], field: str, where: str) -> Side:
    """The prompt or the completion in a field."""
    value = row[field]
    return value if isinstance(value, str) else read_messages(value, f"{where} field `{field}`,")


def data_digest(data: Sequence[Sequence[Datum]]) -> str:
    """A digest of all tokens and targets, which tells whether a resumed run has the same data."""
    digest = hashlib.blake2b(digest_size=16)
    for datum in _flatten(data):
        digest.update(repr((datum.tokens, list(datum.targets))).encode())
    return digest.hexdigest()


def _flatten(groups: Sequence[Sequence[T]]) -> Iterator[T]:
    for group in groups:
        yield from group
