"""What tests of several engines look at in completions."""


def stopped_by(texts: tuple[str, ...], free, held, tokenizer) -> int:
    """How many of the completions sampled with stop texts ended by one; each is what was sampled freely, cut there,
    or the same where none came."""
    stopped = 0
    for before, after in zip(free, held, strict=True):
        places = [place for place in map(before.text.find, texts) if place >= 0]
        if places:
            stopped += 1
            assert after.finish == "stop"
            assert after.text == before.text[: min(places)]
            assert after.tokens == before.tokens[: len(after.tokens)]
            assert tokenizer.decode(after.tokens, skip_special_tokens=True).endswith(texts)
        else:
            assert (after.tokens, after.text, after.finish) == (before.tokens, before.text, before.finish)
    return stopped
