"""Environments of OpenEnv, as an object (`{object: openenv, options: {object: my_package:MyEnvironment}}`) or as a
server (`{object: openenv, options: {url: http://localhost:8000}}`).

An action with one text is what the policy writes; of any other action the policy writes the fields, as JSON. `field`
names the text where there are several; `reset` has arguments for each `reset` beside the seed.
"""

from __future__ import annotations

import importlib
import json
import typing
from typing import Any
from urllib.request import urlopen

from ebbtide.errors import UserError

try:
    from openenv.core.env_server.types import Action
    from openenv.core.generic_client import GenericEnvClient
except ImportError as error:
    raise UserError(
        f"`task.environment.object: openenv` needs the package `openenv` ({error}): install it into a virtual"
        " environment of its own, and name its Python in `task.environment.python`"
    ) from None

NO_TEXT = ("done", "reward", "metadata")


class OpenEnvironment:
    """One episode."""

    def __init__(
        self,
        object: str | None = None,
        url: str | None = None,
        field: str | None = None,
        reset: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if (object is None) == (url is None):
            raise UserError("`task.environment.options` of `openenv` need either `object` or `url`")
        self._reset, self._action = reset or {}, _as_given
        if url is not None:
            with urlopen(f"{url.rstrip('/')}/schema") as answer:  # noqa: S310 (an address that the user names)
                schema = json.load(answer)["action"]
            self._made = GenericEnvClient(base_url=url).sync()
        else:
            assert object is not None
            module, _, name = object.partition(":")
            self._made = getattr(importlib.import_module(module), name)(**options)
            self._action = action = _action_of(type(self._made))
            schema = action.model_json_schema()
        self._field = field or _text_field(schema)

    def reset(self, seed: int) -> str:
        return _text(self._made.reset(seed=seed, **self._reset))

    def step(self, text: str) -> tuple[str, float, bool]:
        if self._field is not None:
            fields: Any = {self._field: text}
        else:
            try:
                fields = json.loads(text)
                if not isinstance(fields, dict):
                    raise ValueError("it is no JSON object")
            except ValueError as error:
                return f"error: the action could not be read: {error}", 0.0, False
        try:
            action = self._action(**fields)
        except (ValueError, TypeError) as error:
            return f"error: the action was refused: {error}", 0.0, False
        found = self._made.step(action)
        return _text(found), float(found.reward or 0.0), bool(found.done)

    def close(self) -> None:
        self._made.close()


def _as_given(**fields: Any) -> Any:
    """An action for a server, which checks it."""
    return fields


def _action_of(environment: type) -> Any:
    """The class of an environment's actions: what its `step` is annotated with."""
    action = typing.get_type_hints(environment.step).get("action")  # type: ignore[attr-defined]
    if not (isinstance(action, type) and issubclass(action, Action)):
        raise UserError(f"`{environment.__name__}.step` does not say what its `action` is: annotate it")
    return action


def _text_field(schema: dict[str, Any]) -> str | None:
    """The one field of an action that has to be given, if it is a text."""
    properties = {name: one for name, one in schema.get("properties", {}).items() if name not in NO_TEXT}
    needed = [name for name in properties if name in schema.get("required", ())]
    return needed[0] if len(needed) == 1 and properties[needed[0]].get("type") == "string" else None


def _text(found: Any) -> str:
    """What an observation says: its only text, or all of its fields as JSON."""
    observed = getattr(found, "observation", found)
    fields = observed if isinstance(observed, dict) else observed.model_dump()
    fields = {name: value for name, value in fields.items() if name not in NO_TEXT}
    first = next(iter(fields.values()), "")
    return first if len(fields) <= 1 and isinstance(first, str) else json.dumps(fields, default=str)


make = OpenEnvironment
