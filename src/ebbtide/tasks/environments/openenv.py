"""Environments of the package `openenv`, by the URL of a server, or as a class in this process:
`{object: openenv, options: {url: "http://127.0.0.1:8000"}}`, or
`{object: openenv, options: {environment: "my_env:MyEnvironment", action: "my_env:MyAction"}}`.

What the policy writes is one field of the action: the one named by the option `field`, or the only text in the action's
schema.
"""

from __future__ import annotations

import importlib
import json
from typing import Any
from urllib.request import urlopen

from ebbtide.errors import UserError
from ebbtide.tasks.environment import as_text

try:
    from openenv import GenericEnvClient
except ImportError:
    raise UserError("`task.environment.object: openenv` needs the package openenv: pip install openenv") from None

NOT_SAID = ("done", "reward", "metadata")


class OpenEnvEnvironment:
    """One episode, which is one session of the server."""

    def __init__(
        self,
        url: str | None = None,
        environment: str | None = None,
        action: str | None = None,
        field: str | None = None,
    ) -> None:
        if url is not None:
            self._made: Any = GenericEnvClient(base_url=url).sync()
            with urlopen(f"{url.rstrip('/')}/schema") as answer:  # noqa: S310 (the user's own server)
                schema = json.load(answer)["action"]
            self._action: Any = dict
        elif environment is not None and action is not None:
            self._made, self._action = _named(environment)(), _named(action)
            schema = self._action.model_json_schema()
        else:
            raise UserError("`task.environment.options` for `openenv` are `url`, or `environment` and `action`")
        self._field = field or _text_field(schema)

    def reset(self, **row: Any) -> str:
        known = {name: value for name, value in row.items() if name not in ("prompt", "answer")}
        return _said(self._made.reset(**known))

    def step(self, text: str) -> tuple[str, float, bool]:
        found = self._made.step(self._action(**{self._field: text}))
        return _said(found), float(found.reward or 0.0), bool(found.done)

    def close(self) -> None:
        self._made.close()


def _named(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _text_field(schema: dict[str, Any]) -> str:
    texts = [str(name) for name, kind in schema.get("properties", {}).items() if kind.get("type") == "string"]
    if len(texts) != 1:
        raise UserError(
            f"the actions of this environment have {len(texts)} texts ({', '.join(texts) or 'none'}): name the one"
            " that the policy writes in `task.environment.options.field`"
        )
    return texts[0]


def _said(found: Any) -> str:
    """The text of an observation, or of a result that has one."""
    observed = getattr(found, "observation", found)
    if not isinstance(observed, dict):
        return as_text(observed)
    fields = {name: value for name, value in observed.items() if name not in NOT_SAID}
    return as_text(next(iter(fields.values())) if len(fields) == 1 else fields)


make = OpenEnvEnvironment
