"""Reads JSON Lines files while another process writes them."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, BinaryIO


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


JSON = json.JSONDecoder(parse_constant=lambda _: None, parse_float=_finite)
"""A decoder that reads NaN and infinities as None: Python writes them although JSON has none, and browsers refuse them.
So is 1e400, which no float can hold."""


def open_regular_file(path: Path) -> BinaryIO:
    """Opens an ordinary file. A folder is a FileNotFoundError too, and so is a pipe, which would block."""
    if not path.is_file():
        raise FileNotFoundError(path)
    return path.open("rb")


class GrowingFile:
    """A growing file, of which each call reads the new lines. A file that was replaced or became shorter, as when a run
    resumes, is read from its start."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[dict[str, Any]] = []
        self._inode = 0
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        try:
            with open_regular_file(self.path) as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._inode, self._offset, self.lines = status.st_ino, 0, []
                file.seek(self._offset)
                whole = file.read().rpartition(b"\n")[0]  # the last line may be half written
        except FileNotFoundError:
            self._offset, self.lines = 0, []
            return self.lines
        if whole:
            self._offset += len(whole) + 1
            self.lines += parse_lines(whole)
        return self.lines


def parse_lines(data: bytes) -> list[dict[str, Any]]:
    """The objects in these lines. A line that is not one, such as a line cut by a crash, is left out."""
    return [value for line in data.decode(errors="replace").split("\n") if (value := _parse_line(line)) is not None]


def _parse_line(line: str) -> dict[str, Any] | None:
    try:
        value = JSON.decode(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and isinstance(value.get("step"), int) else None


def find_foreign_line(path: Path) -> int | None:
    """The number of the first line that no run wrote, if there is one. The last line may be half written."""
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for number, line in enumerate(file, 1):
            if _parse_line(line) is None and (line.endswith("\n") or not line.startswith("{")):
                return number
    return None


def read_selection(path: Path, newest_bytes: int, spread: int, spread_bytes: int) -> tuple[list[dict[str, Any]], bool]:
    """Returns (objects, whether they are all of the file). Of a large file it reads the end, and from before that the
    group of samples at each of `spread` positions, about `spread_bytes` in total."""
    try:
        with open_regular_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            begin = max(0, size - newest_bytes)
            end = _lines_after(file, begin)
            while begin and not end:  # a single line is longer than that
                begin = max(0, begin - newest_bytes)
                end = _lines_after(file, begin)
            before: dict[int, bytes] = {}
            for position in _scattered(spread):
                if begin and sum(map(len, before.values())) < spread_bytes:
                    before |= _group_at(file, position * begin // spread, begin)
    except FileNotFoundError:
        return [], True
    return [*parse_lines(b"".join(lines for _, lines in sorted(before.items()))), *parse_lines(end)], not begin


def _scattered(count: int) -> list[int]:
    """0 to count - 1 in bit-reversed order, so that the first few, however many, are spread over the whole range."""
    bits = max(1, (count - 1).bit_length())
    return sorted(range(count), key=lambda number: int(f"{number:0{bits}b}"[::-1], 2))


def _lines_after(file: BinaryIO, begin: int) -> bytes:
    """The whole lines after this byte."""
    file.seek(max(0, begin - 1))
    if begin:
        file.readline()
    return file.read().rpartition(b"\n")[0]


def _group_at(file: BinaryIO, begin: int, until: int) -> dict[int, bytes]:
    """The lines of the first whole group after this byte, keyed by the byte where it begins; empty if no group begins
    before `until`."""
    file.seek(max(0, begin - 1))
    if begin:
        file.readline()
        cut = None  # the group that this byte may be in the middle of
        while file.tell() < until and (line := file.readline()):
            cut = cut or _group(line)
            if _group(line) != cut:
                file.seek(-len(line), os.SEEK_CUR)
                break
    start, found, first = file.tell(), b"", None
    while file.tell() < until and (line := file.readline()):
        first = first or _group(line)
        if _group(line) != first:
            break
        found += line
    return {start: found} if found else {}


def _group(line: bytes) -> tuple[object, object]:
    """The step and the prompt that a line belongs to."""
    value = _parse_line(line.decode(errors="replace")) or {}
    return value.get("step"), value.get("group")
