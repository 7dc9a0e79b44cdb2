"""Advantages against numbers worked out by hand."""

import statistics

import pytest
import torch

from ebbtide.policy.advantages import compute_advantages, compute_known_advantages, turn_advantages

REWARDS = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.2, 0.4, 0.9, 0.1]], dtype=torch.float64)
FLAT = torch.full((2, 3), 0.1, dtype=torch.float64)  # 0.1 + 0.1 + 0.1 is not 0.3 in floating point


def by_hand(kind: str) -> list[list[float]]:
    groups = REWARDS.tolist()
    everything = [reward for group in groups for reward in group]
    out = []
    for group in groups:
        mean = statistics.fmean(group)
        if kind == "group_mean":
            out.append([reward - mean for reward in group])
        elif kind == "group_std":
            out.append([(reward - mean) / (statistics.stdev(group) + 1e-6) for reward in group])
        elif kind == "rloo":
            out.append([reward - (sum(group) - reward) / (len(group) - 1) for reward in group])
        else:
            centre, spread = statistics.fmean(everything), statistics.pstdev(everything)
            out.append([(reward - centre) / (spread + 1e-6) for reward in group])
    return out


@pytest.mark.parametrize("kind", ["group_mean", "group_std", "rloo", "reinforce_pp"])
def test_by_hand(kind) -> None:
    torch.testing.assert_close(compute_advantages(REWARDS, kind), torch.tensor(by_hand(kind), dtype=torch.float64))


@pytest.mark.parametrize("kind", ["group_mean", "group_std", "rloo", "reinforce_pp"])
def test_a_flat_group_has_no_advantage_at_all(kind) -> None:
    assert (compute_advantages(FLAT, kind) == 0).all()


def test_one_sample_a_group_has_a_batch_baseline() -> None:
    found = compute_advantages(torch.tensor([[1.0], [0.0]]), "reinforce_pp")
    torch.testing.assert_close(found, torch.tensor([[1.0], [-1.0]]), rtol=1e-5, atol=1e-5)


def test_a_turn_is_worth_what_comes_from_it_on() -> None:
    """By hand: the returns of first turns are 1.2, 0.2 and 0, those of second turns 1.0 and 0."""
    rewards = [[[0.2, 1.0], [0.2, 0.0], [0.0]], [[0.5], [0.5, 0.0], [0.25, 0.25]]]
    found = turn_advantages(rewards, "group_mean")
    mean = (1.2 + 0.2) / 3
    assert found[0] == [pytest.approx([1.2 - mean, 0.5]), pytest.approx([0.2 - mean, -0.5]), pytest.approx([-mean])]
    # First turns of equal worth have no advantage, whatever their rewards were.
    assert found[1] == [[0.0], pytest.approx([0.0, -0.125]), pytest.approx([0.0, 0.125])]


def test_a_turn_that_no_other_has_is_compared_with_nothing() -> None:
    for kind in ("group_std", "group_mean", "rloo"):
        (((first, second), (other,)),) = turn_advantages([[[0.0, 3.0], [1.0]]], kind)
        assert first > 0 > other
        assert second == 0.0


def test_reinforce_pp_compares_a_turn_in_the_whole_batch() -> None:
    found = turn_advantages([[[0.0, 1.0]], [[0.0, 0.0]]], "reinforce_pp")
    assert found[0][0] == pytest.approx([1.0, 1.0], abs=1e-4)
    assert found[1][0] == pytest.approx([-1.0, -1.0], abs=1e-4)


@pytest.mark.parametrize("kind", ["group_mean", "group_std", "rloo", "reinforce_pp", "reinforce_pp_baseline"])
@pytest.mark.parametrize("by_tokens", [False, True])
def test_an_unknown_reward_is_compared_with_nothing(kind, by_tokens) -> None:
    """Whatever stands in its place, the others have the advantages that they would have without it."""
    known = torch.tensor([[True, True, False, True], [True, False, True, True]])
    tokens = torch.tensor([[3, 1, 9, 2], [4, 9, 1, 5]]) if by_tokens and kind.startswith("reinforce_pp") else None
    found = [
        compute_known_advantages(torch.where(known, REWARDS, other), known, kind, tokens) for other in (0.0, -100.0)
    ]
    assert torch.equal(found[0], found[1])
    assert (found[0][~known] == 0).all()
    left = REWARDS[known].view(2, 3)
    counts = None if tokens is None else tokens[known].view(2, 3)
    torch.testing.assert_close(found[0][known].view(2, 3), compute_advantages(left, kind, counts))


def test_a_sample_whose_group_is_unknown_has_no_advantage() -> None:
    known = torch.tensor([[True, False, False], [False, False, False]])
    rewards = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    for kind in ("group_mean", "group_std", "rloo", "reinforce_pp", "reinforce_pp_baseline"):
        assert (compute_known_advantages(rewards, known, kind) == 0).all()
        assert (compute_known_advantages(rewards, torch.zeros_like(known), kind) == 0).all()
