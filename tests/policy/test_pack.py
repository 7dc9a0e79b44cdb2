"""Packing keeps every sequence whole and every token in its place."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.policy.datum import trajectory
from ebbtide.policy.packing import pack, plan_packing


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 120))
def test_every_sequence_is_packed_once_within_the_budget(lengths, budget) -> None:
    bins = plan_packing(lengths, budget)
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in members) <= budget for members in bins)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60))
def test_no_two_bins_could_be_one(lengths) -> None:
    fill = sorted(sum(lengths[index] for index in members) for members in plan_packing(lengths, 50))
    assert all(a + b > 50 for a, b in pairwise(fill))


def test_too_long_a_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        plan_packing([51], 50)


def test_places_and_targets() -> None:
    (batch,) = pack([trajectory([1, 2, 3], [4, 5], []), trajectory([6], [7, 8, 9], [])], 64, torch.device("cpu"))
    assert batch.token_ids.tolist() == [[1, 2, 3, 4, 6, 7, 8]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert batch.starts.tolist() == [0, 4, 7]
    assert batch.longest == 4
    assert batch.predict.tolist() == [2, 3, 4, 5, 6]
    assert batch.targets.tolist() == [4, 5, 7, 8, 9]
    assert batch.sequence.tolist() == [0, 0, 1, 1, 1]
