"""A Python tool: `{object: python}`. The policy writes code, which runs in a sandbox (docs/tools.md), and reads what it
prints; a turn without a call is its answer, which the task's own scorer scores.

Options: `sandbox: none`, where the kernel cannot isolate code, and the limits of sandbox.py (`seconds`, `memory_mib`,
...).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from ebbtide.tasks.sandbox import Limits, Sandbox, python_tool, run_python


class PythonTool:
    """One episode."""

    def __init__(self, sandbox: Sandbox = "namespaces", **limits: Any) -> None:
        _check(sandbox)
        self.tools = {"python": python_tool(sandbox, Limits(**limits))}


@cache
def _check(sandbox: Sandbox) -> None:
    """Raises where the kernel cannot isolate code: before the first episode, and not as an answer to the policy."""
    run_python("", sandbox)


make = PythonTool
