"""The tokenizer of a from-scratch model: one token per character of an alphabet, or one per byte."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ebbtide.errors import UserError

PAD, END, UNKNOWN = "<pad>", "<end>", "<unknown>"


def scratch_tokenizer(alphabet: str | None) -> PreTrainedTokenizerFast:
    """A transformers tokenizer with the three special tokens first, then the characters or bytes."""
    if alphabet is None:
        pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    else:
        pieces = list(alphabet)
        if not pieces or len(set(pieces)) != len(pieces):
            raise UserError(f"`model.scratch.alphabet` is {alphabet!r}: it must hold each of its characters once, and at least one")
    vocabulary = {piece: index for index, piece in enumerate([PAD, END, UNKNOWN, *pieces])}
    if alphabet is None:
        core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.decoder = decoders.ByteLevel()
    else:
        core = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=UNKNOWN))
        core.pre_tokenizer = pre_tokenizers.Split(Regex("(?m)."), behavior="isolated")
        core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token=PAD, eos_token=END, unk_token=UNKNOWN)
