"""verl: the problems of a run, and what scores completions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ebbtide.importing.answers import TODO, Answers, MixPart
from ebbtide.importing.common import take_evaluation
from ebbtide.importing.problems import local_file, mix_names, take_file, take_mix, take_reward_function
from ebbtide.importing.rewards import Reward, function_reward, model_reward, take_rewards
from ebbtide.importing.source import Found, Source

ROLLOUT = "actor_rollout_ref.rollout"
COLUMNS = "with the fields that `prompt_field` and `answer_field` name"
FUNCTIONS = ("custom_reward_function", "reward.custom_reward_function")
MODELS = {"reward_model": "model.path", "reward.reward_model": "model_path"}  # section -> the key of its path
MODEL_PARTS = ("model", "rollout")  # sections of a reward model, where settings of others stand beside them


def take_problems(answers: Answers) -> None:
    source = answers.source
    train, held_out = (files_of(source.keys.get(f"data.{name}_files")) for name in ("train", "val"))
    if isinstance(train, list) and len(train) > 1:
        _several(answers, train, held_out)
    else:
        take_file(answers, train, "data.train_files", "task.file.train", COLUMNS)
        if source.keys.get("data.val_files") is not None:
            take_file(answers, held_out, "data.val_files", "task.file.held_out", COLUMNS)
    drops = source.get("data.filter_overlong_prompts") is True or source.get("data.truncation") in ("left", "right")
    keys = ["data.filter_overlong_prompts", "data.truncation"]
    answers.take("task.overlong_prompts", "drop" if drops else "error", *keys)
    if source.get("data.truncation") in ("left", "right", "middle") and source.get(keys[0]) is not True:
        answers.lack("data.truncation", "`task.overlong_prompts: drop`: no prompt is cut")
    _scorers(answers)
    take_evaluation(answers, source.count("trainer.test_freq", -1), "trainer.test_freq", None, "data.val_batch_size")
    samples = source.count(f"{ROLLOUT}.val_kwargs.n", 1)
    if "evaluate.every" in answers.taken and samples > 1:
        answers.take("evaluate.samples", samples, f"{ROLLOUT}.val_kwargs.n")
        answers.take("evaluate.k", [1, samples], f"{ROLLOUT}.val_kwargs.n")
        temperature = source.number(f"{ROLLOUT}.val_kwargs.temperature", 1.0) or 1.0
        answers.take("evaluate.temperature", temperature, f"{ROLLOUT}.val_kwargs.temperature")
    elif "evaluate.every" not in answers.taken:
        answers.drop("`evaluate` is not set", *source.under(f"{ROLLOUT}.val_kwargs"))


def _scorer(names: str) -> str:
    return "gsm8k" if "gsm8k" in names and "math" not in names.replace("gsm8k", "") else "math_verify"


def _several(answers: Answers, train: list[Any], held_out: Any) -> None:
    """Several files are a mix of tasks, each with the file of held-out problems that has its name."""
    theirs = held_out if isinstance(held_out, list) else [held_out] if "data.val_files" in answers.source.keys else []
    names, others = mix_names([str(one) for one in train]), mix_names([str(one) for one in theirs])
    parts, key, is_scored_alike = [], "data.train_files", bool(_functions(answers.source) or _models(answers.source))
    for name, file in zip(names, train, strict=True):
        files = {"train": local_file(file, COLUMNS)}
        if name in others:
            files["held_out"] = local_file(theirs[others.index(name)], COLUMNS)
        parts.append(MixPart(name, key, files, None if is_scored_alike else _scorer(str(file).lower())))
    answers.take("task.file.train", parts[0].files["train"][0], key, how=parts[0].files["train"][1])
    take_mix(answers, parts)
    if left := [str(file) for name, file in zip(others, theirs, strict=True) if name not in names]:
        nearest = f"`task.mix.{names[0]}.file.held_out`, for one task: {', '.join(left)} belongs to none by its name"
        answers.lack("data.val_files", nearest)
    else:
        answers.drop("the tasks of `task.mix` have their files", "data.val_files")


def _scorers(answers: Answers) -> None:
    """What scores completions: a reward function, a reward model or both, or else a rule."""
    source = answers.source
    functions, models = _functions(source), _models(source)
    if "reward_model" not in models:
        off = [key for part in MODEL_PARTS for key in source.under(f"reward_model.{part}")]
        answers.drop("there is no reward model (`reward_model.enable`)", *off)
    if models:
        rewards = [*(_function(answers, part) for part in functions), _model(answers, models[0])]
        there = _both(source, models[0])
        take_rewards(answers, [replace(one, weight_how=f"{TODO} set it: {there}") for one in rewards])
        if functions:
            answers.lack(f"{models[0]}.enable", f"`task.rewards` adds both up: {there}. Set the `weight` of each")
    elif functions:
        reward = _function(answers, functions[0])
        take_reward_function(answers, reward.settings["python.object"], *reward.theirs, how=reward.how)
        if options := reward.settings.get("python.options"):
            answers.take("task.python.options", options, *source.under(f"{functions[0]}.reward_kwargs"))
    else:
        names = " ".join(str(source.get(key, "")) for key in ("data.train_files", "data.val_files")).lower()
        how = "by the names of the files: verl scores by each row's `data_source`"
        answers.take("task.file.scorer", _scorer(names), "data.train_files", how=how)


def _functions(source: Source) -> list[str]:
    """The section of the reward function, if there is one."""
    named = [part for part in FUNCTIONS if f"{part}.path" in source.keys]
    return [part for part in named if source.keys[f"{part}.path"].value not in (None, "")][-1:]


def _models(source: Source) -> list[str]:
    """The section of the reward model, if there is one."""
    return [part for part in MODELS if source.get(f"{part}.enable") is True][-1:]


def _function(answers: Answers, part: str) -> Reward:
    """verl's reward function of a file, with its arguments."""
    source, name = answers.source, str(answers.source.get(f"{part}.name", "compute_score"))
    path = str(source.keys[f"{part}.path"].value)
    how = f"{TODO} name the file" if "$" in path else ""
    keys = source.under(f"{part}.reward_kwargs")
    options = {key.removeprefix(f"{part}.reward_kwargs."): source.get(key) for key in keys}
    return function_reward(f"{path}:{name}", f"{part}.path", f"{part}.name", how=how, options=options)


def _model(answers: Answers, part: str) -> Reward:
    """verl's reward model. Its path has a default there, which is a folder of verl's authors."""
    key = f"{part}.{MODELS[part]}"
    found = answers.source.keys.get(key)
    path = "" if found is None or found.value is None else found.value
    how = f"{TODO} name a folder or a hub id" if not path or "$" in str(path) else ""
    return model_reward(path or "reward_model", f"{part}.enable", key, how=how)


def _both(source: Source, part: str) -> str:
    """What verl does with a reward model beside a reward function, in place of a sum."""
    if source.get(f"{part}.use_reward_loop", True) is False:
        return "there the model's score is the reward, and the function is not called"
    return "there the function's score is the reward, and it may ask the model (`reward_router_address`)"


def files_of(found: Found | None) -> Any:
    """The files of a key: one, a list of them, or a text with unread parts."""
    if found is None:
        return "train.parquet"
    if isinstance(found.value, list):
        return found.value
    text = str(found.value).strip("[]'\" ")
    parts = [part.strip(" '\"") for part in text.split(",")]
    return parts if len(parts) > 1 else parts[0]
