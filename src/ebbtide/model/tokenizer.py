"""The tokenizer of a from-scratch model: one token per character of an alphabet, or one per byte."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ebbtide.errors import UserError

END, UNKNOWN = "<end>", "<unknown>"


def scratch_tokenizer(alphabet: str | None) -> PreTrainedTokenizerFast:
    """A transformers tokenizer with the end token and the bytes, or with the end token, an unknown token and the
    characters.

    Only the end token is special. Special tokens are not part of the decoded text: with others, a model could continue
    after its answer without the scorer seeing it.
    """
    if alphabet is not None and (not alphabet or len(set(alphabet)) != len(alphabet)):
        raise UserError(f"`model.scratch.alphabet` is {alphabet!r}: write at least one character, and each only once")
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
