"""Command-line settings in the spelling of other tools: `--train.steps=3`, `--train.steps 3`, or placed before the
recipe's name.

Imports no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from typing import Any

from pydantic import BaseModel
from typer.core import TyperCommand

from ebbtide.config.foreign import find_counterpart
from ebbtide.config.keys import all_keys
from ebbtide.config.roots import roots
from ebbtide.config.serve import ServeConfig
from ebbtide.errors import UserError

SETTING = re.compile(r"[+]{0,2}[A-Za-z_][\w.-]*=")
DASHED = re.compile(r"-{1,2}([A-Za-z_][\w.-]*)(?:=(.*))?", re.DOTALL)


class SettingsCommand(TyperCommand):
    """A command that accepts settings among its arguments, in any order and spelling."""

    roots: Sequence[type[BaseModel]] = tuple(roots().values())

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named: dict[bool, set[str]] = {True: set(), False: set()}
        for one in self.get_params(ctx):
            if (flag := getattr(one, "is_flag", None)) is not None:  # an option
                named[flag].update(one.opts, one.secondary_opts)
        return super().parse_args(ctx, settings_last(args, named[True], named[False], self.roots))


class ServerSettingsCommand(SettingsCommand):
    """A command that accepts the settings of `ebbtide serve`."""

    roots = (ServeConfig,)


def settings_last(
    arguments: Sequence[str], flags: Collection[str], valued: Collection[str], roots: Sequence[type[BaseModel]]
) -> list[str]:
    """Rewrites the settings among a command's arguments as `section.key=value` and puts them last.

    `flags` and `valued`: the command's own options, without and with a value.
    """
    own: list[str] = []
    settings: list[str] = []
    left = list(arguments)
    while left:
        argument = left.pop(0)
        dashed = DASHED.fullmatch(argument)
        if argument == "--":
            return [*own, *settings, argument, *left]
        if argument in valued:
            own += [argument, *left[:1]]
            left = left[1:]
        elif argument in flags or argument.partition("=")[0] in valued:
            own.append(argument)
        elif dashed is not None and any(_is_setting(dashed[1], root) for root in roots):
            settings.append(_setting(dashed[1], dashed[2], left))
        elif SETTING.match(argument) and not os.path.isfile(argument):
            settings.append(argument)
        else:
            own.append(argument)
    return [*own, *settings]


def _is_setting(name: str, root: type[BaseModel]) -> bool:
    """Whether `name` is a config key (in full, or its last part) or a name of another tool. Anything else is a
    mistyped option of the command itself."""
    plain = name.replace("-", "_")
    ours = {key.rsplit(".", 1)[-1] for key in all_keys(root)}
    return "." in name or plain in ours or find_counterpart([plain], root) is not None


def _setting(name: str, value: str | None, left: list[str]) -> str:
    """The setting as `key=value`; a missing value is taken from the next argument."""
    key = name.replace("-", "_")
    if value is None:
        if not left or left[0].startswith("--") or SETTING.match(left[0]):
            raise UserError(f"`--{name}` is a setting and has no value: write `{key}=VALUE`")
        value = left.pop(0)
    return f"{key}={value}"
