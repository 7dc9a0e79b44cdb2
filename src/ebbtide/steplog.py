"""Files with a JSON object of some step in each line."""

from __future__ import annotations

import json
from pathlib import Path


def forget_after(file: Path, step: int) -> None:
    """Drops the lines of steps that will be done again, and one that was cut in the middle. Line by line: rollouts of a long run may be larger than memory."""
    if not file.exists():
        return
    rewritten = file.with_suffix(".rewritten")
    with file.open("rb") as lines, rewritten.open("wb") as kept:
        for line in lines:
            try:
                if line.endswith(b"\n") and json.loads(line)["step"] <= step:
                    kept.write(line)
            except (ValueError, LookupError, TypeError, RecursionError):  # not an object of a step
                continue
    rewritten.replace(file)
