"""Settings whose counterparts Ebbtide gets with other work: each is taken where Ebbtide has the key, and is otherwise
left to the section `soon` of the table of its tool, which says that there is none."""

from __future__ import annotations

from ebbtide.importing.answers import Answers


def take_dual_clip(answers: Answers, key: str) -> None:
    """The upper bound of the ratio where the advantage is negative."""
    value = answers.source.number(key, 0.0)
    kind = answers.taken.get("loss.kind")
    if answers.knows("loss.clip_ratio_c") and value > 1 and (kind is None or kind.value != "cispo"):
        answers.take("loss.clip_ratio_c", value, key)


def take_kl_in_reward(answers: Answers, switch: str, coefficient: str, estimator: str, kind: str) -> None:
    """A KL penalty that is subtracted from rewards."""
    weight = answers.source.number(coefficient, 0.0)
    if answers.knows("loss.kl.in_reward") and weight > 0:
        answers.take("loss.kl.coefficient", weight, switch, coefficient)
        answers.take("loss.kl.estimator", kind, estimator)
        answers.take("loss.kl.in_reward", True, switch)


def take_kl_ratio(answers: Answers, ratio: str | None, key: str) -> None:
    """What the estimate of the KL in the loss is multiplied by."""
    if answers.knows("loss.kl.importance_ratio") and "loss.kl.coefficient" in answers.taken and ratio is not None:
        answers.take("loss.kl.importance_ratio", ratio, key)


def take_dynamic_sampling(answers: Answers, switch: str, batches: str) -> None:
    """Groups of equal rewards are replaced by others."""
    ours = "advantage.dynamic_sampling.max_num_gen_batches"
    if answers.knows(ours) and answers.source.get(switch) is True:
        most = answers.source.count(batches, 10)
        answers.take(ours, max(2, most) if most > 0 else 10, switch, batches)


def take_overlong_buffer(answers: Answers, switch: str, length: str, penalty: str) -> None:
    """Completions that are almost too long lose reward."""
    ours = "advantage.overlong_buffer"
    if answers.knows(f"{ours}.length") and answers.source.get(switch) is True:
        answers.take(f"{ours}.length", answers.source.size(length, 128), switch, length)
        answers.take(f"{ours}.penalty", answers.source.number(penalty, 1.0) or 1.0, penalty)


def reinforce_kind(answers: Answers, *, by_group: bool) -> str:
    """REINFORCE++, whitened over tokens; `by_group`: with the group's mean as the baseline."""
    if not answers.knows("advantage.whiten"):
        return "reinforce_pp"
    answers.take("advantage.whiten", "token", how=f"as {answers.table.name} has it")
    return "reinforce_pp_baseline" if by_group else "reinforce_pp"


def take_template_arguments(answers: Answers, section: str) -> None:
    """Arguments of the chat template: a mapping, or the keys below it."""
    source, ours = answers.source, "model.chat_template_kwargs"
    whole, below = source.get(section), source.under(section)
    found = dict(whole) if isinstance(whole, dict) else {}
    found |= {key.removeprefix(f"{section}."): source.get(key) for key in below}
    if answers.knows(ours) and found:
        answers.take(ours, found, *(below or [section]))
