"""Every type of causal language model that transformers has, as a tiny copy on the CPU: which are trained, with which
engine, which are refused and why, and how far log-probs and gradients are from transformers' own.

    PYTHONPATH=src:tests python benchmarks/families.py [TYPE ...] [--jobs N] [--docs]

Each type is examined in a process of its own, with a time limit (tests/family_survey.py has what is done with one, and
tests/tiny_families.py how the copies are made). Types that are not named keep the rows of an earlier run. `--docs`
writes the table of docs/families.md from all rows, after a run of the types that are named, if any are. The exit status
is 1 if a type crashes or differs: Ebbtide trains a model correctly, or refuses it in a sentence.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path

import torch
from common import RESULTS, Row, kept, save
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from family_survey import CRASHES, DIFFERS, OUTCOMES, Finding, examine
from tiny_families import VARIANTS

DOCS = Path(__file__).parent.parent / "docs" / "families.md"
SECONDS = 120
"""The time limit for a type; most take two seconds."""
BEGIN, END = "<!-- written by benchmarks/families.py -->", "<!-- end -->"


def survey(names: Sequence[str], jobs: int) -> Iterator[Finding]:
    """What becomes of each type, in the order in which they are done."""
    context = multiprocessing.get_context("fork")  # What is imported takes several times longer than a type.
    gc.freeze()  # Otherwise every process goes through all of it again.
    waiting, running = list(names), dict[Connection, tuple[str, ForkProcess]]()
    while waiting or running:
        while waiting and len(running) < jobs:
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_examine, args=(waiting[0], theirs))
            process.start()
            theirs.close()
            running[mine] = (waiting.pop(0), process)
        for ready in wait(list(running)):
            assert isinstance(ready, Connection)
            name, process = running.pop(ready)
            try:
                finding = ready.recv()
            except EOFError:
                process.join()
                hung = process.exitcode == -14
                why = f"it took more than {SECONDS} seconds" if hung else f"its process ended with {process.exitcode}"
                finding = Finding(name, CRASHES, why)
            process.join()
            yield finding


def _examine(name: str, results: Connection) -> None:
    """In a process of its own, whose alarm clock ends it."""
    import signal

    signal.alarm(SECONDS)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    with tempfile.TemporaryDirectory(prefix="ebbtide-families-") as folder:
        results.send(examine(name, Path(folder)))


def rows_of(finding: Finding) -> list[Row]:
    outcome = Row(finding.name, "outcome", OUTCOMES.index(finding.outcome), finding.outcome, reason=finding.reason)
    units = {name: "of their norm" if name == "gradients" else "nats" for name in finding.figures}
    return [outcome, *(Row(finding.name, name, value, units[name]) for name, value in finding.figures.items())]


def table(rows: Sequence[Row]) -> str:
    """The table of docs/families.md."""
    found = sorted((row for row in rows if row.metric == "outcome"), key=lambda row: row.case)
    types = Counter(row.unit for row in found if row.case not in VARIANTS)
    counts = "; ".join(f"{types[one]} {one}" for one in OUTCOMES if types[one])
    lines = [f"{types.total()} types: {counts}. Rows with a comma are variants of a type, and not counted.", ""]
    lines += ["| type | outcome | why |", "|---|---|---|"]
    lines += [f"| {_shown(row.case)} | {row.unit} | {row.reason.replace('|', chr(92) + '|')} |" for row in found]
    return "\n".join(lines)


def _shown(name: str) -> str:
    kind, comma, variant = name.partition(",")
    return f"`{kind}`{comma}{variant}"


def write_docs(rows: Sequence[Row]) -> None:
    text = DOCS.read_text()
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    DOCS.write_text(f"{before}\n{table(rows)}\n{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--docs", action="store_true")
    arguments = parser.parse_args()
    known = sorted([*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS])
    if unknown := set(arguments.types) - set(known):
        parser.error(f"transformers has no causal language model of type {', '.join(sorted(unknown))}")
    names = arguments.types or ([] if arguments.docs else known)
    before = {row.case: row.unit for row in kept("families", lambda case: False) if row.metric == "outcome"}
    findings = []
    for finding in survey(names, arguments.jobs):
        findings.append(finding)
        was = before.get(finding.name, finding.outcome)
        changed = "" if was == finding.outcome else f"(was: {was}) "
        print(f"{finding.name:<26} {finding.outcome:<26} {changed}{finding.reason}", flush=True)
    done = {finding.name for finding in findings}
    rows = kept("families", lambda case: case in done or case not in known)
    rows += [row for finding in findings for row in rows_of(finding)]
    rows.sort(key=lambda row: known.index(row.case))
    if findings:
        save("families", rows, prints=False)
        print(table(rows).splitlines()[0], f"in {RESULTS / 'families.json'}")
    if arguments.docs:
        write_docs(rows)
    return int(any(row.unit in (CRASHES, DIFFERS) for row in rows if row.metric == "outcome"))


if __name__ == "__main__":
    sys.exit(main())
