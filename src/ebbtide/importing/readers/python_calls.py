"""Reads the literal arguments of calls such as `GRPOConfig(...)` in a Python script. The script is parsed and never
executed."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ebbtide.errors import UserError
from ebbtide.importing.source import Found, Unread

LARGEST = 1_000_000  # characters of a script
RUNNING = (ast.Expr, ast.Raise, ast.For, ast.While, ast.With)  # statements that do something, but for docstrings


@dataclass
class Calls:
    """What a script calls with what."""

    calls: dict[str, dict[str, Found]] = field(default_factory=dict)
    """Name of the function -> its keyword arguments, over all of its calls; positional ones are `0`, `1`, ..."""
    assigned: dict[str, Found] = field(default_factory=dict)
    """Name of an attribute -> what is assigned to it, as in `training_args.beta = 0.1`."""
    functions: dict[str, str] = field(default_factory=dict)
    """Name of a function of the script's top level, or of one that it imports -> `module:name`; empty for
    the script's own."""
    runs: bool = False
    """Whether importing the script does more than to define things."""
    docstring: str = ""
    text: str = ""
    known: _Known | None = None
    """The names whose values can be read."""

    def loaded_model(self, node: ast.expr) -> str | None:
        """The folder or hub id of a model: a text, or what a call of `from_pretrained` loads; or a name of either."""
        if self.known is None:
            return None
        node = self.known.followed(node)
        if isinstance(node, ast.Call) and _name(node.func) == "from_pretrained":
            named = [one.value for one in node.keywords if one.arg == "pretrained_model_name_or_path"]
            node = next(iter([*node.args, *named]), node)
        value = self.known.value(node, 0)
        return value if isinstance(value, str) else None


def read_calls(text: str, file: str) -> Calls:
    """The calls of a script with what can be read of their arguments: literals, names that are assigned one, and
    `args.name` with the default that `add_argument` gives it."""
    if len(text) > LARGEST:
        raise UserError(f"{file} has more than {LARGEST:,} characters, which no script of a run has")
    try:
        with warnings.catch_warnings(action="ignore"):  # about the script's own text, such as `\\d` in a plain string
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"{file} is not valid Python: {error}") from None
    known = _Known(tree)
    calls = Calls(docstring=ast.get_docstring(tree, clean=False) or "", text=text, known=known)
    calls.functions = {one.name: "" for one in tree.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
    calls.runs = any(
        isinstance(one, RUNNING) and not isinstance(getattr(one, "value", None), ast.Constant) for one in tree.body
    )
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            calls.functions |= {one.asname or one.name: f"{node.module}:{one.name}" for one in node.names}
        if isinstance(node, ast.Call):
            found = calls.calls.setdefault(_name(node.func), {})
            for place, argument in enumerate(node.args):
                found.setdefault(str(place), known.found(argument, file))
            for keyword in node.keywords:
                if keyword.arg is not None:
                    found[keyword.arg] = known.found(keyword.value, file)
                else:
                    found |= {name: known.found(one, file) for name, one in known.unpacked(keyword.value)}
        elif isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Attribute):
            owner = target.value.id if isinstance(target.value, ast.Name) else ""
            if owner.endswith(("args", "config")):
                calls.assigned[target.attr] = known.found(node.value, file)
    return calls


def reward_functions(found: Found, calls: Calls, script: str) -> tuple[Found, list[str]]:
    """(the reward functions of a trainer as `module:name` and its reward models by their paths, the functions that the
    script defines). A function that is made where it is used cannot be named, and all are unread then. `script`: its
    path; empty if it is a notebook."""
    if found.is_read or calls.known is None:
        return found, []
    node = ast.parse(str(found.value), mode="eval").body
    if not (isinstance(node, ast.Name) and node.id in calls.functions):
        node = calls.known.followed(node)
    parts = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
    named, own = list[str](), list[str]()
    for part in parts:
        where = calls.functions.get(part.id) if isinstance(part, ast.Name) else None
        model = calls.loaded_model(part) if where is None else None
        if model is not None and "/" in model:
            named.append(model)
            continue
        if where is None or (not where and not script):
            return found, []
        named.append(where or f"{script}:{ast.unparse(part)}")
        own += [] if where else named[-1:]
    return Found(named, found.place), own


def _name(node: ast.expr) -> str:
    """The last name of what is called: `GRPOConfig` in `trl.GRPOConfig(...)`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


class _Known:
    """The names of a script whose values can be read."""

    def __init__(self, tree: ast.Module) -> None:
        self.names: dict[str, ast.expr] = {}
        self.arguments: dict[str, ast.expr] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                self._assign(node.targets[0], node.value)
            elif isinstance(node, ast.Call) and _name(node.func) == "add_argument" and node.args:
                flag = next((one.value for one in node.args if _is_flag(one)), None)  # type: ignore[attr-defined]
                default = next((one.value for one in node.keywords if one.arg == "default"), None)
                if flag is not None and default is not None:
                    self.arguments[str(flag).lstrip("-").replace("-", "_")] = default

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self.names.setdefault(target.id, value)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for one, part in zip(target.elts, value.elts, strict=True):
                self._assign(one, part)

    def followed(self, node: ast.expr) -> ast.expr:
        """What a name stands for; anything else as it is."""
        return self.names.get(node.id, node) if isinstance(node, ast.Name) else node

    def found(self, node: ast.expr, file: str) -> Found:
        return Found(self.value(node, 0), f"{file}:{node.lineno}")

    def value(self, node: ast.expr, depth: int) -> Any:
        """The value of an expression; what is no literal is unread."""
        if depth > 8:
            return Unread(ast.unparse(node))
        if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | bool | None):
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self.value(node.operand, depth + 1)
            return -value if isinstance(value, int | float) else Unread(ast.unparse(node))
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return self._all(node, node.elts, depth)
        if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
            values = self._all(node, node.values, depth)
            keys = [str(key.value) for key in node.keys if isinstance(key, ast.Constant)]
            return values if isinstance(values, Unread) else dict(zip(keys, values, strict=True))
        if isinstance(node, ast.Name) and node.id in self.names:
            return self._or_name(self.names[node.id], node, depth)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in self.arguments:
            return self._or_name(self.arguments[node.attr], node, depth)
        if isinstance(node, ast.Attribute) and _name(node.value) == "torch":
            return node.attr  # a dtype, as in `torch.bfloat16`
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
            return self.value(node.values[-1], depth + 1)  # `args.output_dir or "out"`
        return Unread(ast.unparse(node))

    def unpacked(self, node: ast.expr) -> list[tuple[str, ast.expr]]:
        """The arguments that `**node` stands for, where it is `dict(...)` or `{...}`, or a name of one."""
        if isinstance(node, ast.Name):
            node = self.names.get(node.id, node)
        if isinstance(node, ast.Call) and _name(node.func) == "dict":
            return [(one.arg, one.value) for one in node.keywords if one.arg is not None]
        if not isinstance(node, ast.Dict):
            return []
        pairs = zip(node.keys, node.values, strict=True)
        return [(str(key.value), value) for key, value in pairs if isinstance(key, ast.Constant)]

    def _or_name(self, node: ast.expr, name: ast.expr, depth: int) -> Any:
        value = self.value(node, depth + 1)
        return Unread(ast.unparse(name)) if isinstance(value, Unread) else value

    def _all(self, node: ast.expr, parts: Iterable[ast.expr], depth: int) -> Any:
        values = [self.value(part, depth + 1) for part in parts]
        return Unread(ast.unparse(node)) if any(isinstance(value, Unread) for value in values) else values


def _is_flag(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("--")
