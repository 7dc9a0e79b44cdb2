"""Rewards on their way to advantages, against the formulas of DAPO, verl, NeMo RL and OpenRLHF: overlong completions,
KL in the reward, whitening over tokens; and which samples a KL penalty and an entropy bonus cover."""

import pytest
import torch

from ebbtide.policy.advantages import compute_advantages
from ebbtide.rollout.batch import assemble, penalise_rewards
from ebbtide.rollout.engine import Completion
from ebbtide.rollout.prompts import Prompt
from ebbtide.tasks.score_message import ScoreResult
from ebbtide.tasks.task import Problem, ask

REWARDS = [[1.0, 0.0, 0.25], [0.0, 0.0, 0.0], [1.0, 1.0, 0.5]]
LENGTHS = [[6, 2, 3], [1, 4, 5], [2, 6, 1]]
MASK = torch.tensor([[float(t < length) for t in range(6)] for row in LENGTHS for length in row], dtype=torch.float64)
SCORES = torch.tensor(REWARDS, dtype=torch.float64).flatten()


def batch(config, finish: str = "stop"):
    """A batch with these rewards, whose completions have these lengths."""
    size = config.rollout.group_size
    prompts = [Prompt(Problem(ask(str(i))), str(i), [i]) for i in range(len(REWARDS))]
    groups = [[Completion([1] * n, [-0.5] * n, [0.0] * n, finish, "") for n in row[:size]] for row in LENGTHS]
    scored = [ScoreResult(reward) for row in REWARDS for reward in row[:size]]
    return assemble(config, prompts, groups, scored)


def of_tokens(made) -> torch.Tensor:
    """The advantages of all data, padded; 0 where there is no token."""
    found = torch.zeros_like(MASK)
    for row, datum in enumerate(made.data):
        found[row, : len(datum.targets)] = torch.as_tensor(datum.values["advantages"], dtype=torch.float64)
    return found


def masked_mean(values):
    return (values * MASK).sum() / MASK.sum()


def openrlhf_whiten(values):
    """Also NeMo RL's: by the population's variance."""
    mean = masked_mean(values)
    return (values - mean) * masked_mean((values - mean) ** 2).clamp(min=1e-8).rsqrt() * MASK


def verl_whiten(values):
    """By the sample's variance."""
    mean, count = masked_mean(values), MASK.sum()
    variance = masked_mean((values - mean) ** 2) * count / (count - 1)
    return (values - mean) * torch.rsqrt(variance + 1e-8) * MASK


@pytest.mark.parametrize("kind", ["reinforce_pp", "reinforce_pp_baseline"])
def test_whitening_over_tokens_is_that_of_peers(tiny, kind) -> None:
    made = batch(tiny({"rollout.group_size": 3, "advantage.kind": kind, "advantage.whiten": "token"}))
    scores = SCORES.view(3, 3)
    if kind == "reinforce_pp_baseline":
        scores = scores - scores.mean(1, keepdim=True)
    values = scores.reshape(-1, 1) * MASK
    torch.testing.assert_close(of_tokens(made), openrlhf_whiten(values), rtol=1e-9, atol=1e-12)
    count = MASK.sum()
    scaled = verl_whiten(values) * (count / (count - 1)).sqrt()  # all that is different: n in place of n - 1
    torch.testing.assert_close(of_tokens(made), scaled, rtol=1e-6, atol=1e-9)
    assert masked_mean(of_tokens(made)).abs() < 1e-12
    by_sequence = batch(tiny({"rollout.group_size": 3, "advantage.kind": kind}))
    assert (of_tokens(by_sequence) - of_tokens(made)).abs().max() > 0.01


def test_the_baseline_variant_by_sequence() -> None:
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    centred = rewards - rewards.mean(1, keepdim=True)
    found = compute_advantages(rewards, "reinforce_pp_baseline")
    torch.testing.assert_close(found, centred / (centred.std(correction=0) + 1e-6))
    assert found[1].tolist() == [0.0] * 3  # exactly: the rounding of a mean is no signal
    assert compute_advantages(torch.full((2, 3), 0.1), "reinforce_pp_baseline").tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("kind", ["reinforce_pp", "reinforce_pp_baseline"])
def test_equal_rewards_are_no_signal_whatever_the_lengths(kind) -> None:
    tokens = torch.tensor([[1, 5, 3], [2, 2, 7]])
    assert compute_advantages(torch.full((2, 3), 0.3), kind, tokens).tolist() == [[0.0] * 3] * 2
    assert compute_advantages(torch.tensor([[0.0, 1.0]]), kind, torch.zeros(1, 2)).tolist() == [[0.0, 0.0]]


def test_whitening_counts_only_tokens_that_carry_loss(tiny) -> None:
    changes = {"rollout.group_size": 3, "advantage.kind": "reinforce_pp", "advantage.whiten": "token"}
    masked = batch(tiny({**changes, "loss.mask_overlong": True}), finish="length")
    assert masked.data == []
    assert {sample.advantage for sample in masked.samples} == {0.0}


@pytest.mark.parametrize("penalty", [1.0, 0.5])
def test_overlong_completions_lose_reward_as_in_dapo(tiny, penalty) -> None:
    """DAPO: 0 up to L_max - L_cache, then ((L_max - L_cache) - |y|) / L_cache, and -1 at L_max."""
    buffer = {"length": 4, "penalty": penalty}
    config = tiny({"rollout.group_size": 3, "rollout.max_new_tokens": 6, "advantage.kind": "group_mean"})
    shaped = tiny(
        {
            "rollout.group_size": 3,
            "rollout.max_new_tokens": 6,
            "advantage.kind": "group_mean",
            "advantage.overlong_buffer": buffer,
        }
    )

    def dapo(length: int) -> float:
        return 0.0 if length <= 6 - 4 else ((6 - 4) - length) / 4 if length <= 6 else -1.0

    wanted = SCORES.view(3, 3) + penalty * torch.tensor([[dapo(n) for n in row] for row in LENGTHS])
    made = batch(shaped)
    assert made.rewards == pytest.approx(wanted.flatten().tolist())
    found = [sample.advantage for sample in made.samples]
    assert found == pytest.approx((wanted - wanted.mean(1, keepdim=True)).flatten().tolist())
    verl = [min(-(n - (6 - 4)) / 4 * penalty, 0) for row in LENGTHS for n in row]
    figures = made.metrics(1.0)
    assert figures["overlong_penalty"] == pytest.approx(-sum(verl) / len(verl))
    assert figures["reward"] == batch(config).metrics(1.0)["reward"]  # as the task gave it
    assert "overlong_penalty" not in batch(config).metrics(1.0)


def logprobs(made) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives the data old and reference log-probs; returns them padded."""
    generator = torch.Generator().manual_seed(11)
    old, reference = (-1 + 0.5 * torch.randn(MASK.shape, generator=generator) for _ in range(2))
    for row, datum in enumerate(made.data):
        datum.values["old_logprobs"] = old[row, : len(datum.targets)]
        datum.values["reference_logprobs"] = reference[row, : len(datum.targets)]
    return old.double(), reference.double()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("kind", ["group_std", "group_mean", "rloo", "reinforce_pp_baseline"])
def test_kl_in_the_reward_is_that_of_verl(tiny, kind, estimator) -> None:
    """verl: a token's reward is -beta KL_t, the last one's also the score; their sum is what groups compare."""
    kl = {"coefficient": 0.3, "estimator": estimator, "in_reward": True}
    config = tiny({"rollout.group_size": 3, "advantage.kind": kind, "loss.kl": kl})
    made = batch(config)
    assert len(made.data) == 9  # the group of equal rewards as well
    old, reference = logprobs(made)
    found = penalise_rewards(config, made)
    d = old - reference
    estimates = {"k1": d, "k2": d * d / 2, "k3": torch.exp(-d) + d - 1}[estimator]
    totals = (SCORES - 0.3 * (estimates * MASK).sum(-1)).view(3, 3)
    centred = totals - totals.mean(1, keepdim=True)
    wanted = {
        "group_std": centred / (totals.std(1, keepdim=True) + 1e-6),
        "group_mean": centred,
        "rloo": centred * 3 / 2,
        "reinforce_pp_baseline": centred / (centred.std(correction=0) + 1e-6),
    }[kind]
    torch.testing.assert_close(of_tokens(found), wanted.reshape(-1, 1) * MASK)
    assert [sample.advantage for sample in found.samples] == pytest.approx(wanted.flatten().tolist())


def test_kl_in_the_reward_of_reinforce_pp_is_from_each_token_on(tiny) -> None:
    """The paper and verl: A_t = r - beta sum_{i >= t} KL_i, whitened over all tokens."""
    changes = {
        "rollout.group_size": 3,
        "advantage.kind": "reinforce_pp",
        "advantage.whiten": "token",
        "loss.kl": {"coefficient": 0.3, "estimator": "k1", "in_reward": True},
    }
    config = tiny(changes)
    made = batch(config)
    old, reference = logprobs(made)
    returns, running = torch.zeros_like(MASK), torch.zeros(9, dtype=torch.float64)
    for t in reversed(range(6)):
        ends = torch.tensor([float(t == length - 1) for row in LENGTHS for length in row])
        running = (SCORES * ends - 0.3 * (old - reference)[:, t] * MASK[:, t]) + running
        returns[:, t] = running
    torch.testing.assert_close(of_tokens(penalise_rewards(config, made)), openrlhf_whiten(returns))


def test_kl_in_the_reward_is_not_in_the_loss_as_well(tiny) -> None:
    from ebbtide.policy.losses import LossInputs, build_loss

    def loss(**kl):
        logprobs = torch.full((4,), -1.0, requires_grad=True)
        values = {
            "advantages": torch.ones(4),
            "weights": torch.full((4,), 0.25),
            "reference_logprobs": torch.full((4,), -2.0),
        }
        config = tiny({"loss.kl": {"coefficient": 0.5, **kl}} if kl else {}).loss
        inputs = LossInputs(logprobs, torch.zeros(4), values, torch.zeros(4, dtype=torch.long), 1, [None])
        return build_loss(config)(inputs)

    (value, figures), (plain, _), (added, _) = loss(in_reward=True), loss(), loss(in_reward=False)
    assert value == plain != added
    assert figures["kl"] > 0


@pytest.mark.parametrize(
    ("changes", "trained"),
    [
        ({}, 6),
        ({"loss.kl": {}}, 9),
        ({"loss.entropy": 0.01}, 9),
        ({"loss.kl": {}, "advantage.drop_zero_std_groups": True}, 6),
        ({"advantage.drop_zero_std_groups": False}, 9),
    ],
)
def test_a_kl_penalty_and_an_entropy_bonus_cover_all_samples(tiny, changes, trained) -> None:
    made = batch(tiny({"rollout.group_size": 3, **changes}))
    assert len(made.data) == trained
    assert made.metrics(1.0)["samples_trained"] == trained
    assert made.zero_std_groups == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"advantage.whiten": "token"}, "`group_std` does not whiten"),
        ({"advantage.overlong_buffer": {"length": 7}}, "exceeds `rollout.max_new_tokens: 6`"),
        ({"loss.kl": {"in_reward": True}, "loss.mask_overlong": True}, "needs the log-probs of all of them"),
        ({"loss.kl": {"in_reward": True}, "advantage.drop_zero_std_groups": True}, "makes unequal"),
        ({"loss.kl": {"in_reward": True, "importance_ratio": "old"}}, "`loss.kl.importance_ratio: old` is for"),
        (
            {"loss.kl": {"in_reward": True}, "task.environment": {"object": "x:y"}},
            "`loss.kl.in_reward` and `task.environment` cannot be combined yet",
        ),
        (
            {
                "advantage.turns": "to_go",
                "advantage.kind": "reinforce_pp_baseline",
                "task.environment": {"object": "x:y"},
            },
            "`advantage.turns: to_go` and `advantage.kind: reinforce_pp_baseline`",
        ),
    ],
)
def test_what_does_not_apply_is_refused(tiny, changes, said) -> None:
    with pytest.raises(ValueError, match=said):
        tiny({"rollout.max_new_tokens": 6, **changes})
