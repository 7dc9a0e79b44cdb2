"""The terminal output of a run: progress bars, one line per step, a few samples, and tables."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from ebbtide.progress import Progress, format_duration
from ebbtide.report.heartbeat import Heartbeat
from ebbtide.rollout.batch import Sample
from ebbtide.system.printable import printable, printable_lines
from ebbtide.tasks.score_message import ScoreResult

# (label, key, format): the step line, left to right.
COLUMNS = (
    ("", "seconds", "{:.2f} s"),
    ("reward", "reward", "{:.3f}"),
    ("loss", "loss", "{:+.4f}"),
    ("accuracy", "accuracy", "{:.3f}"),
    ("margin", "margin", "{:.3f}"),
    ("entropy", "entropy", "{:.3f}"),
    ("kl", "kl", "{:.4f}"),
    ("mismatch", "mismatch", "{:.1e}"),
    ("grad", "grad_norm", "{:.3f}"),
    ("lr", "lr", "{:.1e}"),
    ("", "tokens_per_second", "{:,.0f} tok/s"),
    ("peak", "peak_gib", "{:.2f} GiB"),
    ("exposed", "seconds_exposed", "{:.2f} s"),
    ("left", "left", "{}"),
)
# Columns that a narrow terminal drops, the first one first.
DROPPABLE = ("lr", "mismatch", "entropy", "seconds_exposed", "kl", "tokens_per_second", "grad_norm", "left")
PACE = 50  # steps that the estimate of the remaining time averages: enough to include evaluations and checkpoints


class FailsafeStdout:
    """stdout that drops its output once it cannot be written: neither a log on a full disk nor a pipe without a reader
    ends a run."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        try:
            return self._file.write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Redirects the file to /dev/null: what Python still buffers would fail again, at the latest when it exits."""
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._file.fileno())
        os.close(null)
        with suppress(OSError):
            os.write(2, f"the output cannot be written ({error.strerror}): the run continues without it\n".encode())


class Terminal:
    """Prints a run's output. On a terminal, progress is a bar; elsewhere it is a line after some silence."""

    def __init__(self, steps: int, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        stdout: Any = FailsafeStdout(sys.stdout)
        self.console = console or Console(file=stdout, highlight=False, soft_wrap=True)
        self._steps, self._clock = steps, clock
        self._recent: deque[tuple[int, float]] = deque(maxlen=PACE + 1)  # (step, time it was done) of the last steps
        self._heartbeat = Heartbeat(self.say, clock)
        self._bar = Bar(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
        )

    def start(self) -> None:
        if self.console.is_terminal:
            self._bar.start()
        else:
            self._heartbeat.start()

    def stop(self) -> None:
        self._bar.stop()
        self._heartbeat.stop()

    def show_progress(self, what: str) -> AbstractContextManager[Progress]:
        """Shows a progress bar while something runs; if the output is not a terminal, a line now and then."""
        return self._show_bar(what) if self.console.is_terminal else self._heartbeat.show_progress(what)

    @contextmanager
    def _show_bar(self, what: str) -> Iterator[Progress]:
        task = self._bar.add_task(what, total=None)
        try:
            yield lambda done, of: self._bar.update(task, completed=done, total=of)
        finally:
            self._bar.remove_task(task)

    def say(self, text: str, style: str = "") -> None:
        self._print(Text(printable_lines(text), style=style))

    def _print(self, what: RenderableType) -> None:
        self.console.print(what)
        self._heartbeat.note_output()

    def step_line(self, step: int, metrics: dict[str, float]) -> None:
        if step > 0:
            self._step(step, metrics)
        self.eval_line(step, metrics)

    def eval_line(self, step: int, metrics: dict[str, float]) -> None:
        """Prints the metrics of an evaluation, if there are any."""
        results = {
            key.removeprefix("evaluate/"): value
            for key, value in metrics.items()
            if key.startswith("evaluate/") and not key.startswith("evaluate/judge/")
        }
        if results:
            shown = "  ".join(f"{name} {value:.3f}" for name, value in results.items())
            self._print(Text.assemble((f"held out, after step {step}  ", "bold cyan"), shown))

    def _step(self, step: int, metrics: dict[str, float]) -> None:
        parts = self._figures(step, metrics)
        failed = sum(value for key, value in metrics.items() if key.startswith("score_failures/"))
        if failed:
            parts.append((f"  {failed:.0f} samples could not be scored", "red"))
        if metrics.get("updates_skipped"):
            parts.append((f"  {metrics['updates_skipped']:.0f} updates skipped", "red"))
        if metrics.get("samples_trained") == 0:
            why = (
                "no completion matched `task.extract`"
                if metrics.get("reward/extracted") == 0
                else "no sample carries a signal"
            )
            parts.append((f"  no update: {why}", "yellow"))
        self._print(Text.assemble(*parts))

    def _figures(self, step: int, metrics: dict[str, float]) -> list[tuple[str, str]]:
        """The columns of a step line; if the terminal is too narrow for all, those of DROPPABLE are dropped in turn."""
        known: dict[str, float | str] = {**metrics, **self._left(step, metrics)}
        columns = [column for column in COLUMNS if column[1] in known]
        width = self.console.width if self.console.is_terminal else 10**6
        parts: list[tuple[str, str]] = []
        for dropped in ("", *DROPPABLE):
            columns = [column for column in columns if column[1] != dropped]
            parts = [(f"step {step:>{len(str(self._steps))}}/{self._steps}", "bold")]
            for label, key, form in columns:
                value = (form.format(known[key]), "green" if key == "reward" else "")
                parts += [("  ", ""), (f"{label} " if label else "", "dim"), value]
            if sum(len(text) for text, _ in parts) <= width:
                break
        return parts

    def _left(self, step: int, metrics: dict[str, float]) -> dict[str, str]:
        """Estimates the remaining time from the wall-clock pace of the last steps, evaluations and saves included. The
        first step is often slow, and its own seconds are used only until there is a second one."""
        self._recent.append((step, self._clock()))
        (first, since), (_, now) = self._recent[0], self._recent[-1]
        pace = (now - since) / (step - first) if step > first else metrics["seconds"]
        return {"left": format_duration(pace * (self._steps - step))} if step < self._steps else {}

    def table(self, rows: Sequence[Sequence[str]]) -> None:
        """Prints a heading and its rows, a name and then numbers. Lines are never cut to the width of the terminal."""
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for number, row in enumerate(rows):
            cells = [
                cell.rjust(width) if column else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            self.say("  " + "  ".join(cells), "" if number else "dim")

    def samples(self, samples: Sequence[Sample]) -> None:
        table = Table(box=None, padding=(0, 2), header_style="dim")
        scored = any(sample.scored is not None for sample in samples)
        for name in ("prompt", "completion", *(("reward", "advantage") if scored else ())):
            table.add_column(name, overflow="fold", justify="left" if name in ("prompt", "completion") else "right")
        for sample in samples:
            table.add_row(
                Text(printable(_question(sample), 120)),
                (
                    Text(printable(sample.completion.text, 120))
                    if sample.completion.text
                    else Text("(empty)", style="dim")
                ),
                *(_reward_cells(sample.scored, sample.advantage) if sample.scored is not None else ()),
            )
        self._print(table)


def _question(sample: Sample) -> str:
    """What a sample answers: of an episode the whole prompt, which its environment has written."""
    return sample.prompt.text if sample.episode is not None else sample.prompt.problem.question


def _reward_cells(scored: ScoreResult, advantage: float) -> tuple[str, str]:
    return f"{scored.value:.2f}" + (f" ({scored.failure})" if scored.failure else ""), f"{advantage:+.2f}"
