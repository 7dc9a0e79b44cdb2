"""Sampling: the right distribution, the right log-probs, and randomness that is each sample's own."""

import pytest
import torch

from ebbtide.rollout.engine import SamplingParams
from ebbtide.rollout.sampling import sample_tokens, uniforms

LOGITS = torch.tensor([[2.0, 1.0, 0.5, -1.0, -3.0]])


def frequencies(sampling: SamplingParams, draws: int = 20000) -> torch.Tensor:
    uniform = torch.rand(draws, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tokens, *_ = sample_tokens(LOGITS.expand(draws, -1), uniform, sampling)
    return torch.bincount(tokens, minlength=5) / draws


@pytest.mark.parametrize(
    ("sampling", "logits"),
    [
        (SamplingParams(1), [2.0, 1.0, 0.5, -1.0, -3.0]),
        (SamplingParams(1, temperature=2.0), [1.0, 0.5, 0.25, -0.5, -1.5]),
        (SamplingParams(1, top_k=2), [2.0, 1.0, -1e9, -1e9, -1e9]),
        (SamplingParams(1, top_p=0.75), [2.0, 1.0, -1e9, -1e9, -1e9]),  # 0.60 is too little, 0.82 is enough
        (SamplingParams(1, top_p=0.5), [2.0, -1e9, -1e9, -1e9, -1e9]),
    ],
)
def test_distribution_and_logprobs(sampling, logits) -> None:
    wanted = torch.tensor(logits).softmax(-1)
    torch.testing.assert_close(frequencies(sampling), wanted, atol=0.012, rtol=0)
    tokens, logprobs, _ = sample_tokens(
        LOGITS.expand(50, -1), torch.linspace(0, 0.999, 50, dtype=torch.float64), sampling
    )
    # what a trainer computes: it knows no top-k and no top-p
    whole = (LOGITS[0] / sampling.temperature).log_softmax(-1)
    torch.testing.assert_close(logprobs, whole[tokens], atol=1e-5, rtol=1e-5)


def test_greedy_takes_the_likeliest_whatever_the_number() -> None:
    tokens, logprobs, _ = sample_tokens(
        LOGITS.expand(3, -1), torch.tensor([0.0, 0.5, 0.999], dtype=torch.float64), SamplingParams(1, temperature=0)
    )
    assert tokens.tolist() == [0, 0, 0]
    torch.testing.assert_close(logprobs, LOGITS.log_softmax(-1)[0, 0].expand(3))


def test_the_ends_of_the_unit_interval_are_valid_tokens() -> None:
    edge = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    tokens, *_ = sample_tokens(torch.tensor([[-1e9, 0.0, 0.0, -1e9]] * 2), edge, SamplingParams(1))
    assert tokens.tolist() == [1, 2]


def test_logits_that_are_not_finite_stay_within_bounds() -> None:
    tokens, logprobs, _ = sample_tokens(
        torch.full((2, 5), torch.nan), torch.tensor([0.1, 0.9], dtype=torch.float64), SamplingParams(1)
    )
    assert ((tokens >= 0) & (tokens < 5)).all()
    assert logprobs.isnan().all()


def test_uniforms_depend_on_their_own_seed_alone() -> None:
    three, one = uniforms([5, 6, 7], 4), uniforms([6], 9)
    assert torch.equal(three[1], one[0, :4])
    assert not torch.equal(three[0], three[1])
    far, near = uniforms([5 + 2**32, 5], 4)
    assert not torch.equal(far, near)
