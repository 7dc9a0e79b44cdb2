"""The whole train step against the losses written down again: one padded sequence at a time, full logits, plain
autograd.

The reference below shares no code with the product. It would catch a wrong mask, a wrong normaliser, a leaked prompt
token, a sequence cut by a micro-batch, and a metric that is not what its name says.
"""

import math
import re
from dataclasses import replace

import pytest
import torch

from ebbtide.config.loss import ImportanceSamplingConfig
from ebbtide.model.load import load_model
from ebbtide.parallel.comm import Comm
from ebbtide.policy import policy as policy_module
from ebbtide.policy.datum import Datum, idle_datum, trajectory
from ebbtide.policy.losses import build_loss
from ebbtide.policy.losses.importance_sampling import importance_weights
from ebbtide.policy.losses.normalise import token_weights
from ebbtide.policy.policy import Policy
from ebbtide.progress import no_progress

CASES = {
    "grpo, against the sampler": {"loss.old_logprobs": "rollout"},
    "grpo": {},
    "grpo, asymmetric": {"loss.clip_low": 0.1, "loss.clip_high": 0.3},
    "grpo, by sequence": {"loss.normalise": "sequence"},
    "grpo, constant": {"loss.normalise": "constant"},
    "gspo": {"loss.kind": "gspo", "loss.clip_low": 0.05, "loss.clip_high": 0.1},
    "cispo": {"loss.kind": "cispo", "loss.clip_low": 0.3, "loss.clip_high": 0.1},
    "entropy": {"loss.entropy": 0.3},
    "k1": {"loss.kl": {"coefficient": 0.5, "estimator": "k1"}},
    "k2": {"loss.kl": {"coefficient": 0.5, "estimator": "k2"}},
    "k3": {"loss.kl": {"coefficient": 0.5, "estimator": "k3"}},
    "correction": {"loss.importance_sampling": {"high": 1.05}},
    **{
        f"correction, {level}, {mode}": {"loss.importance_sampling": {"level": level, "mode": mode, "high": 1.2, **low}}
        for level in ("token", "sequence", "geometric")
        for mode, low in (("truncate", {}), ("clip", {"low": 0.97}), ("mask", {"low": 0.97}))
    },
    "correction, a band by its upper bound": {"loss.importance_sampling": {"mode": "mask", "high": 1.5}},
    "temperature": {"rollout.temperature": 0.7},
    "all": {
        "loss.normalise": "sequence",
        "loss.entropy": 0.1,
        "loss.kl": {"coefficient": 0.2, "estimator": "k3"},
        "loss.importance_sampling": {"high": 1.1},
        "rollout.temperature": 1.3,
    },
}


def rollouts(vocabulary: int, noise: float = 0.3) -> list[Datum]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for prompt, completion, advantage in [(3, 5, 1.0), (1, 1, -0.5), (6, 6, 0.7), (2, 4, -1.2), (4, 2, 0.0)]:
        item = trajectory(
            torch.randint(vocabulary, (prompt,), generator=generator).tolist(),
            torch.randint(vocabulary, (completion,), generator=generator).tolist(),
            (-2.4 + noise * torch.randn(completion, generator=generator)).tolist(),
            advantage,
        )
        item.values["old_logprobs"] = -2.4 + noise * torch.randn(completion, generator=generator)
        item.values["reference_logprobs"] = -2.4 + noise * torch.randn(completion, generator=generator)
        made.append(item)
    return made


def weigh(items: list[Datum], config) -> None:
    """As a step does it, before anything is packed."""
    lengths = [len(item.targets) for item in items]
    weights = token_weights(lengths, config.loss.normalisation, config.rollout.max_new_tokens)
    for item, weight in zip(items, weights, strict=True):
        item.values["weights"] = weight


def importance_weight(config, item: Datum, old: list[torch.Tensor], t: int) -> float:
    logs = [before.item() - sampled for before, sampled in zip(old, item.values["rollout_logprobs"], strict=True)]
    ratio = math.exp(
        {"token": logs[t], "sequence": sum(logs), "geometric": sum(logs) / len(logs)}[config.level or "token"]
    )
    low = config.low or 1 / config.high
    if config.mode == "mask":
        return ratio if low <= ratio <= config.high else 0.0
    return min(ratio if config.mode == "truncate" else max(ratio, low), config.high)


def reference_loss(model, config, items: list[Datum], on_policy: bool) -> torch.Tensor:
    loss_config, total = config.loss, torch.zeros(())
    kind = loss_config.kind
    low, high = loss_config.clip_low or 0.2, loss_config.clip_high or 0.2
    all_tokens = sum(len(item.targets) for item in items)
    for item in items:
        ids = torch.tensor([item.tokens])
        logits = model(ids, use_cache=False).logits[0].float() / config.rollout.temperature
        per_token = []
        steps = []
        for target in item.targets:
            row = torch.log_softmax(logits[target - 1], 0)
            steps.append((row[item.tokens[target]], -(row.exp() * row).sum()))
        old = [step[0].detach() for step in steps] if on_policy else list(item.values["old_logprobs"])
        if loss_config.old_logprobs == "rollout":
            old = [torch.tensor(logprob) for logprob in item.values["rollout_logprobs"]]
        sequence_ratio = torch.exp(sum(step[0] - before for step, before in zip(steps, old, strict=True)) / len(steps))
        for t, (logprob, entropy) in enumerate(steps):
            ratio = sequence_ratio if kind == "gspo" else torch.exp(logprob - old[t])
            advantage = item.values["advantages"]
            if kind == "cispo":
                value = -min(max(ratio.item(), 1 - low), 1 + high) * advantage * logprob
            else:
                value = -torch.min(ratio * advantage, torch.clamp(ratio, 1 - low, 1 + high) * advantage)
            if loss_config.importance_sampling is not None:
                value = value * importance_weight(loss_config.importance_sampling, item, old, t)
            value = value - loss_config.entropy * entropy
            if loss_config.kl is not None:
                d = logprob - item.values["reference_logprobs"][t]
                estimates = {"k1": d, "k2": d * d / 2, "k3": torch.exp(-d) - 1 + d}
                value = value + loss_config.kl.coefficient * estimates[loss_config.kl.estimator]
            per_token.append(value)
        how = "sequence" if kind == "gspo" else loss_config.normalise or "token"
        if how == "sequence":
            total = total + sum(per_token) / len(per_token) / len(items)
        elif how == "token":
            total = total + sum(per_token) / all_tokens
        else:
            total = total + sum(per_token) / config.rollout.max_new_tokens / len(items)
    return total


@pytest.fixture(scope="module")
def spread_model():
    """A tiny model whose distributions are not flat, and a copy of it for the reference."""
    from conftest import TINY
    from ebbtide.config.algorithms.grpo import GrpoConfig

    loaded = load_model(GrpoConfig.model_validate(TINY))
    torch.manual_seed(5)
    for parameter in loaded.model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return loaded


@pytest.mark.parametrize("budget", [64, 16], ids=["one micro-batch", "several"])
@pytest.mark.parametrize("on_policy", [True, False], ids=["on policy", "off policy"])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_equal_the_formula(tiny, spread_model, case, on_policy, budget) -> None:
    config = tiny({**CASES[case], "train.microbatch_tokens": budget})
    policy = Policy(spread_model, config)
    items = rollouts(len(spread_model.tokenizer))
    wanted = reference_loss(spread_model.model, config, items, on_policy)
    wanted.backward()
    wanted_grads = {name: parameter.grad.clone() for name, parameter in policy.model.named_parameters()}
    policy.model.zero_grad()
    weigh(items, config)
    if on_policy:
        for item in items:
            del item.values["old_logprobs"]
    if config.loss.kl is None:
        for item in items:
            del item.values["reference_logprobs"]
    figures = policy.forward_backward(items, build_loss(policy.config.loss), no_progress)
    assert figures["loss"] == pytest.approx(wanted.item(), abs=2e-6)
    for name, parameter in policy.model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, wanted_grads[name], rtol=1e-3, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
    policy.model.zero_grad()


def test_cases_are_clipped_and_differ(tiny, spread_model) -> None:
    """The cases above would prove little if nothing were ever clipped, or two of them were the same loss."""
    values = {}
    for case, changes in CASES.items():
        config = tiny(changes)
        items = rollouts(len(spread_model.tokenizer))
        weigh(items, config)
        if config.loss.kl is None:
            for item in items:
                del item.values["reference_logprobs"]
        figures = Policy(spread_model, config).forward_backward(items, build_loss(config.loss), no_progress)
        assert figures["clip_fraction"] > 0
        values[case] = round(figures["loss"], 7)
    spread_model.model.zero_grad()
    assert len(set(values.values())) == len(values), values


def test_prompt_tokens_do_not_count(tiny, spread_model) -> None:
    """Log-probs are asked for completion tokens alone: the micro-batch predicts exactly those."""
    items = rollouts(len(spread_model.tokenizer))
    policy = Policy(spread_model, tiny())
    policy.compute_logprobs("old_logprobs", items, lambda done, of: None)
    assert [len(item.values["old_logprobs"]) for item in items] == [len(item.targets) for item in items]


def test_figures_are_means_over_completion_tokens(tiny, spread_model) -> None:
    items = rollouts(len(spread_model.tokenizer))
    policy = Policy(spread_model, tiny({"train.microbatch_tokens": 16}))
    policy.compute_logprobs("old_logprobs", items, lambda done, of: None)
    figures = policy.forward_backward(items, build_loss(policy.config.loss), no_progress)
    spread_model.model.zero_grad()
    differences = [
        ours.item() - theirs
        for item in items
        for ours, theirs in zip(item.values["old_logprobs"], item.values["rollout_logprobs"], strict=True)
    ]
    assert figures["mismatch"] == pytest.approx(sum(map(abs, differences)) / len(differences), rel=1e-5)
    assert figures["mismatch_max"] == pytest.approx(max(map(abs, differences)), rel=1e-5)
    kl = sum(math.exp(d) - 1 - d for d in differences) / len(differences)
    assert figures["mismatch_kl"] == pytest.approx(kl, rel=1e-4)
    assert 0 < figures["entropy"] < math.log(len(spread_model.tokenizer))


class WithAnIdleRound(Comm):
    def max_rounds(self, mine: int) -> int:
        return mine + 1


def test_a_micro_batch_without_work_adds_nothing_even_where_its_kl_overflows(tiny, spread_model, monkeypatch) -> None:
    # as far above the policy's as makes exp() infinite
    def unlikely(like: Datum) -> Datum:
        idle = idle_datum(like)
        return replace(idle, values={**idle.values, "reference_logprobs": torch.full((1,), 100.0)})

    monkeypatch.setattr(policy_module, "idle_datum", unlikely)
    config = tiny({"loss.kl": {"coefficient": 0.5, "estimator": "k3"}})
    found = []
    for ranks in (Comm(), WithAnIdleRound()):
        items = rollouts(len(spread_model.tokenizer))
        weigh(items, config)
        figures = Policy(spread_model, config, ranks).forward_backward(items, build_loss(config.loss), no_progress)
        found.append(
            (figures, {name: parameter.grad.clone() for name, parameter in spread_model.model.named_parameters()})
        )
        spread_model.model.zero_grad()
    (alone, wanted), (idle, gradients) = found
    assert idle == alone
    assert all(torch.equal(gradient, wanted[name]) for name, gradient in gradients.items())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"low": 0.5}, "`mode: truncate` has no lower bound"),
        ({"mode": "clip", "low": 3.0}, "`loss.importance_sampling.low: 3` is above `high: 2`"),
        ({"mode": "mask", "high": 0.5}, "`loss.importance_sampling.low: 2` is above `high: 0.5`"),
    ],
)
def test_a_band_without_ratios_is_refused(settings, said) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        ImportanceSamplingConfig(**settings)


def test_ratios_outside_the_band_are_counted_and_finite() -> None:
    old, rollout = torch.tensor([0.0, 0.0, -300.0, 0.0]), torch.tensor([0.0, -300.0, 0.0, -0.1])
    sequence = torch.tensor([0, 0, 1, 1])
    weights, outside = importance_weights(old, rollout, sequence, 2, ImportanceSamplingConfig(mode="mask"))
    assert outside.tolist() == [False, True, True, False]
    assert weights.tolist() == pytest.approx([1.0, 0.0, 0.0, math.exp(0.1)])
    config = ImportanceSamplingConfig(level="sequence", mode="clip")
    weights, outside = importance_weights(old, rollout, sequence, 2, config)
    assert weights.tolist() == [2.0, 2.0, 0.5, 0.5]
    assert outside.all()
