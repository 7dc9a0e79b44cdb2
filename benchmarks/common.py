"""What every benchmark shares: timing by events, the table it prints, the file it writes."""

from __future__ import annotations

import datetime
import json
import os
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Row:
    case: str
    metric: str
    value: float
    unit: str
    commit: str = ""
    """Where it is not the file's: of an earlier run whose rows were kept."""
    reason: str = ""
    """Why the value is what it is, where a table says so."""


def seconds(work: Callable[[], object], repeats: int = 5, warm_up: int = 1) -> float:
    """Median seconds of `work` on the device, whatever streams it uses: the device is idle before and after."""
    taken: list[float] = []
    for number in range(warm_up + repeats):
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        torch.cuda.synchronize()
        end.record()
        end.synchronize()
        if number >= warm_up:
            taken.append(start.elapsed_time(end) / 1000)
    return statistics.median(taken)


def kept(name: str, cases: Callable[[str], bool]) -> list[Row]:
    """The rows of an earlier run whose case is not among `cases`: for a benchmark that is run in parts."""
    file = RESULTS / f"{name}.json"
    if not file.exists():
        return []
    found = json.loads(file.read_text())
    rows = [Row(**{"commit": found["commit"], **row}) for row in found["rows"]]
    return [row for row in rows if not cases(row.case)]


def beginning(text: str | tuple[str, ...]) -> Callable[[str], bool]:
    """For `kept`: the cases that begin so."""
    return lambda case: case.startswith(text)


def add(name: str, rows: list[Row]) -> None:
    """Prints rows and writes them to benchmarks/results/NAME.json, in place of those of the same cases. What was tried
    on a tiny model is not written."""
    done = {row.case for row in rows}
    for row in rows:
        print(f"{row.case:<56}  {row.metric:<28} {row.value:>12.4g} {row.unit}", flush=True)
    if "EBBTIDE_TINY" not in os.environ:
        save(name, [*kept(name, done.__contains__), *rows], prints=False)


def save(
    name: str, rows: list[Row], *, prints: bool = True, gpu: str | None = None, version: str | None = None
) -> None:
    """Writes benchmarks/results/NAME.json, and prints the table. `gpu` and `version` of torch: of another machine, on
    which the runs were that the rows are of."""
    if prints:
        width = max(len(row.case) for row in rows)
        for row in rows:
            print(f"{row.case:<{width}}  {row.metric:<28} {row.value:>12.4g} {row.unit}")
    RESULTS.mkdir(exist_ok=True)
    commit = _commit()
    result = {
        "name": name,
        "gpu": gpu or (torch.cuda.get_device_name() if torch.cuda.is_available() else "none"),
        "torch": version or torch.__version__,
        "commit": commit,
        "date": datetime.date.today().isoformat(),
        "rows": [
            {
                key: value
                for key, value in asdict(row).items()
                if key not in ("commit", "reason") or value not in ("", commit)
            }
            for row in rows
        ],
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


def _commit() -> str:
    """The commit measured; EBBTIDE_COMMIT says it where the code runs without its repository."""
    if "EBBTIDE_COMMIT" in os.environ:
        return os.environ["EBBTIDE_COMMIT"]
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
