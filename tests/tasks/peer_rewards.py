"""Reward functions in the form in which people have them for TRL and for verl; no module of Ebbtide is imported."""

import re

# TRL


def exact(completions, solution, **kwargs):
    """Conversational completions: lists of messages."""
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if content == truth else 0.0 for content, truth in zip(contents, solution, strict=True)]


def closer_to_20_characters(completions, **kwargs):
    """Completions as texts."""
    return [-abs(20 - len(completion)) for completion in completions]


def sees(prompts, completions, **kwargs):
    """All that it is given, as an error."""
    known = {name: value for name, value in kwargs.items() if not name.startswith("log_")}
    raise ValueError(f"{prompts!r} {completions!r} {known!r} {sorted(kwargs)}")


def only_math(completions, task, log_metric=None, log_extra=None, **kwargs):
    """No reward for other tasks; a metric and a column of its own."""
    if log_metric:
        log_metric("length", sum(map(len, completions)) / len(completions))
    if log_extra:
        log_extra("noted", list(completions))
    return [float(text == "4") if one == "math" else None for text, one in zip(completions, task, strict=True)]


async def later(prompts, completions, **kwargs):
    return [0.25 for _ in completions]


def strict(completions, solution):
    """It takes nothing else."""
    return [float(text == truth) for text, truth in zip(completions, solution, strict=True)]


def with_ids(completions, completion_ids, **kwargs):
    return [0.0 for _ in completions]


def not_a_list(completions, **kwargs):
    return 1.0


def two_for_one(completions, **kwargs):
    return [1.0, 2.0]


class Scaled:
    """An object that can be called."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def __call__(self, completions, **kwargs):
        return [self.scale * len(completion) for completion in completions]


# verl


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if data_source != "openai/gsm8k":
        raise NotImplementedError(data_source)
    found = re.findall(r"#### (-?[0-9.,]+)", solution_str)
    return 1.0 if found and found[-1] == ground_truth else 0.0


def compute_score_dict(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0, **kwargs):
    right = solution_str == ground_truth
    return {"score": right + bonus, "acc": right, "pred": solution_str, "index": extra_info["index"]}


def compute_score_without(data_source, solution_str, ground_truth, extra_info):
    return {"acc": 1.0}


# Neither


def plain(text):
    return 1.0
