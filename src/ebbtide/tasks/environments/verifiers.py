"""Tasksets of verifiers (its version 1, `verifiers.v1`), which drive their episodes: a harness speaks to the policy as
to any model, through verifiers' own renderers, and so by token ids.

`task.environment.options` are those of `verifiers.v1.EnvConfig`, such as `taskset: {id: my_taskset}` and `agent:
{harness: {id: my_harness}}`; the agent's runtime is a subprocess unless another one is named. Each seed is a task of
the taskset.
"""

from __future__ import annotations

from typing import Any

from ebbtide.errors import UserError
from ebbtide.tasks.policy_endpoint import ServedPolicy

try:  # Here, so that it is imported once, and not in the process of each episode.
    import verifiers.v1 as vf
    from verifiers.v1.utils.loaders import env_config_type, load_environment
except ImportError as error:
    raise UserError(
        f"`task.environment.object: verifiers` needs the package `verifiers` 0.4 ({error}): install it into a virtual"
        " environment of its own, and name its Python in `task.environment.python`"
    ) from None

LOCAL = {"type": "subprocess"}


def make(**options: Any) -> Taskset:
    return Taskset(options)


class Taskset:
    """An environment of verifiers."""

    def __init__(self, options: dict[str, Any]) -> None:
        taskset = str((options.get("taskset") or {}).get("id", ""))
        kind = env_config_type(taskset, options.get("id", ""))
        roles = [name for name, field in kind.model_fields.items() if isinstance(field.default, vf.AgentConfig)]
        local = {name: {"runtime": LOCAL, **(options.get(name) or {})} for name in roles}
        self._env = load_environment(kind.model_validate({**options, **local}))
        if not self._env.taskset.bounded:
            raise UserError(f"the taskset `{taskset}` of verifiers never ends: name one that does")
        self._tasks = list(self._env.taskset)
        if not self._tasks:
            raise UserError(f"the taskset `{taskset}` of verifiers has no tasks")

    async def run(self, policy: ServedPolicy, seed: int) -> tuple[float, dict[str, float]]:
        client = vf.TrainClientConfig(
            base_url=f"{policy.url}/v1", renderer_model_name=policy.facts.tokenizer, api_key_var="EBBTIDE_API_KEY"
        )
        task = self._tasks[seed % len(self._tasks)]
        async with self._env.serving():
            episode = await self._env.run_episode(task, vf.ModelContext(model=policy.model, client=client))
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode failed")
        traces = episode.traces
        figures = {name: float(value) for trace in traces for name, value in trace.metrics.items() if value is not None}
        return sum(float(trace.reward) for trace in traces) / len(traces), figures
