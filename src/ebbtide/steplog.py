"""Files with a JSON object of some step in each line: whole lines are added, those of steps to be done again go."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ebbtide.errors import UserError
from ebbtide.files import append_whole, unwritable, write_whole
from ebbtide.json_text import json_bytes


def add(file: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """All of a step, or nothing: no line is ever cut in two. The file is there: where it is not, it was removed."""
    try:
        append_whole(file, b"".join(json_bytes(line) + b"\n" for line in lines))
    except FileNotFoundError:
        raise UserError(f"{file} was moved or removed while the run wrote to it: leave a run's files there until it is done") from None
    except OSError as error:
        fix = "Its lines up to here are whole: make room there, and go on from the last checkpoint with `resume`"
        raise unwritable(file, error, fix) from None


def forget_after(file: Path, step: int) -> None:
    """Drops the lines of steps that will be done again, and one that was cut in the middle. Line by line: rollouts of a long run may be larger than memory."""

    def stays(line: bytes) -> bool:
        found = step_of(line)
        return found is not None and found <= step

    if not file.exists():
        return
    if not file.is_file():  # reading a pipe would wait for ever
        raise UserError(f"{file} is no ordinary file: move it away, or begin anew in another `run.folder`")
    whole, gone = 0, False  # bytes of the lines that stay before the first one that goes
    with file.open("rb") as lines:
        for line in lines:
            if not stays(line):
                gone = True
            elif gone:
                return _rewrite(file, lambda line: line if stays(line) else b"")
            else:
                whole += len(line)
    if gone:
        os.truncate(file, whole)  # which a full disk has room for


def complete(file: Path, step: int, figures: dict[str, Any]) -> None:
    """Adds to the line of a step what it lacks; the line itself, where there is none."""
    there = False

    def completed(line: bytes) -> bytes:
        nonlocal there
        found = json.loads(line)
        if found["step"] != step:
            return line
        there = True
        lacks = {key: value for key, value in figures.items() if key not in found}
        return json_bytes(found | lacks) + b"\n"

    _rewrite(file, completed)
    if not there:
        add(file, [{"step": step, **figures}])


def step_of(line: bytes) -> int | None:
    """None of what is no such line, or only the beginning of one."""
    try:
        step = json.loads(line)["step"] if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if isinstance(step, int) else None


def _rewrite(file: Path, change: Callable[[bytes], bytes]) -> None:
    def changed() -> Iterator[bytes]:
        with file.open("rb") as lines:
            yield from map(change, lines)

    try:
        write_whole(file, changed())
    except OSError as error:
        raise unwritable(file, error, "It is as it was: make room there, and try again") from None
