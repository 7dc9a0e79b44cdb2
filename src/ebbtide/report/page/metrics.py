"""metrics.jsonl for the page: the metrics of every step as columns, and the phases of some steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

MOST_POINTS = 10_000
"""The most steps in a curve."""
MOST_POINTS_OF_PHASES = 2_000
"""The most steps in a curve of one phase; there are about a hundred such curves."""
MOST_STEPS = 200
"""The most steps whose phases the page shows: half of them are the newest, the others are spread over the rest."""
BY_PHASE = {
    "seconds": "seconds",
    "seconds_exposed": "exposed",
    "peak_gib": "peak",
    "moved_gib": "moved",
}
WORK = ("seconds", "seconds/evaluate", "seconds/save")
"""The keys that add up to a run's time: `seconds` is a step without its evaluation and its checkpoint."""


def build_tables(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The curves of whole steps, and those of single phases, which may have fewer points."""
    time = elapsed_seconds(lines)
    keys = list(dict.fromkeys(key for line in lines for key in line if key != "step"))
    whole, of_phases = [key for key in keys if not _is_of_phase(key)], [key for key in keys if _is_of_phase(key)]
    return [_table(lines, time, whole, MOST_POINTS), _table(lines, time, of_phases, MOST_POINTS_OF_PHASES)]


def _table(lines: Sequence[Mapping[str, Any]], time: Sequence[float], keys: Sequence[str], most: int) -> dict[str, Any]:
    """Step, time and the value of each key per line; None where a line lacks the key."""
    kept = _thinned(lines, most)
    return {
        "step": [lines[index]["step"] for index in kept],
        "time": [time[index] for index in kept],
        "columns": {key: [to_number(lines[index].get(key)) for index in kept] for key in keys},
    }


def _thinned(lines: Sequence[Mapping[str, Any]], most: int) -> list[int]:
    """The indices of at most `most` lines: the newest, and from each stretch of lines before it the one with the most
    keys, as few steps have an evaluation."""
    newest = len(lines) - 1
    every = math.ceil(newest / (most - 1)) or 1
    rows = (range(index, min(index + every, newest)) for index in range(0, newest, every))
    kept = [max(row, key=lambda index: (len(lines[index]), index)) for row in rows]
    return [*kept, newest] if lines else []


def elapsed_seconds(lines: Sequence[Mapping[str, Any]]) -> list[float]:
    """Seconds of work until each step was done. Wall-clock time would include the pause before a run was resumed."""
    spent = accumulate(sum(to_number(line.get(key)) or 0 for key in WORK) for line in lines)
    return [round(seconds, 3) for seconds in spent]


def _is_of_phase(key: str) -> bool:
    kind, _, phase = key.partition("/")
    return bool(phase) and kind in (*BY_PHASE, "reserved_gib", "device_gib", "seconds_moved")


def to_number(value: object) -> float | None:
    """The value rounded to six digits, as no screen shows more; None if it is not a number."""
    try:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return None
    except OverflowError:  # an integer too large for a float, which is all that a browser has
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")


def phase_metrics(line: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Maps each phase to its seconds, exposed, peak, moved, and under `device` the GiB of each holding."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in line.items():
        kind, *names = key.split("/")
        figure = to_number(value)
        if figure is None:
            continue
        if kind in BY_PHASE and len(names) == 1:
            found.setdefault(names[0], {"device": {}})[BY_PHASE[kind]] = figure
        elif kind == "device_gib" and len(names) == 2:
            found.setdefault(names[0], {"device": {}})["device"][names[1]] = figure
    return found


def select_steps(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The steps whose phases the page can show. The evaluation before the first step is not one of them."""
    steps = [line for line in lines if "seconds" in line]
    if len(steps) > MOST_STEPS:
        newest = MOST_STEPS // 2
        steps = [*_spread(steps[:-newest], MOST_STEPS - newest), *steps[-newest:]]
    return [{"step": line["step"], "phases": phase_metrics(line)} for line in steps]


def median_step(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The step with the median seconds: an actual step, so that its values add up."""
    timed = (line for line in lines if to_number(line.get("seconds")) is not None)
    steps = sorted(timed, key=lambda line: float(line["seconds"]))
    if not steps:
        return None
    line = steps[len(steps) // 2]
    return {"step": line["step"], "phases": phase_metrics(line)}


def _spread(items: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    return [items[index * (len(items) - 1) // (count - 1)] for index in range(count)]
