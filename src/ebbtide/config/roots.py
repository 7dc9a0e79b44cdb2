"""The root of the config of each algorithm, found by the algorithm's name. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from ebbtide.config import algorithms
from ebbtide.config.root import Config
from ebbtide.errors import UserError

DEFAULT = "grpo"


@cache
def roots() -> Mapping[str, type[Config]]:
    """Algorithm -> the class of its config, from the files of config/algorithms/."""
    names = sorted(module.name for module in iter_modules(algorithms.__path__))
    return {name: import_module(f"{algorithms.__name__}.{name}").Root for name in names}


def find_root(tree: Mapping[str, Any], where: str) -> type[Config]:
    """The class of the config that `tree` is meant for, by its key `algorithm`."""
    name = tree.get("algorithm", DEFAULT)
    if not isinstance(name, str) or name not in roots():
        raise UserError(f"{where}: `algorithm` is {name!r} and should be one of {', '.join(roots())}")
    return roots()[name]


def validate_config(tree: Mapping[str, Any], where: str = "the config") -> Config:
    """The config of any algorithm, from a whole tree such as a run's config.yaml."""
    return find_root(tree, where).model_validate(tree)
