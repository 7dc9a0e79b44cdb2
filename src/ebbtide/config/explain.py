"""Explains what is wrong with a config: the key, the value, and what to write instead. Imports no torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from pydantic import BaseModel

from ebbtide.config.base import meaning
from ebbtide.config.foreign import find_counterpart, find_value_advice, is_foreign
from ebbtide.config.keys import all_keys, section_at
from ebbtide.config.renamed import VALUES, new_name

WANTED = {"string_type": "a text: put it in quotes", "bool_type": "`true` or `false`", "int_type": "an integer"}
"""Clearer wording for the kinds of pydantic errors whose own message says too little."""


MOST = 40  # At most this many unknown keys of one section are explained.
CLOSE, NEAR = 0.8, 0.6  # Similarity of a name with one typo in it, and of a name that is perhaps meant.


def explain_error(problem: dict[str, Any], root: type[BaseModel]) -> list[str]:
    """The lines that explain one pydantic error; an unknown section gives a line for each key in it."""
    keys = [str(part) for part in problem["loc"]]
    if problem["type"] == "extra_forbidden":
        return explain_unknown(keys, problem["input"], root)
    return [_wrong(problem, keys, root)]


def _wrong(problem: dict[str, Any], keys: Sequence[str], root: type[BaseModel]) -> str:
    """One line on a known key with a wrong value: the key, the value, and what to write instead."""
    dotted = ".".join(keys)
    if problem["type"] == "missing":
        return f"`{dotted}` is missing: {_meaning(keys, root)}"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return f"`{dotted}`: {message}" if dotted and f"`{dotted}" not in message else message
    section = section_at(keys, root)
    if section is not None:
        some = list(section.model_fields)[:3]
        message = f"a section with keys such as {', '.join(some)}: write `{dotted}.{some[0]}=...`"
    message = WANTED.get(problem["type"], message).removeprefix("Input should be ").removeprefix("a valid ")
    known = find_value_advice(dotted, problem["input"])
    more = f"About {problem['input']}: {known}" if known is not None else f"Its meaning: {_meaning(keys, root)}"
    if (now := VALUES.get(dotted, {}).get(str(problem["input"]))) is not None:
        more = f"It is now `{now}`."
    _, has, what = message.partition(" should have ")  # `List should have at least 2 items after validation, not 1`
    wanted = f"have {what.partition(' after validation')[0]}" if has else f"be {message}"
    return f"`{dotted}` is {_short(problem['input'])} and should {wanted}. {more}"


def explain_unknown(keys: Sequence[str], value: object, root: type[BaseModel]) -> list[str]:
    """Lines on an unknown key, or on each key of an unknown section, with what was probably meant."""
    found = {path: (inside, _meant(path, root)) for path, inside in islice(_leaves(tuple(keys), value), MOST)}
    lines, others = [], []
    for path, (inside, meant) in found.items():
        if meant is not None:
            lines.append(f"unknown key `{'.'.join(path)}` (= {_short(inside)}). {meant}")
        else:
            others.append(".".join(path))
    if not lines or _misspelt_section(keys, value, root):  # That is one mistake, however many keys are in it.
        return [f"unknown key `{'.'.join(keys)}` (= {_short(value)}). {_nearest(keys, root)}"]
    if others:
        lines.append(f"unknown keys {', '.join(f'`{one}`' for one in others)}. docs/config.md lists all keys")
    return lines


def _misspelt_section(keys: Sequence[str], value: object, root: type[BaseModel]) -> bool:
    close = _sibling(keys, root, CLOSE)
    section = section_at(close.split("."), root) if close is not None else None
    return section is not None and isinstance(value, dict) and set(value) <= set(section.model_fields)


def _leaves(keys: tuple[str, ...], value: object) -> Iterator[tuple[tuple[str, ...], object]]:
    """Each key in nested sections, with its value."""
    waiting = [(keys, value)]
    while waiting:
        path, inside = waiting.pop(0)
        if isinstance(inside, dict) and inside and len(path) < MOST:
            waiting = [((*path, str(key)), below) for key, below in inside.items()] + waiting
        else:
            yield path, inside


def _meant(keys: Sequence[str], root: type[BaseModel]) -> str | None:
    """What an unknown key most likely means: an old name, one of our keys with a typo, a name of another tool, or one
    of our keys in another section."""
    if (renamed := new_name(keys)) is not None:
        return f"It is now `{renamed}`."
    close, foreign = _sibling(keys, root, CLOSE), find_counterpart(keys, root)
    if close and not is_foreign(keys, root):
        return f"Did you mean `{close}`?"
    if foreign is not None:
        return foreign
    ours = list(all_keys(root))
    ends = [".".join(keys[start:]) for start in range(1, len(keys) - 1)]
    same = [end for end in ends if end in ours][:1] or [key for key in ours if key.rsplit(".", 1)[-1] == keys[-1]]
    return f"Did you mean {' or '.join(f'`{key}`' for key in same[:3])}?" if same else None


def _sibling(keys: Sequence[str], root: type[BaseModel], alike: float) -> str | None:
    """The key of the same section with the most similar name, if it is at least `alike`."""
    section = section_at(keys[:-1], root)
    near = difflib.get_close_matches(keys[-1], list(section.model_fields) if section else [], n=1, cutoff=alike)
    return ".".join([*keys[:-1], near[0]]) if near else None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _nearest(keys: Sequence[str], root: type[BaseModel]) -> str:
    if near := _sibling(keys, root, NEAR):
        return f"Did you mean `{near}`?"
    section = section_at(keys[:-1], root) or root
    begins = [name for name in section.model_fields if name.startswith(keys[-1])]
    if len(begins) == 1:
        return f"Did you mean `{'.'.join([*keys[:-1], begins[0]])}`?"
    return f"Valid keys here: {', '.join(section.model_fields)}."


def _meaning(keys: Sequence[str], root: type[BaseModel]) -> str:
    while keys and keys[-1].isdigit():  # An entry of a list is documented by the list.
        keys = keys[:-1]
    section = section_at(keys[:-1], root)
    field = section.model_fields.get(keys[-1]) if section else None
    return (meaning(field) if field is not None else "") or "see docs/config.md"
