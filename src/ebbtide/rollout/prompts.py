"""Makes prompts of problems, and checks that each of them fits."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase as Tokenizer

from ebbtide.config.root import Config
from ebbtide.errors import UserError
from ebbtide.model.tokenizer import UNKNOWN
from ebbtide.progress import Progress
from ebbtide.rollout.encoder import Encoder
from ebbtide.tasks.task import Problem


@dataclass(frozen=True)
class Prompt:
    """A problem as text and tokens."""

    problem: Problem
    text: str
    tokens: list[int]
    has_control_text: bool = False
    """Whether the problem contains the text of a control token, which is encoded as plain text."""


def encode_prompts(
    problems: Sequence[Problem], tokenizer: Tokenizer, rows: int, config: Config, progress: Progress
) -> list[Prompt]:
    """Encodes every problem as a prompt. All are checked before the first step, so that a bad one does not end a run
    hours later. Token ids must be below `rows`, the rows of the embedding."""
    prompts, limit = [], config.rollout.max_prompt_tokens
    encoder = Encoder.configured(tokenizer, config.model)
    alphabet = config.model.scratch.alphabet if config.model.scratch is not None else None
    for number, problem in enumerate(problems):
        try:
            encoded = encoder.chat(problem.messages)
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in problem.messages)
            raise UserError(
                f"the model's chat template refuses problem {number} (its messages are: {roles}): {error}. "
                "Some templates accept no system message: remove `task.system`, or set `model.chat_template: false`"
            ) from None
        text, tokens = encoded.text, encoded.tokens
        if not tokens:
            raise UserError(f"problem {number} has an empty prompt: a model needs at least one token to continue")
        if alphabet is not None and tokenizer.convert_tokens_to_ids(UNKNOWN) in tokens:
            unknown = sorted(set(text) - set(alphabet))
            raise UserError(
                f"problem {number} has characters that `model.scratch.alphabet` lacks: {''.join(unknown)!r}. Add them"
                " to it"
            )
        if (last := max(tokens)) >= rows:
            raise UserError(
                f"problem {number} has the token {tokenizer.convert_ids_to_tokens(last)!r} in its prompt (it begins"
                f" {text[:40]!r}), which is number {last}, and the model's embedding has only {rows} rows: remove it"
                " from the prompt, or check `model.path` and `model.tokenizer`"
            )
        if len(tokens) <= limit:
            prompts.append(Prompt(problem, text, tokens, encoded.has_control_text))
        elif config.task is None or config.task.overlong_prompts == "error":
            raise UserError(
                f"problem {number} has a prompt of {len(tokens)} tokens, more than `rollout.max_prompt_tokens` ="
                f" {limit} (it begins {text[:40]!r}): raise the limit, or set `task.overlong_prompts: drop`"
            )
        if number % 1000 == 999:
            progress(number + 1, len(problems))
    if problems and not prompts:
        raise UserError(
            f"all {len(problems)} prompts have more than `rollout.max_prompt_tokens` = {limit} tokens, and so were"
            " dropped: raise the limit"
        )
    return prompts


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """Returns a hash of the prompts, their answers and their order. Answers that are neither text nor number are left
    out."""
    sha = hashlib.sha256()
    for prompt in prompts:
        answer = prompt.problem.answer
        known = answer if isinstance(answer, str | int | float) else None
        sha.update(f"{prompt.tokens} {known!r}\n".encode(errors="backslashreplace"))
    return sha.hexdigest()


def control_text_notes(prompts: Sequence[Prompt]) -> list[str]:
    """Returns a note for problems that contain control tokens as text, such as whole transcripts."""
    quoting = [prompt for prompt in prompts if prompt.has_control_text]
    if not quoting:
        return []
    return [
        f"{len(quoting):,} of {len(prompts):,} prompts contain the text of control tokens, which is encoded as plain"
        " text: only the chat template writes control tokens. Pass a transcript as a list of messages with `role` and"
        " `content`"
    ]
