"""The section `data`: files of examples, for algorithms that train on given text instead of sampled completions."""

from __future__ import annotations

from typing import Literal

from ebbtide.config.base import Count, Natural, Section


class DataConfig(Section):
    """Examples from JSONL or Parquet files."""

    train: str
    """Path of a `.jsonl` or `.parquet` file, or `hf://datasets/OWNER/NAME/FILE` for a dataset's file on the hub."""

    held_out: str | None = None
    """Path of a file with the held-out examples; `null` sets the last `held_out_rows` rows of `train` aside."""

    held_out_rows: Natural = 64
    """Number of rows of `train` set aside for `evaluate`. Ignored with `held_out`, and without `evaluate`."""

    batch_size: Count = 32
    """Examples per step, on all ranks together (the global batch size)."""

    max_tokens: Count = 2048
    """Longest sequence, in tokens."""

    overlong: Literal["error", "drop", "truncate"] = "error"
    """What to do with an example of more than `max_tokens`: stop, leave it out, or cut its end off."""

    @property
    def held_out_examples(self) -> int:
        """Held-out examples, for predictions. The rows of a file are not counted beforehand: the usual number stands
        for them."""
        usual: int = type(self).model_fields["held_out_rows"].default
        return self.held_out_rows if self.held_out is None else usual


class ExamplesConfig(DataConfig):
    """Examples from JSONL or Parquet files: conversations, prompts with completions, or plain texts. Which it is, the
    first of these fields that a row has decides: messages, prompt and completion, text. `a.b` is the field `b` of the
    field `a`."""

    messages_field: str = "messages"
    """Field with a conversation: a list of messages with `role` and `content`."""

    prompt_field: str = "prompt"
    """Field with a prompt: a text, or a list of messages."""

    completion_field: str = "completion"
    """Field with the completion of the prompt: a text, or a list of messages."""

    text_field: str = "text"
    """Field with a plain text, all of which carries loss."""

    loss_on: Literal["assistant", "all"] = "assistant"
    """Which tokens carry loss: those of completions and of a conversation's assistant turns, or all."""


class PairsConfig(DataConfig):
    """Pairs of a better and a worse completion of the same prompt, from JSONL or Parquet files. Of the fields below,
    `a.b` is the field `b` of the field `a`."""

    prompt_field: str = "prompt"
    """Field with the prompt: a text, or a list of messages. Where a row has none, or a text although its completions
    are whole conversations, the messages or the words that both completions begin with in common are the prompt."""

    chosen_field: str = "chosen"
    """Field with the better completion: a text, or a list of messages."""

    rejected_field: str = "rejected"
    """Field with the worse completion: a text, or a list of messages."""
