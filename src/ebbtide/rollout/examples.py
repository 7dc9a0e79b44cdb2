"""Examples of files as data: conversations, prompts with completions, and texts, with the tokens that carry loss."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from jinja2 import TemplateError

from ebbtide.config.data import DataConfig, ExamplesConfig, PairsConfig
from ebbtide.config.root import Config
from ebbtide.errors import UserError
from ebbtide.model.load import LoadedModel
from ebbtide.model.tokenizer import UNKNOWN
from ebbtide.policy.datum import Datum
from ebbtide.progress import Progress
from ebbtide.rollout.encoder import Encoder, Prepared
from ebbtide.tasks.files import Row, read_messages, read_rows
from ebbtide.tasks.task import Message, ask, find_message_problem

TOGETHER = 1000  # rows whose texts are tokenized together: enough for all cores, and seconds between signs of progress
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
    rows: Rows = list(read_rows(path, "data"))
    if not rows:
        raise UserError(f"the dataset {path} is empty: write one row per example")
    return rows


Pieces = Sequence[tuple[list[int], Sequence[int]]]
"""(tokens, targets) of each datum of an example."""


class Draft(NamedTuple):
    """An example whose texts have no tokens yet: those of many examples are tokenized together."""

    texts: list[Prepared]
    finish: Callable[[list[list[int]]], list[Datum]]
    """Makes its data from the tokens of each text."""


class ExampleEncoder:
    """Encodes examples for one model: `encode` for as many as fit, each from its columns."""

    def __init__(self, loaded: LoadedModel, config: Config, limit: int, overlong: str) -> None:
        self._encoder = Encoder.configured(loaded.tokenizer, config.model)
        self._rows, self._ends = loaded.vocabulary_rows, loaded.end_tokens
        self._limit, self._overlong = limit, overlong
        alphabet = config.model.scratch.alphabet if config.model.scratch is not None else None
        self._unknown = loaded.tokenizer.convert_tokens_to_ids(UNKNOWN) if alphabet is not None else None

    def conversation(
        self, messages: Sequence[Message], where: str, *, all_tokens: bool = False, first: int = 0
    ) -> Draft:
        """A conversation whose assistant turns carry loss, from message number `first` on, each up to and with its
        end-of-turn token. It is one datum, or several where the chat template rewrites earlier turns, such as by
        dropping their thinking: then no datum has all turns as the model would see them. With `all_tokens` it is one
        datum of the whole conversation, and all of it carries loss."""
        turns = [place for place, one in enumerate(messages) if one["role"] == "assistant" and place >= first]
        if not turns and not all_tokens:
            raise UserError(f"{where} has no message of the role `assistant`: nothing in it carries loss")
        if not self._encoder.is_templated:
            texts = [self._encoder.prepare_text(one["content"], continues=n > 0) for n, one in enumerate(messages)]
            pieces = partial(self._joined, messages, turns)
        elif all_tokens:
            texts, pieces = [self._chat(messages, where, prompt=False)], partial(self._whole, messages)
        else:
            texts = [
                text
                for place in turns
                for text in (
                    self._chat(messages[:place], where, prompt=True),
                    self._chat(messages[: place + 1], where, prompt=False),
                )
            ]
            pieces = partial(self._turns, turns, where)

        def finish(tokens: list[list[int]]) -> list[Datum]:
            data = pieces(tokens)
            return self._fitting([(one, range(len(one))) for one, _ in data] if all_tokens else data, where)

        return Draft(texts, finish)

    def _turns(self, turns: Sequence[int], where: str, tokens: list[list[int]]) -> Pieces:
        """Of a conversation by a chat template, from its tokens before and after each turn."""
        data: list[tuple[list[int], Sequence[int]]] = []
        for number, place in enumerate(turns):
            before, after = tokens[2 * number : 2 * number + 2]
            if after[: len(before)] != before:
                raise UserError(
                    f"{where} has an assistant turn (message {place}) that the model's chat template does not append"
                    " to the prompt before it, so its tokens cannot be told: set `model.chat_template: false`, or use"
                    " a template that does"
                )
            end = self._end(after, len(before))
            targets: Sequence[int] = range(len(before), end)
            if data and before[: len(data[-1][0])] == data[-1][0]:
                targets = [*data.pop()[1], *targets]
            data.append((after[:end], targets))
        return data

    def _whole(self, messages: Sequence[Message], tokens: list[list[int]]) -> Pieces:
        """Of a conversation by a chat template, without what it writes behind the last assistant turn's end."""
        (whole,) = tokens
        return [(whole[: self._end(whole, 0)] if messages[-1]["role"] == "assistant" else whole, [])]

    def _joined(self, messages: Sequence[Message], turns: Sequence[int], tokens: list[list[int]]) -> Pieces:
        """Of a conversation without a chat template: its texts, with an end of text after each assistant turn."""
        joined: list[int] = []
        targets: list[int] = []
        for place, (message, text) in enumerate(zip(messages, tokens, strict=True)):
            begin = len(joined)
            joined += text
            if message["role"] == "assistant":
                joined += self._ends[:1]
                targets += range(begin, len(joined)) if place in turns else ()
        return [(joined, targets)]

    def completion(self, prompt: Side, completion: Side, where: str, *, all_tokens: bool = False) -> Draft:
        """A prompt and its completion, which carries the loss. Texts are joined as they are, and the end of text
        follows; messages are a conversation."""
        if not isinstance(prompt, str) or not isinstance(completion, str):
            asked = [Message(role="user", content=prompt)] if isinstance(prompt, str) else list(prompt)
            answer = [Message(role="assistant", content=completion)] if isinstance(completion, str) else completion
            return self.conversation([*asked, *answer], where, all_tokens=all_tokens, first=len(asked))

        def finish(tokens: list[list[int]]) -> list[Datum]:
            before, after = tokens
            joined = [*before, *after, *self._ends[:1]]
            return self._fitting([(joined, range(0 if all_tokens else len(before), len(joined)))], where)

        return Draft(
            [self._encoder.prepare_text(prompt), self._encoder.prepare_text(completion, continues=True)], finish
        )

    def text(self, text: str, where: str) -> Draft:
        """A plain text, all of which carries loss, and the end of text."""

        def finish(tokens: list[list[int]]) -> list[Datum]:
            whole = [*tokens[0], *self._ends[:1]]
            return self._fitting([(whole, range(len(whole)))], where)

        return Draft([self._encoder.prepare_text(text)], finish)

    def encode(self, drafts: Sequence[Draft]) -> list[list[Datum]]:
        """The data of each example, without those that are left out."""
        tokens = iter(self._encoder.tokenize([text for draft in drafts for text in draft.texts]))
        return [draft.finish([next(tokens) for _ in draft.texts]) for draft in drafts]

    def _chat(self, messages: Sequence[Message], where: str, *, prompt: bool) -> Prepared:
        try:
            return self._encoder.prepare_chat(messages, generation_prompt=prompt)
        except TemplateError as error:
            raise UserError(f"the model's chat template refuses {where.rstrip(',')}: {error}") from None

    def _end(self, tokens: Sequence[int], start: int) -> int:
        """Where a turn that begins at `start` ends: after its last end-of-turn token, if it has one. What templates
        write behind it, such as a line break, is never sampled."""
        backward = range(len(tokens) - 1, start - 1, -1)
        return next((place + 1 for place in backward if tokens[place] in self._ends), len(tokens))

    def _fitting(self, data: Pieces, where: str) -> list[Datum]:
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
            carrying: Sequence[int]
            if isinstance(targets, range):  # the usual case, in a tenth of the time
                carrying = range(max(1, targets.start), min(targets.stop, self._limit))
            else:
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

    def draft(row: Mapping[str, Any], where: str) -> list[Draft]:
        if config.messages_field in row:
            messages = read_messages(row[config.messages_field], f"{where} field `{config.messages_field}`,")
            return [encoder.conversation(messages, where, all_tokens=whole)]
        if config.prompt_field in row and config.completion_field in row:
            prompt = _read_side(row, config.prompt_field, where)
            completion = _read_side(row, config.completion_field, where)
            return [encoder.completion(prompt, completion, where, all_tokens=whole)]
        if config.text_field in row:
            return [encoder.text(_read_text(row, config.text_field, where), where)]
        raise UserError(
            f"{where} has neither `{config.messages_field}`, nor `{config.prompt_field}` and"
            f" `{config.completion_field}`, nor `{config.text_field}` (`data.*_field`); its fields are:"
            f" {', '.join(map(str, row)) or 'none'}"
        )

    found = [data for (data,) in _encode_rows(rows, encoder, draft, progress) if data]
    if rows and not found:
        raise UserError(
            f"none of {len(rows)} examples is left: all have more than `data.max_tokens` tokens, or no text. Raise the"
            " limit"
        )
    return found


def _encode_rows(
    rows: Rows, encoder: ExampleEncoder, draft: Callable[[Mapping[str, Any], str], list[Draft]], progress: Progress
) -> Iterator[list[list[Datum]]]:
    """The data of each draft of each row."""
    for start in range(0, len(rows), TOGETHER):
        drafts = [
            # Parquet has all columns in every row.
            draft(Row({name: value for name, value in columns.items() if value is not None}), where)
            for columns, where in rows[start : start + TOGETHER]
        ]
        encoded = iter(encoder.encode([one for some in drafts for one in some]))
        yield from ([next(encoded) for _ in some] for some in drafts)
        progress(min(start + TOGETHER, len(rows)), len(rows))


def _read_text(row: Mapping[str, Any], field: str, where: str) -> str:
    text = row[field]
    if not isinstance(text, str):
        raise UserError(f"{where} field `{field}`, must be a text, but is a {type(text).__name__}")
    if (why := find_message_problem(ask(text))) is not None:
        raise UserError(f"{where} field `{field}`, has a text whose characters {why}")
    return text


def encode_pairs(rows: Rows, encoder: ExampleEncoder, config: PairsConfig, progress: Progress) -> list[list[Datum]]:
    """The better and the worse side of each pair that is not left out."""
    names = {"chosen_field": config.chosen_field, "rejected_field": config.rejected_field}

    def draft(row: Mapping[str, Any], where: str) -> list[Draft]:
        for key, name in names.items():
            if name not in row:
                fields = ", ".join(map(str, row)) or "none"
                raise UserError(f"{where} has no field `{name}` (`data.{key}`); its fields are: {fields}")
        chosen, rejected = (_read_side(row, name, where) for name in names.values())
        prompt = _read_side(row, config.prompt_field, where) if config.prompt_field in row else None
        if prompt is None or _contains_prompt(prompt, chosen):
            prompt, chosen, rejected = _split(chosen, rejected, where)
        return [encoder.completion(prompt, side, where) for side in (chosen, rejected)]

    pairs = [[side[-1] for side in sides] for sides in _encode_rows(rows, encoder, draft, progress) if all(sides)]
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
    for datum in (datum for example in data for datum in example):
        for numbers in (datum.tokens, datum.targets):
            digest.update(len(numbers).to_bytes(8, "little") + array("q", numbers).tobytes())
    return digest.hexdigest()
