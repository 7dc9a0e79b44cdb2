"""Examples of files as data: conversations, prompts with completions, and texts, with the tokens that carry loss."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from jinja2 import TemplateError

from ebbtide.config.data import DataConfig, ExamplesConfig, PairsConfig
from ebbtide.config.root import Config
from ebbtide.errors import UserError
from ebbtide.model.load import LoadedModel
from ebbtide.model.tokenizer import UNKNOWN
from ebbtide.policy.datum import Datum
from ebbtide.progress import Progress
from ebbtide.rollout.encoder import Encoder
from ebbtide.tasks.files import read_messages, read_rows
from ebbtide.tasks.task import Message, ask, find_message_problem

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
    rows, held_out = _read_file(config.train), []
    if evaluated and config.held_out is not None:
        held_out = _read_file(config.held_out)
    elif evaluated:
        if config.held_out_rows == 0:
            raise UserError("`evaluate` needs held-out examples: raise `data.held_out_rows`, or set `evaluate: null`")
        cut = len(rows) - config.held_out_rows
        if cut < 1:
            raise UserError(
                f"`data.held_out_rows: {config.held_out_rows}` sets all {len(rows)} rows of {config.train} aside:"
                " lower it, or name a file in `data.held_out`"
            )
        rows, held_out = rows[:cut], rows[cut:]
    return ExampleRows(rows, held_out)


def _read_file(path: str) -> Rows:
    rows = list(read_rows(path, "data"))
    if not rows:
        raise UserError(f"the dataset {path} is empty: write one row per example")
    return rows


class ExampleEncoder:
    """Encodes examples for one model."""

    def __init__(self, loaded: LoadedModel, config: Config, limit: int, overlong: str) -> None:
        self._encoder = Encoder(loaded.tokenizer, templated=config.model.chat_template, day=config.model.chat_date)
        self._rows, self._ends = loaded.vocabulary_rows, loaded.end_tokens
        self._limit, self._overlong = limit, overlong
        alphabet = config.model.scratch.alphabet if config.model.scratch is not None else None
        self._unknown = loaded.tokenizer.convert_tokens_to_ids(UNKNOWN) if alphabet is not None else None

    def conversation(
        self, messages: Sequence[Message], where: str, *, all_tokens: bool = False, first: int = 0
    ) -> list[Datum]:
        """A conversation whose assistant turns carry loss, from message number `first` on, each up to and with its
        end-of-turn token. It is one datum, or several where the chat template rewrites earlier turns, such as by
        dropping their thinking: then no datum has all turns as the model would see them. With `all_tokens` it is one
        datum of the whole conversation, and all of it carries loss."""
        if not any(message["role"] == "assistant" for message in messages[first:]) and not all_tokens:
            raise UserError(f"{where} has no message of the role `assistant`: nothing in it carries loss")
        if not self._encoder.is_templated:
            data = [self._joined(messages, first)]
        elif all_tokens:
            data = [(self._whole(messages, where), [])]
        else:
            data = self._turns(messages, where, first)
        if all_tokens:
            data = [(tokens, list(range(len(tokens)))) for tokens, _ in data]
        return self._fitting(data, where)

    def _turns(self, messages: Sequence[Message], where: str, first: int) -> list[tuple[list[int], list[int]]]:
        """(tokens, targets) of each datum of a conversation, by a chat template."""
        data: list[tuple[list[int], list[int]]] = []
        for place, message in enumerate(messages):
            if message["role"] != "assistant" or place < first:
                continue
            before = self._chat(messages[:place], where, prompt=True)
            after = self._chat(messages[: place + 1], where, prompt=False)
            if after[: len(before)] != before:
                raise UserError(
                    f"{where} has an assistant turn (message {place}) that the model's chat template does not append"
                    " to the prompt before it, so its tokens cannot be told: set `model.chat_template: false`, or use"
                    " a template that does"
                )
            end = self._end(after, len(before))
            targets = list(range(len(before), end))
            if data and before[: len(data[-1][0])] == data[-1][0]:
                targets = data.pop()[1] + targets
            data.append((after[:end], targets))
        return data

    def _whole(self, messages: Sequence[Message], where: str) -> list[int]:
        """A conversation by a chat template, without what it writes behind the last assistant turn's end."""
        tokens = self._chat(messages, where, prompt=False)
        return tokens[: self._end(tokens, 0)] if messages[-1]["role"] == "assistant" else tokens

    def _joined(self, messages: Sequence[Message], first: int) -> tuple[list[int], list[int]]:
        """(tokens, targets) of a conversation without a chat template: its texts, with an end of text after each
        assistant turn."""
        tokens: list[int] = []
        targets: list[int] = []
        for place, message in enumerate(messages):
            begin = len(tokens)
            text = message["content"]
            tokens += self._encoder.continuation(text) if tokens else self._encoder.text(text).tokens
            if message["role"] == "assistant":
                tokens += self._ends[:1]
                targets += range(begin, len(tokens)) if place >= first else ()
        return tokens, targets

    def completion(self, prompt: Side, completion: Side, where: str, *, all_tokens: bool = False) -> list[Datum]:
        """A prompt and its completion, which carries the loss. Texts are joined as they are, and the end of text
        follows; messages are a conversation."""
        if not isinstance(prompt, str) or not isinstance(completion, str):
            asked = [Message(role="user", content=prompt)] if isinstance(prompt, str) else list(prompt)
            answer = [Message(role="assistant", content=completion)] if isinstance(completion, str) else completion
            return self.conversation([*asked, *answer], where, all_tokens=all_tokens, first=len(asked))
        before = self._encoder.text(prompt).tokens
        tokens = [*before, *self._encoder.continuation(completion), *self._ends[:1]]
        first = 0 if all_tokens else len(before)
        return self._fitting([(tokens, list(range(first, len(tokens))))], where)

    def text(self, text: str, where: str) -> list[Datum]:
        """A plain text, all of which carries loss, and the end of text."""
        tokens = [*self._encoder.text(text).tokens, *self._ends[:1]]
        return self._fitting([(tokens, list(range(len(tokens))))], where)

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

    def _fitting(self, data: Sequence[tuple[list[int], list[int]]], where: str) -> list[Datum]:
        """The data of these (tokens, targets), without those that are too long and left out, and those of which nothing
        carries loss."""
        found = []
        for whole, targets in data:
            tokens = whole[: targets[-1] + 1] if targets else []  # what follows the last target is of no use
            if len(tokens) > self._limit and self._overlong == "error":
                raise UserError(
                    f"{where} has {len(tokens)} tokens, more than `data.max_tokens` = {self._limit}: raise the limit,"
                    " or set `data.overlong` to drop or truncate"
                )
            if len(tokens) > self._limit and self._overlong == "drop":
                continue
            # Nothing predicts the first token.
            carrying = [target for target in targets if 1 <= target < self._limit]
            if carrying:
                found.append(Datum(self._checked(tokens[: self._limit], where), carrying))
        return found

    def _checked(self, tokens: list[int], where: str) -> list[int]:
        if self._unknown in tokens:
            raise UserError(f"{where} has characters that `model.scratch.alphabet` lacks: add them to it")
        if (last := max(tokens)) >= self._rows:
            raise UserError(
                f"{where} has the token {last}, and the model's embedding has only {self._rows} rows: check"
                " `model.path` and `model.tokenizer`"
            )
        return tokens


def encode_examples(
    rows: Rows, encoder: ExampleEncoder, config: ExamplesConfig, progress: Progress
) -> list[list[Datum]]:
    """The data of each example that is not left out."""
    whole = config.loss_on == "all"
    found = []
    for number, (columns, where) in enumerate(rows):
        row = {name: value for name, value in columns.items() if value is not None}  # Parquet has all columns
        if config.messages_field in row:
            messages = read_messages(row[config.messages_field], f"{where} field `{config.messages_field}`,")
            data = encoder.conversation(messages, where, all_tokens=whole)
        elif config.prompt_field in row and config.completion_field in row:
            prompt = _read_side(row, config.prompt_field, where)
            completion = _read_side(row, config.completion_field, where)
            data = encoder.completion(prompt, completion, where, all_tokens=whole)
        elif config.text_field in row:
            data = encoder.text(_read_text(row, config.text_field, where), where)
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
            f"none of {len(rows)} examples is left: all have more than `data.max_tokens` tokens, or no text. Raise the"
            " limit"
        )
    return found


def _read_text(row: Mapping[str, Any], field: str, where: str) -> str:
    text = row[field]
    if not isinstance(text, str):
        raise UserError(f"{where} field `{field}`, must be a text, but is a {type(text).__name__}")
    if (why := find_message_problem(ask(text))) is not None:
        raise UserError(f"{where} field `{field}`, has a text whose characters {why}")
    return text


def encode_pairs(rows: Rows, encoder: ExampleEncoder, config: PairsConfig, progress: Progress) -> list[list[Datum]]:
    """The better and the worse side of each pair that is not left out."""
    pairs = []
    for number, (columns, where) in enumerate(rows):
        row = {name: value for name, value in columns.items() if value is not None}
        names = {"chosen_field": config.chosen_field, "rejected_field": config.rejected_field}
        for key, name in names.items():
            if name not in row:
                fields = ", ".join(map(str, row)) or "none"
                raise UserError(f"{where} has no field `{name}` (`data.{key}`); its fields are: {fields}")
        chosen, rejected = (_read_side(row, name, where) for name in names.values())
        prompt = _read_side(row, config.prompt_field, where) if config.prompt_field in row else None
        if prompt is None or _contains_prompt(prompt, chosen):
            prompt, chosen, rejected = _split(chosen, rejected, where)
        sides = [encoder.completion(prompt, side, where) for side in (chosen, rejected)]
        if all(sides):
            pairs.append([side[-1] for side in sides])
        if number % 1000 == 999:
            progress(number + 1, len(rows))
    if rows and not pairs:
        raise UserError(
            f"all {len(rows)} pairs have more than `data.max_tokens` tokens, and so were dropped: raise the limit"
        )
    return pairs


def _contains_prompt(prompt: Side, chosen: Side) -> bool:
    """Whether the completion is a conversation from its start, and the prompt is its first message once more, as a
    text."""
    return isinstance(prompt, str) and not isinstance(chosen, str) and chosen[0]["role"] != "assistant"


def _split(chosen: Side, rejected: Side, where: str) -> tuple[Side, Side, Side]:
    """(the prompt that both completions begin with in common, what follows it in each)."""
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise UserError(f"{where} has a text and a list of messages as a pair without a prompt: write both alike")
    most = min(len(chosen), len(rejected))
    common = next((place for place in range(most) if chosen[place] != rejected[place]), most)
    if isinstance(chosen, str):  # words begin with their space
        common = max(0, chosen.rfind(" ", 0, common), chosen.rfind("\n", 0, common))
    else:
        common = min(common, most - 1)  # each side has a message of its own
    return chosen[:common], chosen[common:], rejected[common:]


def _read_side(row: Mapping[str, Any], field: str, where: str) -> Side:
    """The prompt or the completion in a field."""
    if isinstance(row[field], str):
        return _read_text(row, field, where)
    return read_messages(row[field], f"{where} field `{field}`,")


def data_digest(data: Sequence[Sequence[Datum]]) -> str:
    """A digest of all tokens and targets, which tells whether a resumed run has the same data."""
    digest = hashlib.blake2b(digest_size=16)
    for datum in _flatten(data):
        digest.update(repr((datum.tokens, list(datum.targets))).encode())
    return digest.hexdigest()


def _flatten(groups: Sequence[Sequence[T]]) -> Iterator[T]:
    for group in groups:
        yield from group
