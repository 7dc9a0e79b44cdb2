"""The house's rules: imports run downward, nothing imports in a circle, and files and lines stay readable."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "ebbtide"

# From the ground up. A room imports only from the lines below its own; `rollout.serve` is a room, for it serves
# checkpoints.
LAYERS = """
errors __init__
system
config progress
model
memory
parallel
optim tasks
policy
rollout
checkpoint
planner
report rollout.serve importing
worker
calibrate algorithms
launch
cli
__main__
"""
FLOOR = {room: floor for floor, line in enumerate(LAYERS.strip().splitlines()) for room in line.split()}


def modules() -> dict[str, Path]:
    paths = {path: ("ebbtide", *path.relative_to(SRC).with_suffix("").parts) for path in SRC.rglob("*.py")}
    return {".".join(parts).removesuffix(".__init__"): path for path, parts in paths.items()}


MODULES = modules()


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """The line and the module of each import of our own, also of those inside functions, but not of those for types."""
    tree = ast.parse(path.read_text())
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "ebbtide":
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield node.lineno, whole if whole in MODULES else node.module
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name in MODULES)


def room(module: str) -> str:
    if module.startswith("ebbtide.rollout.serve"):
        return "rollout.serve"
    return module.split(".")[1] if "." in module else "__init__"


def test_every_room_has_a_floor() -> None:
    assert {room(module) for module in MODULES} == set(FLOOR)


def test_imports_run_downward() -> None:
    upward = [
        f"{path.relative_to(SRC)}:{line} imports {target}"
        for module, path in MODULES.items()
        for line, target in imported(path)
        if room(module) != room(target) and FLOOR[room(target)] >= FLOOR[room(module)]
    ]
    assert upward == []


def test_no_file_imports_itself_by_way_of_others() -> None:
    graph = {module: {target for _, target in imported(path)} & set(MODULES) for module, path in MODULES.items()}
    # Take away what imports nothing that is left, until nothing changes: what remains is in a circle or above one.
    while free := [module for module, targets in graph.items() if not targets & graph.keys()]:
        for module in free:
            del graph[module]
    assert graph == {}


@pytest.mark.parametrize("path", sorted(SRC.rglob("*.*")), ids=lambda path: str(path.relative_to(SRC)))
def test_files_are_readable(path: Path) -> None:
    if path.suffix not in (".py", ".c", ".js", ".css", ".html"):
        return
    lines = path.read_text().splitlines()
    assert len(lines) <= 400
    assert [number for number, line in enumerate(lines, 1) if len(line) > 120] == []
