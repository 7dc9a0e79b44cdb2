"""Files with a JSON object of some step in each line."""

from __future__ import annotations

import json
from pathlib import Path


def forget_after(file: Path, step: int) -> None:
    """Drops the lines of steps that will be done again, and one that was cut in the middle."""
    if not file.exists():
        return
    kept = []
    for line in file.read_bytes().splitlines(keepends=True):
        try:
            if line.endswith(b"\n") and json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError):
            continue
    rewritten = file.with_suffix(".rewritten")
    rewritten.write_bytes(b"".join(kept))
    rewritten.replace(file)
