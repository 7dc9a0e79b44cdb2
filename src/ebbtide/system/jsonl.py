"""JSON Lines files with a `step` in each line. Only complete lines are added, and a resumed run removes the lines of
the steps that it repeats."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ebbtide.errors import UserError
from ebbtide.system.files import append_atomic, write_atomic, write_error
from ebbtide.system.json_text import json_bytes


def append_lines(file: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Appends all lines or none: no line is ever cut. The file has to exist: one that does not was removed."""
    try:
        append_atomic(file, b"".join(json_bytes(line) + b"\n" for line in lines))
    except FileNotFoundError:
        raise UserError(
            f"{file} was moved or removed while the run wrote to it: leave the files of a run in place until it is done"
        ) from None
    except OSError as error:
        fix = "Its lines so far are complete: free space there, and continue from the last checkpoint with `resume`"
        raise write_error(file, error, fix) from None


def drop_lines_after(file: Path, step: int) -> None:
    """Removes the lines of later steps, which the run repeats, and a line that was cut. It reads line by line: the
    rollouts of a long run may be larger than memory."""

    def is_kept(line: bytes) -> bool:
        found = parse_step(line)
        return found is not None and found <= step

    if not file.exists():
        return
    if not file.is_file():  # reading a pipe would block forever
        raise UserError(f"{file} is not an ordinary file: move it away, or start a new run in another `run.folder`")
    kept_bytes, dropping = 0, False  # bytes of the lines before the first one that is dropped
    with file.open("rb") as lines:
        for line in lines:
            if not is_kept(line):
                dropping = True
            elif dropping:
                return _rewrite(file, lambda line: line if is_kept(line) else b"")
            else:
                kept_bytes += len(line)
    if dropping:
        os.truncate(file, kept_bytes)  # a full disk allows this


def complete_line(file: Path, step: int, figures: dict[str, Any]) -> None:
    """Adds the missing keys to the line of a step, or the whole line if there is none."""
    found_step = False

    def completed(line: bytes) -> bytes:
        nonlocal found_step
        found = json.loads(line)
        if found["step"] != step:
            return line
        found_step = True
        missing = {key: value for key, value in figures.items() if key not in found}
        return json_bytes(found | missing) + b"\n"

    _rewrite(file, completed)
    if not found_step:
        append_lines(file, [{"step": step, **figures}])


def parse_step(line: bytes) -> int | None:
    """The step of a line; None if the line has no step, or is incomplete."""
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
        write_atomic(file, changed())
    except OSError as error:
        raise write_error(file, error, "The file is unchanged: free space there, and try again") from None
