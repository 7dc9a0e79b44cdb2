"""What the settings of all tools come down to: rewards, advantages and the loss. A value that has no counterpart is
left to the table of its tool."""

from __future__ import annotations

from ebbtide.importing.answers import Answers


def take_dual_clip(answers: Answers, key: str) -> None:
    """The upper bound of the ratio where the advantage is negative."""
    value = answers.source.number(key, 0.0)
    kind = answers.taken.get("loss.kind")
    if value > 1 and (kind is None or kind.value != "cispo"):
        answers.take("loss.clip_ratio_c", value, key)


def take_kl_in_reward(answers: Answers, switch: str, coefficient: str, estimator: str, kind: str) -> None:
    """A KL penalty that is subtracted from rewards."""
    weight = answers.source.number(coefficient, 0.0)
    if weight > 0:
        answers.take("loss.kl.coefficient", weight, switch, coefficient)
        answers.take("loss.kl.estimator", kind, estimator)
        answers.take("loss.kl.in_reward", True, switch)


def take_kl_ratio(answers: Answers, ratio: str | None, key: str) -> None:
    """What the estimate of the KL in the loss is multiplied by."""
    if "loss.kl.coefficient" in answers.taken and ratio is not None:
        answers.take("loss.kl.importance_ratio", ratio, key)


def take_dynamic_sampling(answers: Answers, switch: str, batches: str) -> None:
    """Groups of equal rewards are replaced by others."""
    ours = "advantage.dynamic_sampling.max_num_gen_batches"
    if answers.source.get(switch) is True:
        most = answers.source.count(batches, 10)
        answers.take(ours, max(2, most) if most > 0 else 10, switch, batches)


def take_overlong_buffer(answers: Answers, switch: str, length: str, penalty: str) -> None:
    """Completions that are almost too long lose reward."""
    ours = "advantage.overlong_buffer"
    if answers.source.get(switch) is True:
        answers.take(f"{ours}.length", answers.source.size(length, 128), switch, length)
        answers.take(f"{ours}.penalty", answers.source.number(penalty, 1.0) or 1.0, penalty)


def take_whitening(answers: Answers, kind: str) -> None:
    """REINFORCE++ is whitened over tokens in all tools."""
    if kind.startswith("reinforce_pp"):
        answers.take("advantage.whiten", "token", how=f"as {answers.table.name} has it")
