"""metrics.jsonl for the page: every step's figures as columns, and some steps' phases."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

MOST_POINTS = 10_000
"""Steps in a curve."""
MOST_POINTS_OF_PHASES = 2_000
"""Steps in a curve of one phase: there are some hundred of those."""
MOST_STEPS = 200
"""Steps whose phases can be looked at: the newest half of them, and others spread over those before."""
BY_PHASE = {
    "seconds": "seconds",
    "seconds_exposed": "exposed",
    "peak_gib": "peak",
    "moved_gib": "moved",
}
WORK = ("seconds", "seconds/evaluate", "seconds/save")
"""What a run's time is made of: `seconds` is of a step without its evaluation and its checkpoint."""


def tables(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The curves: those of whole steps, and those of one phase, which may have fewer points."""
    time = elapsed(lines)
    keys = list(dict.fromkeys(key for line in lines for key in line if key != "step"))
    whole, of_phases = [key for key in keys if not _of_phase(key)], [key for key in keys if _of_phase(key)]
    return [_table(lines, time, whole, MOST_POINTS), _table(lines, time, of_phases, MOST_POINTS_OF_PHASES)]


def _table(lines: Sequence[Mapping[str, Any]], time: Sequence[float], keys: Sequence[str], most: int) -> dict[str, Any]:
    """Step, time, and every key's figure at each; None where a step has no such figure."""
    kept = _thinned(lines, most)
    return {
        "step": [lines[place]["step"] for place in kept],
        "time": [time[place] for place in kept],
        "columns": {key: [number(lines[place].get(key)) for place in kept] for key in keys},
    }


def _thinned(lines: Sequence[Mapping[str, Any]], most: int) -> list[int]:
    """The places of at most so many lines: the newest, and of several in a row before it the one with the most figures,
    as few steps are evaluated."""
    newest = len(lines) - 1
    every = math.ceil(newest / (most - 1)) or 1
    rows = (range(place, min(place + every, newest)) for place in range(0, newest, every))
    kept = [max(row, key=lambda place: (len(lines[place]), place)) for row in rows]
    return [*kept, newest] if lines else []


def elapsed(lines: Sequence[Mapping[str, Any]]) -> list[float]:
    """Seconds of work until each step was done. A clock would count the pause before a run was resumed as well."""
    spent = accumulate(sum(number(line.get(key)) or 0 for key in WORK) for line in lines)
    return [round(seconds, 3) for seconds in spent]


def _of_phase(key: str) -> bool:
    kind, _, phase = key.partition("/")
    return bool(phase) and kind in (*BY_PHASE, "reserved_gib", "device_gib", "seconds_moved")


def number(value: object) -> float | None:
    """Six digits of it, as no screen shows more; None for what is no number."""
    try:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return None
    except OverflowError:  # an integer that no float can hold, as a browser's numbers are
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")


def phases(line: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Phase -> seconds, exposed, peak, moved, and under `device` the GiB of each holding."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in line.items():
        kind, *names = key.split("/")
        figure = number(value)
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
    timed = (line for line in lines if number(line.get("seconds")) is not None)
    steps = sorted(timed, key=lambda line: float(line["seconds"]))
    if not steps:
        return None
    line = steps[len(steps) // 2]
    return {"step": line["step"], "phases": phases(line)}


def _spread(items: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    return [items[place * (len(items) - 1) // (count - 1)] for place in range(count)]
