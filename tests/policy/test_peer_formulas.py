"""Our losses against those of TRL, verl and NeMo RL, each formula written down again in the peer's own layout: padded
[sequences, tokens] with a mask."""

import pytest
import torch

from ebbtide.config.loss import LossConfig
from ebbtide.policy.losses import LossInputs, build_loss
from ebbtide.policy.losses.normalise import token_weights

LENGTHS = [5, 1, 7, 3]
ADVANTAGES = [1.0, -0.5, -1.2, 0.7]


class Padded:
    """The same tokens twice: one after the other, as our losses have them, and padded, as peers have them."""

    def __init__(self, spread: float = 0.8) -> None:
        generator = torch.Generator().manual_seed(7)
        self.mask = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.float64)
        for row, length in enumerate(LENGTHS):
            self.mask[row, :length] = 1
        self.advantages = torch.tensor(ADVANTAGES, dtype=torch.float64).unsqueeze(1)

        def made() -> torch.Tensor:
            return -2.0 + spread * torch.randn(self.mask.shape, generator=generator, dtype=torch.float64)

        self.logprobs, self.old, self.reference, self.rollout = made().requires_grad_(), made(), made(), made()

    def flat(self, padded: torch.Tensor) -> torch.Tensor:
        return padded.expand_as(self.mask)[self.mask.bool()]

    def ours(self, **settings) -> torch.Tensor:
        config = LossConfig.model_validate(settings)
        weights = torch.tensor(token_weights(LENGTHS, config.normalisation, 10), dtype=torch.float64)
        values = {
            "advantages": self.advantages,
            "weights": weights.unsqueeze(1),
            "old_logprobs": self.old,
            "rollout_logprobs": self.rollout,
            "reference_logprobs": self.reference,
        }
        found, _ = build_loss(config)(
            LossInputs(
                logprobs=self.flat(self.logprobs),
                entropies=torch.zeros(sum(LENGTHS), dtype=torch.float64),
                values={name: self.flat(value) for name, value in values.items()},
                sequence=torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)),
                sequences=len(LENGTHS),
                groups=[None] * len(LENGTHS),
            )
        )
        return found

    def token_mean(self, per_token: torch.Tensor) -> torch.Tensor:
        return (per_token * self.mask).sum() / self.mask.sum()

    def sequence_mean(self, per_token: torch.Tensor) -> torch.Tensor:
        return ((per_token * self.mask).sum(-1) / self.mask.sum(-1)).mean()

    def log_ratio(self, level: str) -> torch.Tensor:
        logs = self.logprobs - self.old
        return logs if level == "token" else ((logs * self.mask).sum(-1) / self.mask.sum(-1)).unsqueeze(1)

    def is_same(self, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        """Compares values and gradients."""
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
        (mine,) = torch.autograd.grad(ours, self.logprobs)
        (wanted,) = torch.autograd.grad(theirs, self.logprobs)
        torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-14)
        assert mine.abs().sum() > 0


def verl_dual_clip(ratio, advantages, low, high, c):
    """The clipped loss max(-r A, -clip(r) A), of which at most -c A where A is negative."""
    clipped = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    return torch.where(advantages < 0, torch.minimum(-advantages * c, clipped), clipped)


@pytest.mark.parametrize("c", [1.1, 1.5, 3.0])
def test_dual_clip_is_that_of_verl_and_nemo(c) -> None:
    data = Padded()
    ratio = data.log_ratio("token").exp()
    theirs = data.token_mean(verl_dual_clip(ratio, data.advantages, 0.2, 0.28, c))
    data.is_same(data.ours(clip_low=0.2, clip_high=0.28, clip_ratio_c=c), theirs)
    assert ((ratio > c) & (data.advantages < 0) & data.mask.bool()).any() == (c < 3)
    assert (theirs == data.ours(clip_low=0.2, clip_high=0.28)) == (c == 3)


def test_dual_clip_of_sequences_is_that_of_nemo() -> None:
    data = Padded()
    ratio = data.log_ratio("sequence").exp()
    theirs = data.sequence_mean(verl_dual_clip(ratio, data.advantages, 0.5, 0.5, 1.15))
    assert ((ratio > 1.15) & (data.advantages < 0)).any()
    data.is_same(data.ours(kind="gspo", clip_low=0.5, clip_high=0.5, clip_ratio_c=1.15), theirs)


@pytest.mark.parametrize("delta", [1.3, 2.0])
def test_dual_clip_is_the_delta_of_trl(delta) -> None:
    """TRL clamps the first of the two ratios, whatever the advantage: above 1 + epsilon the same."""
    data = Padded()
    ratio = data.log_ratio("token").exp()
    first, second = ratio.clamp(max=delta) * data.advantages, ratio.clamp(0.8, 1.2) * data.advantages
    data.is_same(data.ours(clip_ratio_c=delta), data.token_mean(-torch.min(first, second)))


def k3(logprobs, reference):
    return torch.exp(reference - logprobs) - (reference - logprobs) - 1


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_kl_with_the_ratio_to_the_old_policy_is_that_of_trl(level) -> None:
    data = Padded()
    ratio = torch.exp(data.log_ratio(level))
    kl = k3(data.logprobs, data.reference) * ratio
    per_token = -torch.min(ratio * data.advantages, ratio.clamp(0.9, 1.1) * data.advantages) + 0.3 * kl
    theirs = data.token_mean(per_token) if level == "token" else data.sequence_mean(per_token)
    ours = data.ours(
        kind="grpo" if level == "token" else "gspo",
        clip_low=0.1,
        clip_high=0.1,
        kl={"coefficient": 0.3, "importance_ratio": "old"},
    )
    data.is_same(ours, theirs)


@pytest.mark.parametrize("kind", ["current", "rollout"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_with_the_ratio_is_that_of_nemo(estimator, kind) -> None:
    """Within NeMo RL's clamps, of 20 for the difference and 10 for the estimate."""
    data = Padded(spread=0.4)
    difference = data.reference - data.logprobs
    base = {"k1": -difference, "k2": difference.square() / 2, "k3": difference.exp() - 1 - difference}[estimator]
    weights = torch.exp(data.logprobs - (data.logprobs.detach() if kind == "current" else data.rollout))
    assert (weights * base).abs().max() < 10
    ratio = data.log_ratio("token").exp()
    policy = torch.max(-data.advantages * ratio, -data.advantages * ratio.clamp(0.8, 1.2))
    theirs = data.token_mean(policy) + data.token_mean(0.2 * weights * base)
    kl = {"coefficient": 0.2, "estimator": estimator, "importance_ratio": kind}
    data.is_same(data.ours(kl=kl), theirs)


def test_on_policy_the_ratio_makes_the_gradient_of_k3_that_of_the_reverse_kl() -> None:
    """Over all tokens of a vocabulary, weighted by their probabilities: d KL = sum p d log p (log p - log q)."""
    logits = torch.randn(11, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    reference = torch.randn(11, generator=torch.Generator().manual_seed(2), dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    (wanted,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits)

    def gradient(importance_ratio):
        logprobs = logits.log_softmax(0)
        values = {"advantages": torch.zeros(11), "weights": logprobs.detach().exp(), "reference_logprobs": reference}
        config = LossConfig.model_validate({"kl": {"coefficient": 1.0, "importance_ratio": importance_ratio}})
        found, _ = build_loss(config)(
            LossInputs(logprobs, torch.zeros(11), values, torch.zeros(11, dtype=torch.long), 1, [None])
        )
        return torch.autograd.grad(found, logits)[0]

    torch.testing.assert_close(gradient("old"), wanted)
    torch.testing.assert_close(gradient("current"), wanted)
    assert (gradient(None) - wanted).abs().max() > 0.01


@pytest.mark.parametrize("high", [None, 1.5])
def test_gspo_is_corrected_by_sequence_as_in_nemo(high) -> None:
    """The weight of a sequence is exp(sum of log p_old - log p_rollout), truncated or not."""
    data = Padded(spread=0.3)
    ratio = data.log_ratio("sequence").exp()
    policy = torch.max(-data.advantages * ratio, -data.advantages * ratio.clamp(0.9, 1.1))
    weights = torch.exp(((data.old - data.rollout) * data.mask).sum(-1, keepdim=True))
    assert weights.max() > 1.5
    theirs = data.sequence_mean(policy * (weights if high is None else weights.clamp(max=high)))
    data.is_same(data.ours(kind="gspo", clip_low=0.1, clip_high=0.1, importance_sampling={"high": high}), theirs)
    by_token = data.ours(kind="gspo", clip_low=0.1, clip_high=0.1, importance_sampling={"high": high, "level": "token"})
    assert by_token != theirs


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kind": "cispo", "clip_ratio_c": 3.0}, "`loss.kind: cispo` already clips every ratio"),
        ({"kind": "mine:loss", "clip_ratio_c": 3.0}, "`loss.kind: mine:loss` is a function of your own"),
        ({"clip_ratio_c": 1.0}, "greater than 1"),
        ({"importance_sampling": {"mode": "mask", "high": None}}, "mode: mask` needs a bound"),
    ],
)
def test_what_does_not_apply_is_refused(settings, said) -> None:
    with pytest.raises(ValueError, match=said):
        LossConfig.model_validate(settings)
