"""Files with a JSON object in each line, read while another process writes them."""

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
"""JSON has no NaN: Python writes it all the same, and a browser refuses it. 1e400 is none that either could hold."""


def opened(path: Path) -> BinaryIO:
    """FileNotFoundError also of a folder, or of a pipe, which would be waited for."""
    if not path.is_file():
        raise FileNotFoundError(path)
    return path.open("rb")


class Followed:
    """A file that grows: each call reads what is new. One that was replaced or became shorter (a run that resumed) is read anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[dict[str, Any]] = []
        self._file = 0
        self._read = 0

    def read(self) -> list[dict[str, Any]]:
        try:
            with opened(self.path) as file:
                known = os.fstat(file.fileno())
                if known.st_ino != self._file or known.st_size < self._read:
                    self._file, self._read, self.lines = known.st_ino, 0, []
                file.seek(self._read)
                whole = file.read().rpartition(b"\n")[0]  # the last line may be half written
        except FileNotFoundError:
            self._read, self.lines = 0, []
            return self.lines
        if whole:
            self._read += len(whole) + 1
            self.lines += parsed(whole)
        return self.lines


def parsed(data: bytes) -> list[dict[str, Any]]:
    """The objects of whole lines; what is none (a line cut by a crash) is left out."""
    return [value for line in data.decode(errors="replace").split("\n") if (value := _of_a_step(line)) is not None]


def _of_a_step(line: str) -> dict[str, Any] | None:
    try:
        value = JSON.decode(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and isinstance(value.get("step"), int) else None


def foreign(path: Path) -> int | None:
    """The number of the first line that no run wrote. The last one may be half written."""
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for number, line in enumerate(file, 1):
            if _of_a_step(line) is None and (line.endswith("\n") or not line.startswith("{")):
                return number
    return None


def some_of(path: Path, newest_bytes: int, spread: int, spread_bytes: int) -> tuple[list[dict[str, Any]], bool]:
    """(objects, whether they are all). A large file is not read whole: its end is, and the group of samples at each of
    `spread` places before that, about `spread_bytes` of them."""
    try:
        with opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            begin = max(0, size - newest_bytes)
            end = _from(file, begin)
            while begin and not end:  # one line is longer than all that
                begin = max(0, begin - newest_bytes)
                end = _from(file, begin)
            before: dict[int, bytes] = {}
            for place in _scattered(spread):
                if begin and sum(map(len, before.values())) < spread_bytes:
                    before |= _group_at(file, place * begin // spread, begin)
    except FileNotFoundError:
        return [], True
    return [*parsed(b"".join(lines for _, lines in sorted(before.items()))), *parsed(end)], not begin


def _scattered(count: int) -> list[int]:
    """0 to count - 1, so that however few are taken they lie all over it: in the order of their bits turned around."""
    bits = max(1, (count - 1).bit_length())
    return sorted(range(count), key=lambda number: int(f"{number:0{bits}b}"[::-1], 2))


def _from(file: BinaryIO, begin: int) -> bytes:
    """The whole lines from this byte on."""
    file.seek(max(0, begin - 1))
    if begin:
        file.readline()
    return file.read().rpartition(b"\n")[0]


def _group_at(file: BinaryIO, begin: int, until: int) -> dict[int, bytes]:
    """The lines of the first whole group from this byte on, by the byte where it begins; none where that is not before
    `until`."""
    file.seek(max(0, begin - 1))
    if begin:
        file.readline()
        cut = None  # the group in whose middle this byte may be
        while file.tell() < until and (line := file.readline()):
            cut = cut or _group(line)
            if _group(line) != cut:
                file.seek(-len(line), os.SEEK_CUR)
                break
    place, found, first = file.tell(), b"", None
    while file.tell() < until and (line := file.readline()):
        first = first or _group(line)
        if _group(line) != first:
            break
        found += line
    return {place: found} if found else {}


def _group(line: bytes) -> tuple[object, object]:
    """Which prompt of which step a line is of."""
    value = _of_a_step(line.decode(errors="replace")) or {}
    return value.get("step"), value.get("group")
