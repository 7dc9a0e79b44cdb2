"""TRL: reward functions and reward models, with their weights."""

from __future__ import annotations

from math import isfinite

from ebbtide.importing.answers import Answers
from ebbtide.importing.problems import take_reward_function
from ebbtide.importing.rewards import Reward, function_reward, model_reward, take_rewards, weighed

FUNCTIONS, MODEL, WEIGHTS = "reward_funcs", "reward_model_name_or_path", "reward_weights"
ACCURACY = "accuracy_reward"
OVERLONG = "get_soft_overlong_punishment"
ALL_COLUMNS = "functions are given all columns"


def take_scorers(answers: Answers) -> None:
    """What scores completions. One function stays `task.python`, or the scorer that it is here."""
    source = answers.source
    rewards: list[Reward | None] = []  # in TRL's order, which its weights have too
    if source.keys.get(MODEL) is not None and source.keys[MODEL].value not in (None, ""):
        rewards.append(model_reward(source.keys[MODEL].value, MODEL))
    found = source.keys.get(FUNCTIONS)
    if found is not None and not found.is_read:
        answers.lack(
            FUNCTIONS,
            "`task.python.object: module:name`, for a function of a module or of a script's top level; several are"
            " `task.rewards`",
        )
    elif found is not None and found.value not in (None, []):
        names = found.value if isinstance(found.value, list) else str(found.value).split()
        rewards += [_reward(answers, str(name)) for name in names]
    weights = _weights(answers, len(rewards))
    taken = weighed(
        [one for one in rewards if one is not None],
        [weight for one, weight in zip(rewards, weights, strict=True) if one is not None],
        *([WEIGHTS] if weights and WEIGHTS in source.keys and WEIGHTS not in answers.none else []),
    )
    if taken:
        _take(answers, taken)


def _take(answers: Answers, rewards: list[Reward]) -> None:
    first = rewards[0]
    is_alone = len(rewards) == 1 and first.weight == 1
    if is_alone and "python.object" in first.settings:
        take_reward_function(answers, first.settings["python.object"], FUNCTIONS, how=first.how)
    elif is_alone and "scorer" in first.settings:
        answers.take("task.file.scorer", first.settings["scorer"], FUNCTIONS, how=first.how)
    else:
        take_rewards(answers, rewards)
    if is_alone:
        answers.drop("one reward, of weight 1", WEIGHTS)
    if any("scorer" in one.settings for one in rewards):
        answers.take("task.file.answer_field", "solution", FUNCTIONS, how=f"the column that {ACCURACY} reads")
    elif any("python.object" in one.settings for one in rewards):
        answers.take("task.file.answer_field", None, FUNCTIONS, how=ALL_COLUMNS)


def _reward(answers: Answers, name: str) -> Reward | None:
    """One of `reward_funcs`; None for what is no reward here."""
    last = name.rpartition(":")[2].rpartition(".")[2]
    if "/" in name and not name.partition(":")[0].endswith(".py"):
        return model_reward(name, FUNCTIONS)
    if last == ACCURACY:
        return Reward(ACCURACY, {"scorer": "math_verify"}, (FUNCTIONS,), ACCURACY)
    if last == OVERLONG:
        answers.lack(
            FUNCTIONS,
            f"`advantage.overlong_buffer` for {OVERLONG}, with `length: 256` and its weight as `penalty`, where"
            " `rollout.max_new_tokens` is 1280, as it is there",
        )
        return None
    return function_reward(_target(name), FUNCTIONS, how=answers.source.advice.get(name, ""))


def _target(name: str) -> str:
    """`module:name` of a reward function: one of TRL's own by its name alone, or a dotted path."""
    if ":" in name:
        return name
    module, _, last = name.rpartition(".")
    return f"{module or 'trl.rewards'}:{last}"


def _weights(answers: Answers, many: int) -> list[float]:
    """The weights of so many rewards; 1 of each where they are not set, or do not belong to these rewards."""
    source = answers.source
    given = source.get(WEIGHTS)
    texts = given if isinstance(given, list) else [] if given is None else str(given).split()
    try:
        weights = [float(one) for one in texts]
    except (TypeError, ValueError):
        weights = []
    if len(weights) == many and all(map(isfinite, weights)):
        return weights
    if WEIGHTS in source.keys and source.keys[WEIGHTS].value is not None:
        answers.lack(WEIGHTS, f"`weight` of each of `task.rewards`: these are not the weights of {many} rewards")
    return [1.0] * many
