"""What a chat template says of itself: the variables that it uses, and the token with which it ends a turn."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ebbtide.config.model import ModelConfig
from ebbtide.system.transformers_internals import template_variables

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def unused_arguments_warning(
    tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any], called: str = "model.chat_template_kwargs"
) -> str | None:
    """A warning of arguments that the chat template does not use: a template ignores a misspelt name in silence."""
    if not arguments:
        return None
    if not tokenizer.chat_template:
        return f"`{called}` has no effect: the tokenizer has no chat template"
    known = template_variables(tokenizer)
    if known is None or not (unused := sorted(arguments.keys() - known)):
        return None
    theirs = ", ".join(sorted(known - {"messages", "tools", "add_generation_prompt"}))
    return (
        f"the model's chat template does not use {', '.join(f'`{name}`' for name in unused)} of `{called}`: check the"
        f" spelling (it uses: {theirs or 'no arguments'})"
    )


def turn_end(tokenizer: PreTrainedTokenizerBase, config: ModelConfig) -> int | None:
    """The token that the chat template writes after an assistant's last message, such as `<|im_end|>`: models are
    trained to end a turn with it, whether or not their generation_config.json names it. None if there is none."""
    if not (config.chat_template and tokenizer.chat_template):
        return None
    mark = f"[{secrets.randbelow(10**18)}]"
    chat = [{"role": "user", "content": "0"}, {"role": "assistant", "content": mark}]
    try:
        written = str(tokenizer.apply_chat_template(chat, tokenize=False, **config.chat_template_kwargs))
    except Exception:  # noqa: BLE001  # A template is foreign code, and may refuse these messages in any way.
        return None
    after = written.rpartition(mark)[2].lstrip()
    added = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.content}
    found = [name for name in added if after.startswith(name)]
    return added[max(found, key=len)] if found else None
