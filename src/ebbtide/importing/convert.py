"""A config of another tool as one of Ebbtide: the YAML, and the answers to all of its keys."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ebbtide.config.foreign import find_counterpart
from ebbtide.config.keys import all_keys
from ebbtide.config.load import load_text
from ebbtide.config.root import Config
from ebbtide.config.roots import roots
from ebbtide.errors import UserError
from ebbtide.importing import nemo_rl, trl, verl
from ebbtide.importing.answers import Answers, with_defaults
from ebbtide.importing.problems import finish_mix
from ebbtide.importing.readers.open import COMMAND_LINE, read_source
from ebbtide.importing.rewards import REWARDS, prefer_command_line
from ebbtide.importing.source import Found, flatten
from ebbtide.importing.table import read_table
from ebbtide.importing.write import write_yaml

TOOLS: Mapping[str, Callable[[Answers], None]] = {"nemo_rl": nemo_rl.answer, "verl": verl.answer, "trl": trl.answer}


@dataclass
class Imported:
    """A config that was imported."""

    text: str
    """The YAML, with a comment on each line."""
    config: Config
    answers: Answers
    tool: str
    """Its name, as people write it."""


def import_config(path: Path, overrides: Sequence[str] = ()) -> Imported:
    """Imports a file. `overrides` are settings in the file's own tool's spelling, or keys of Ebbtide."""
    source = read_source(path, overrides)
    if source.algorithm not in roots():
        raise UserError(f"`algorithm={source.algorithm}`: choose one of {', '.join(roots())}")
    table, root = read_table(source.tool, source.algorithm), roots()[source.algorithm]
    ours = set(all_keys(root))
    for key in [key for key, found in source.keys.items() if found.place == COMMAND_LINE]:
        if table.find(key) is None and (key in ours or key.startswith(f"{REWARDS}.")):
            found = source.keys.pop(key)
            given = dict(flatten({key: found.value})) if key == REWARDS else {key: found.value}
            source.ours |= {one: Found(value, found.place) for one, value in given.items()}
    with_defaults(source, table.defaults, table.name)
    answers = Answers(source, table)
    TOOLS[source.tool](answers)
    answers.complete()
    prefer_command_line(answers)
    finish_mix(answers)
    for key in [key for key, said in answers.none.items() if said.startswith("unknown")]:
        answers.none[key] += _hint(key, root, list(table.keys))
    for key, found in source.ours.items():
        answers.taken = {one: taken for one, taken in answers.taken.items() if not one.startswith(f"{key}.")}
        answers.take(key, found.value, how=COMMAND_LINE)
    text = write_yaml(answers, path.name)
    return Imported(text, load_text(text, f"{path}, as it was imported,", path.stem), answers, table.name)


def _hint(key: str, root: type[Config], known: Sequence[str]) -> str:
    """What an unknown key may be, by its last parts or by its spelling."""
    if (counterpart := find_counterpart(key.split("."), root)) is not None:
        return f". By its name: {counterpart}"
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.9)
    return f". Did you mean `{near[0]}`?" if near else ""
