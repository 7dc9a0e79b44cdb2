"""metrics.jsonl for the page: every step's figures as columns, and some steps' phases."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

MOST_POINTS = 10_000
"""Steps in a curve."""
MOST_STEPS = 200
"""Steps whose phases can be looked at: the newest half of them, and others spread over those before."""
BY_PHASE = {
    "seconds": "seconds",
    "seconds_exposed": "exposed",
    "peak_gib": "peak",
    "moved_gib": "moved",
}


def columns(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Step -> figure for every key that is not of one phase; None where a step has no such figure."""
    every = math.ceil(len(lines) / MOST_POINTS) or 1
    kept = lines[::-every][::-1]  # the newest is always among them
    seen: set[str] = set()
    keys = ["step"]
    for line in kept:
        new = [key for key in line if key not in seen]
        seen.update(new)
        keys += [key for key in new if key != "step" and not _of_phase(key)]
    return {key: [_figure(line.get(key)) for line in kept] for key in keys}


def _of_phase(key: str) -> bool:
    kind, _, phase = key.partition("/")
    return bool(phase) and kind in (*BY_PHASE, "reserved_gib", "device_gib", "seconds_moved")


def _figure(value: object) -> float | None:
    """Six digits of it, as no screen shows more; None for what is no number."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")


def phases(line: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Phase -> seconds, exposed, peak, moved, and under `device` the GiB of each holding."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in line.items():
        kind, *names = key.split("/")
        figure = _figure(value)
        if figure is None:
            continue
        if kind in BY_PHASE and len(names) == 1:
            found.setdefault(names[0], {"device": {}})[BY_PHASE[kind]] = figure
        elif kind == "device_gib" and len(names) == 2:
            found.setdefault(names[0], {"device": {}})["device"][names[1]] = figure
    return found


def looked_at(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The steps whose phases the page can show. The evaluation before the first step is none."""
    steps = [line for line in lines if "seconds" in line]
    if len(steps) > MOST_STEPS:
        newest = MOST_STEPS // 2
        steps = [*_spread(steps[:-newest], MOST_STEPS - newest), *steps[-newest:]]
    return [{"step": line["step"], "phases": phases(line)} for line in steps]


def middle(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The step that took the median of all seconds: a real one, so that its figures add up."""
    steps = sorted((line for line in lines if _figure(line.get("seconds")) is not None), key=lambda line: float(line["seconds"]))
    if not steps:
        return None
    line = steps[len(steps) // 2]
    return {"step": line["step"], "phases": phases(line)}


def _spread(items: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    return [items[place * (len(items) - 1) // (count - 1)] for place in range(count)]
