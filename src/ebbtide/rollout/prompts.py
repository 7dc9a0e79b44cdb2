"""From problems to prompts, and the checks that each of them fits."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase as Tokenizer

from ebbtide.config.tree import Config
from ebbtide.errors import UserError
from ebbtide.policy.tokenizer import UNKNOWN
from ebbtide.progress import Progress
from ebbtide.rollout.encoder import Encoder
from ebbtide.tasks.task import Problem


@dataclass(frozen=True)
class Prompt:
    """A problem, as the model reads it."""

    problem: Problem
    text: str
    tokens: list[int]
    quotes: bool = False
    """Whether the problem holds the text of a control token, which is text here."""


def encode(problems: Sequence[Problem], tokenizer: Tokenizer, rows: int, config: Config, progress: Progress) -> list[Prompt]:
    """Every problem as a prompt, checked before the first step: nothing is learnt of a bad one hours later. Token ids are below `rows`."""
    prompts, limit = [], config.rollout.max_prompt_tokens
    encoder = Encoder(tokenizer, templated=config.model.chat_template, day=config.model.chat_date)
    alphabet = config.model.scratch.alphabet if config.model.scratch is not None else None
    for number, problem in enumerate(problems):
        try:
            encoded = encoder.chat(problem.messages)
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in problem.messages)
            raise UserError(
                f"the model's chat template refuses problem {number} (its messages are: {roles}): {error}. "
                "Some templates take no system message: remove `task.system`, or set `model.chat_template: false`"
            ) from None
        text, tokens = encoded.text, encoded.tokens
        if not tokens:
            raise UserError(f"problem {number} has an empty prompt: a model needs at least one token to go on from")
        if alphabet is not None and tokenizer.convert_tokens_to_ids(UNKNOWN) in tokens:
            unknown = sorted(set(text) - set(alphabet))
            raise UserError(f"problem {number} has characters that `model.scratch.alphabet` lacks: {''.join(unknown)!r}. Add them to it")
        if (last := max(tokens)) >= rows:
            raise UserError(
                f"problem {number} has the token {tokenizer.convert_ids_to_tokens(last)!r} in its prompt (it begins {text[:40]!r}), which is number {last}, "
                f"and the model's embedding has only {rows} rows: remove it from the prompt, or check `model.path` and `model.tokenizer`"
            )
        if len(tokens) <= limit:
            prompts.append(Prompt(problem, text, tokens, encoded.quotes))
        elif config.task.overlong_prompts == "error":
            raise UserError(
                f"problem {number} has a prompt of {len(tokens)} tokens, more than `rollout.max_prompt_tokens` = {limit} "
                f"(it begins {text[:40]!r}): raise the limit, or set `task.overlong_prompts: drop`"
            )
        if number % 1000 == 999:
            progress(number + 1, len(problems))
    if problems and not prompts:
        raise UserError(
            f"all {len(problems)} prompts have more than `rollout.max_prompt_tokens` = {limit} tokens, and so were dropped: raise the limit"
        )
    return prompts


def digest(prompts: Sequence[Prompt]) -> str:
    """Other where a prompt, its answer or their order is; answers that are no texts or numbers are passed over."""
    found = hashlib.sha256()
    for prompt in prompts:
        answer = prompt.problem.answer
        known = answer if isinstance(answer, str | int | float) else None
        found.update(f"{prompt.tokens} {known!r}\n".encode(errors="backslashreplace"))
    return found.hexdigest()


def about_quotes(prompts: Sequence[Prompt]) -> list[str]:
    """For people whose problems are whole transcripts, written with control tokens."""
    quoting = [prompt for prompt in prompts if prompt.quotes]
    if not quoting:
        return []
    return [
        f"{len(quoting):,} of {len(prompts):,} prompts hold the text of control tokens, which is read as text: only the chat template makes control "
        "tokens. Give a transcript as a list of messages with `role` and `content`"
    ]
