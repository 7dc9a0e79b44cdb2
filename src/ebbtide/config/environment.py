"""The section `task.environment`: episodes of several turns."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator

from ebbtide.config.base import Count, Positive, Section

ToolFormat = Literal["qwen", "hermes", "llama3", "mistral", "json"]
"""How a family of models writes tool calls. `qwen` and `hermes` are the same: JSON, or the XML of Qwen3-Coder, in
`<tool_call>`. `llama3`: JSON after `<|python_tag|>`, or as `json`. `mistral`: what follows `[TOOL_CALLS]`. `json`: an
object in a code fence, or one that begins a line."""

BUILTIN_ENVIRONMENTS = ("calculator", "mcp", "openenv", "python", "skyrl_gym", "textarena", "verifiers")
"""The environments that ship with Ebbtide: a game, a Python tool, and adapters to the packages of these names."""


class EnvironmentConfig(Section):
    """Episodes: the policy and an environment take turns, and the environment gives the reward. An episode
    that is under way has a process to itself; if that hangs or crashes, only the episode is lost."""

    object: str
    """`module:name` of a class, or of a function that returns an environment, for each episode anew; or one that ships
    with Ebbtide: `calculator`, a game, and `python`, a tool; or an adapter: `mcp`, `openenv`, `skyrl_gym`, `textarena`
    or `verifiers`."""

    options: dict[str, Any] = {}
    """Keyword arguments for it."""

    python: str | None = None
    """The Python that runs environments, such as that of a virtual environment whose packages would conflict with
    Ebbtide's; it needs `pydantic`. `null`: the one that runs Ebbtide."""

    max_turns: Count = 8
    """Turns of the policy in an episode, at most."""

    max_turn_tokens: Count | None = None
    """Tokens sampled in one turn, at most; `null`: as many as `rollout.max_new_tokens`, which limits the tokens of a
    whole episode after its prompt, sampled and the environment's, leaves."""

    tool_format: ToolFormat | None = None
    """How the policy writes tool calls; `null`: as its chat template does."""

    max_concurrent: Count = 256
    """Episodes that are under way at the same time, at most, each with its process."""

    timeout_s: Positive = 30.0
    """Time limit for each call of the environment, in seconds; beyond it the episode gets reward 0 and is counted."""

    memory_mib: Count = 4096
    """Address space that an environment's process may have, in MiB."""

    @field_validator("object")
    @classmethod
    def _names_something(cls, value: str) -> str:
        module, colon, name = value.partition(":")
        if value not in BUILTIN_ENVIRONMENTS and not (colon and module and name):
            raise ValueError(
                f"`task.environment.object` is `{value}`: write `module:name` of a class or function, or one of"
                f" {', '.join(BUILTIN_ENVIRONMENTS)}"
            )
        return value
