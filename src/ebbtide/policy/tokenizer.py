"""The tokenizer of a from-scratch model: one token per character of an alphabet, or one per byte."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ebbtide.errors import UserError

END, UNKNOWN = "<end>", "<unknown>"


def scratch_tokenizer(alphabet: str | None) -> PreTrainedTokenizerFast:
    """A transformers tokenizer: the end token, then the bytes, or the characters after one that stands for all others.

    Only the end token is special. Special tokens are no part of a text: a model that could sample others would have
    a way to go on, unseen by the scorer, instead of ending its answer.
    """
    if alphabet is not None and (not alphabet or len(set(alphabet)) != len(alphabet)):
        raise UserError(f"`model.scratch.alphabet` is {alphabet!r}: it must hold each of its characters once, and at least one")
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet()) if alphabet is None else [UNKNOWN, *alphabet]
    vocabulary = {piece: index for index, piece in enumerate([END, *pieces])}
    if alphabet is None:
        core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.decoder = decoders.ByteLevel()
    else:
        core = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=UNKNOWN))
        core.pre_tokenizer = pre_tokenizers.Split(Regex("(?m)."), behavior="isolated")
        core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END)
