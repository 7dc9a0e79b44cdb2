"""Writes an imported config: the YAML with a comment on each line, and the lists of what became of each key."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from ebbtide.config.roots import roots
from ebbtide.importing.answers import Answers, Taken

LONGEST_VALUE = 60


def write_yaml(answers: Answers, file: str) -> str:
    """The YAML of what was taken, in the order of Ebbtide's own sections."""
    source, tree = answers.source, dict[str, Any]()
    for key, taken in answers.taken.items():
        *above, last = key.split(".")
        node = tree
        for one in above:
            node = node.setdefault(one, {})
        node[last] = taken
    order = list(roots()[source.algorithm].model_fields)
    lines = [f"# {file} of {answers.table.name}, imported by `ebbtide import`.", f"algorithm: {source.algorithm}"]
    for section in sorted(tree, key=lambda name: order.index(name) if name in order else len(order)):
        lines += _lines({section: tree[section]}, 0)
    return "\n".join(lines) + "\n"


def _lines(tree: Mapping[str, Any], depth: int) -> Iterator[str]:
    for key, node in tree.items():
        if isinstance(node, Taken):
            yield f"{'  ' * depth}{key}: {_value(node.value)}{_comment(node)}"
        else:
            yield f"{'  ' * depth}{key}:"
            yield from _lines(node, depth + 1)


def _value(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True).strip()
    return text.removesuffix("...").strip()


def _comment(taken: Taken) -> str:
    said = ": ".join(part for part in (taken.origin, taken.how) if part)
    return f"  # {' '.join(said.split())}" if said else ""


def render_lists(answers: Answers) -> str:
    """What became of each key, in three lists, after the arithmetic of batches."""
    source = answers.source
    lines = [f"note: {note}" for note in source.notes]
    if answers.arithmetic:
        lines += ["batches:", *(f"  {line}" for line in answers.arithmetic)]
    lines += ["", f"taken ({len(answers.taken)}):"]
    for key, taken in answers.taken.items():
        lines.append(f"  {key}: {_short(_value(taken.value))}{_comment(taken).replace('  # ', '  <- ')}")
    lines += ["", f"not needed here ({len(answers.not_needed)}):", *_grouped(answers)]
    lines += ["", f"no counterpart ({len(answers.none)}):"]
    for key, nearest in answers.none.items():
        found = source.keys[key]
        value = _short(str(found.value))
        lines.append(f"  {key}: {value} ({found.place}): {nearest}")
    if not answers.none:
        lines.append("  none")
    return "\n".join(lines)


def _grouped(answers: Answers) -> Iterator[str]:
    """The keys that need nothing, those with the same reason together."""
    groups: dict[str, list[str]] = defaultdict(list)
    for key, why in answers.not_needed.items():
        groups[why].append(key)
    for why, keys in groups.items():
        yield f"  {', '.join(_folded(keys))}: {why}"


def _folded(keys: list[str]) -> list[str]:
    """The keys, with a section of more than three of them as one: `a.b.* (12 keys)`."""
    sections: dict[str, list[str]] = defaultdict(list)
    for key in keys:
        sections[".".join(key.split(".")[:2]) if key.count(".") > 1 else key.rpartition(".")[0]].append(key)
    return [
        name
        for section, inside in sections.items()
        for name in ([f"{section}.* ({len(inside)} keys)"] if section and len(inside) > 3 else inside)
    ]


def _short(text: str) -> str:
    plain = " ".join(text.split())
    return plain if len(plain) <= LONGEST_VALUE else f"{plain[: LONGEST_VALUE - 3]}..."
