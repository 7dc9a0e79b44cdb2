"""Work is dealt out whole, once, and evenly."""

from hypothesis import given
from hypothesis import strategies as st

from ebbtide.parallel.partition import balance


@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(1, 9))
def test_every_piece_goes_to_one_rank_and_none_has_much_more(sizes, ranks) -> None:
    hands = balance(sizes, ranks)
    assert len(hands) == ranks
    assert sorted(index for hand in hands for index in hand) == list(range(len(sizes)))
    held = [sum(sizes[index] for index in hand) for hand in hands]
    for hand, size in zip(hands, held, strict=True):
        if hand:  # without its smallest piece, no rank has more than the one that has least
            assert size - min(sizes[index] for index in hand) <= min(held)
    assert max(map(len, hands)) - min(map(len, hands)) <= 1 or len(set(sizes)) > 1


def test_long_samples_do_not_meet_on_one_rank() -> None:
    lengths = [100, 1, 1, 1, 100, 1, 1, 1]
    assert [sum(lengths[index] for index in hand) for hand in balance(lengths, 2)] == [103, 103]
