"""Each token's share of a completion's text: whole for every tokenizer, and right where the text says whose a
character is."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from ebbtide.model.tokenizer import scratch_tokenizer
from ebbtide.report.token_spans import TokenSpans

BYTES = scratch_tokenizer(None)


def cut(tokenizer, tokens: list[int], text: str) -> list[str]:
    lengths = TokenSpans(tokenizer).lengths(tokens, text)
    ends = list(accumulate(lengths))
    assert (ends[-1] if ends else 0) == len(text)
    return [text[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def words() -> PreTrainedTokenizerFast:
    """As Llama 2's and Gemma's: a mark where a word begins, which is no space at the beginning of a text."""
    vocabulary = {piece: place for place, piece in enumerate(["<end>", "▁the", "▁cat", "s", "▁"])}
    core = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<end>"))
    core.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")


def test_a_character_of_several_tokens_is_the_last_ones() -> None:
    tokens = BYTES("né🙂!")["input_ids"]
    assert cut(BYTES, tokens, "né🙂!") == ["n", "", "é", "", "", "", "🙂", "!"]


def test_words_keep_the_space_before_them() -> None:
    tokenizer = words()
    tokens = [1, 2, 3, 1, 0]
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    assert text == "the cats the"
    assert cut(tokenizer, tokens, text) == ["the", " cat", "s", " the", ""]


def test_what_is_not_in_the_text_has_no_characters() -> None:
    tokenizer = scratch_tokenizer("0123456789#")
    tokens = [*tokenizer("12##")["input_ids"], tokenizer.eos_token_id]
    assert cut(tokenizer, tokens, "12") == ["1", "2", "", "", ""]  # cut before the stop text
    assert cut(tokenizer, [], "") == []


@pytest.mark.parametrize("skipped", [0, 1, 3])
@given(tokens=st.lists(st.integers(0, len(BYTES) - 1), max_size=60))
def test_lengths_add_up_whatever_the_bytes(skipped, tokens) -> None:
    """Tokens at random: broken characters, special tokens, and texts that end before them."""
    text = BYTES.decode(tokens, skip_special_tokens=True)
    cut(BYTES, tokens, text[: len(text) - skipped] if skipped else text)


@given(text=st.text(alphabet="ab é漢🙂\n", max_size=40))
def test_letters_are_found_in_their_places(text) -> None:
    tokens = BYTES(text)["input_ids"]
    alone = [BYTES.decode([token]) for token in tokens]
    for piece, single in zip(cut(BYTES, tokens, text), alone, strict=True):
        assert piece.endswith(single) or "\N{REPLACEMENT CHARACTER}" in single
