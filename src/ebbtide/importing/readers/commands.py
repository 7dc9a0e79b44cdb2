"""Reads the settings of a command line: `a.b=c` as Hydra takes them, and `--name value` as argparse does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ebbtide.config.yaml_text import read_yaml
from ebbtide.errors import UserError
from ebbtide.importing.readers.shell import Word
from ebbtide.importing.source import Found, Unread

HYDRA = re.compile(r"([+~]{0,2})([A-Za-z_][\w.@/-]*)(?:=(.*))?", re.DOTALL)
FLAG = re.compile(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
NUMBER = re.compile(r"-?[\d.]+([eE][-+]?\d+)?")


def hydra_settings(words: Sequence[Word], file: str) -> dict[str, Found]:
    """The settings `a.b=c` among the words of a command; `~a.b` removes one."""
    found: dict[str, Found] = {}
    for word in words:
        setting = HYDRA.fullmatch(word.text)
        if setting is None:
            continue
        sign, key, text = setting.groups()
        if sign == "~":
            found.pop(key, None)
        elif text is not None:
            found[key] = Found(_value(Word(text, word.line)), f"{file}:{word.line}")
    return found


def flag_settings(words: Sequence[Word], file: str) -> dict[str, Found]:
    """The settings `--name value` among the words of a command. A flag without a value is true, and one with several
    has a list of them."""
    found: dict[str, Found] = {}
    values: list[Any] = []
    name, place = "", ""

    def finish() -> None:
        if not name:
            return
        value: Any = True if not values else values[0] if len(values) == 1 else list(values)
        if isinstance(value, list) and any(isinstance(one, Unread) for one in value):
            value = Unread(" ".join(map(str, value)))
        found[name] = Found(value, place)

    for word in words:
        flag = None if NUMBER.fullmatch(word.text) else FLAG.fullmatch(word.text)
        if flag is None:
            values.append(_value(word))
            continue
        finish()
        name, place, values = flag[1].replace("-", "_"), f"{file}:{word.line}", []
        if flag[2] is not None:
            values.append(_value(Word(flag[2], word.line)))
    finish()
    return found


def _value(word: Word) -> Any:
    """The value of a text: YAML where it is valid, as Hydra's values nearly are, and a text otherwise."""
    value = word.value
    if isinstance(value, Unread) or not value:
        return value
    try:
        return read_yaml(value, "a setting")
    except UserError:
        return value
