"""NeMo RL: the problems of a run, and what scores completions."""

from __future__ import annotations

from typing import Any

from ebbtide.importing.answers import OFF, TODO, Answers, MixPart
from ebbtide.importing.common import take_evaluation
from ebbtide.importing.problems import local_file, mix_names, take_file, take_mix
from ebbtide.importing.rewards import model_reward, take_rewards
from ebbtide.importing.source import Source

VALIDATION_SAMPLES = ("val_num_generations_per_prompt", "num_val_generations_per_prompt")
COLUMNS = "with fields `prompt` and `answer`"
REWARD_MODEL = "reward_model"  # the name of the environment that is one
JUDGING = ("judge", "genrm")  # in the names of servers that are language models
JUDGE = (
    "an entry of `task.rewards` with a `judge`: its `url`, its `model`, and the `prompt` that it is asked, which is in"
    " files of NeMo Gym"
)


def take_problems(answers: Answers, section: str) -> None:
    """The task: its file, its scorer, and its evaluation."""
    source = answers.source
    if isinstance(several := source.get("data.train"), list):
        _several(answers, [one for one in several if isinstance(one, dict)])
    else:
        path = "data.train.data_path" if source.get("data.train.data_path") else "data.train.dataset_name"
        take_file(answers, source.get(path, "train"), path, "task.file.train", COLUMNS)
    if source.get(validation := "data.validation.data_path"):
        take_file(answers, source.get(validation), validation, "task.file.held_out", "as above")
    _scorers(answers)
    take_evaluation(
        answers,
        source.count(f"{section}.val_period", 0),
        f"{section}.val_period",
        source.count(f"{section}.max_val_samples", 0) or None,
        f"{section}.max_val_samples",
    )
    samples = next((key for key in VALIDATION_SAMPLES if f"{section}.{key}" in source.keys), VALIDATION_SAMPLES[0])
    many = source.count(f"{section}.{samples}", 1)
    if many > 1 and "evaluate.every" in answers.taken:
        answers.take("evaluate.samples", many, f"{section}.{samples}")
        answers.take("evaluate.k", [1, many], f"{section}.{samples}")
        temperature = source.number("policy.generation.val_temperature", 1.0) or 1.0
        answers.take("evaluate.temperature", temperature, "policy.generation.val_temperature")


def _scorers(answers: Answers) -> None:
    """What scores completions: the environment that the data name, by its rule or by its reward model."""
    source = answers.source
    environments = [key.split(".")[1] for key in source.under("env") if key != "env.should_use_nemo_gym"]
    env_key = next((key for key in ("data.default.env_name", "data.train.env_name") if source.get(key)), "")
    used = source.get(env_key) or next(iter(environments), "math")
    for key in source.under("env"):
        if any(word in key for word in JUDGING) and source.keys[key].value not in OFF:
            answers.lack(key, JUDGE)
    is_scored = source.algorithm != "distill"
    if is_scored and _has_model(source, used):
        _take_model(answers, env_key if used == REWARD_MODEL else "")
        return
    scorer = _scorer(used)
    how = "" if scorer == "math_verify" else f"{TODO} `{used}` scored otherwise: `task.rewards` or `task.environment`"
    answers.take("task.file.scorer", scorer, *([env_key] if env_key else []), how=how)
    if scorer == "exact" and env_key and is_scored:
        nearest = "`task.rewards`: reward functions, judges and reward models; or `task.environment` for several turns"
        answers.lack(env_key, nearest)
    if scorer == "exact" and not is_scored:
        answers.drop("distillation needs no scores", env_key)


def _has_model(source: Source, used: Any) -> bool:
    """Whether a reward model scores the completions of a dataset."""
    several = source.get("data.train")
    datasets = [one for one in several if isinstance(one, dict)] if isinstance(several, list) else []
    named = source.keys.get(f"env.{REWARD_MODEL}.model_name")
    is_named = named is not None and named.value not in OFF
    return is_named and REWARD_MODEL in (used, *(one.get("env_name") for one in datasets))


def _take_model(answers: Answers, env_key: str) -> None:
    """The environment that is a reward model."""
    source, part = answers.source, f"env.{REWARD_MODEL}"
    keys = [f"{part}.model_name", *([env_key] if env_key else [])]
    path, dtype = source.keys[keys[0]].value, source.get(f"{part}.precision")
    if dtype in ("bfloat16", "float32"):
        take_rewards(answers, [model_reward(path, *keys, f"{part}.precision", dtype=dtype)])
    else:
        take_rewards(answers, [model_reward(path, *keys)])
    if source.get(f"{part}.tokenizer.name") in (path, None):
        answers.drop("it is the reward model's own tokenizer", f"{part}.tokenizer.name")


def _scorer(environment: Any) -> str:
    return "math_verify" if "math" in str(environment) or "dapo" in str(environment) else "exact"


def _several(answers: Answers, datasets: list[dict[str, Any]]) -> None:
    """Several datasets are a mix of tasks."""
    paths = [str(one.get("data_path") or one.get("dataset_name", "train")) for one in datasets] or ["train"]
    take_file(answers, paths[0], "data.train", "task.file.train", COLUMNS)
    if len(paths) > 1:
        default = answers.source.get("data.default.env_name")
        named = [one.get("env_name") or default for one in datasets]
        scorers = [None if name in (None, REWARD_MODEL) else _scorer(name) for name in named]
        parts = [
            MixPart(name, "data.train", {"train": local_file(path, COLUMNS)}, scorer)
            for name, path, scorer in zip(mix_names(paths), paths, scorers, strict=True)
        ]
        take_mix(answers, parts)
