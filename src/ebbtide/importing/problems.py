"""The problems of a run: their files, their reward functions, and several files as a mix."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from ebbtide.importing.answers import TODO, Answers, MixPart

ENDS = re.compile(r"\.(parquet|jsonl?)$")
ODD = re.compile(r"[^\w-]+")  # what the name of a task in a mix does not have
SAME_NAMES = ("train", "test", "data", "validation", "val")  # files whose folder says what they are
WEIGH = f"{TODO} its share of the prompts. There all rows are one dataset: its number of rows is the same"


def take_file(answers: Answers, value: Any, key: str, ours: str, columns: str) -> None:
    """A file of problems or examples. The name of a hub's dataset stands for a file that has to be made of it."""
    values = value if isinstance(value, list) else [value]
    if len(values) > 1:
        answers.lack(key, f"`{ours}`: one file; the first of {len(values)} is taken. Join them")
    file, how = local_file(values[0] if values else "", columns)
    answers.take(ours, file, key, how=how)


def local_file(value: Any, columns: str) -> tuple[str, str]:
    """(the file that a value stands for, what has to be done for it to be there)."""
    text = str(value)
    if text.endswith((".parquet", ".jsonl")):
        return text, f"{TODO} name the file" if "$" in text else ""
    if text.endswith(".json"):
        return f"{text}l", f"{TODO} save it as JSONL, {columns}"
    name = text.rstrip("/").rpartition("/")[2] or "train"
    return f"{name}.jsonl", f"{TODO} save the dataset as this file, {columns}"


def take_reward_function(answers: Answers, target: str, *theirs: str, how: str = "") -> None:
    """A function that scores the rows of `task.file`."""
    answers.taken.pop("task.file.scorer", None)
    answers.take("task.python.object", target, *theirs, how=how, read=True)


def take_mix(answers: Answers, parts: Sequence[MixPart]) -> None:
    """Several files of problems, each a task of a mix."""
    if not any(key.startswith("task.") for key in answers.source.ours):
        answers.mix = list(parts)


def mix_names(values: Sequence[str]) -> list[str]:
    """A name for each of several files or datasets."""
    found = list[str]()
    for value in values:
        path = PurePath(ENDS.sub("", value.rstrip("/")))
        stem = path.parent.name if path.name in SAME_NAMES and path.parent.name else path.name
        name = ODD.sub("_", stem).strip("_") or "task"
        found.append(name if name not in found else f"{name}_{len(found) + 1}")
    return found


def finish_mix(answers: Answers) -> None:
    """Makes the one task that was taken a mix of tasks, which have all in common but their files, and their scorers
    where they have some of their own."""
    if not answers.mix:
        return
    sections = ("task.file.", "task.python.", "task.rewards.")
    shared = {key: taken for key, taken in answers.taken.items() if key.startswith(sections)}
    answers.taken = {key: taken for key, taken in answers.taken.items() if key not in shared}
    held_out = answers.taken.pop("task.held_out", None)
    for part in answers.mix:
        ours = f"task.mix.{part.name}"
        answers.take(f"{ours}.weight", 1.0, part.key, how=WEIGH)
        for key, taken in shared.items():
            is_scoring = not key.startswith("task.file.") or (key == "task.file.answer_field" and taken.value is None)
            if key not in ("task.file.train", "task.file.held_out") and not (is_scoring and part.scorer is not None):
                answers.taken[f"{ours}.{key.removeprefix('task.')}"] = taken
        for name, (file, how) in part.files.items():
            answers.take(f"{ours}.file.{name}", file, part.key, how=how)
        if part.scorer is not None:
            answers.take(f"{ours}.file.scorer", part.scorer, part.key)
        if held_out is not None:
            each = -(-int(held_out.value) // len(answers.mix))
            how = f"{held_out.value} of {len(answers.mix)} tasks together"
            answers.take(f"{ours}.held_out", each, part.key, how=how)
