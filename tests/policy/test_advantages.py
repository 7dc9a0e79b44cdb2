"""Advantages against numbers worked out by hand."""

import statistics

import pytest
import torch

from ebbtide.policy.advantages import compute_advantages

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
