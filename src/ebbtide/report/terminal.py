"""What a person sees: progress while something runs, one line per step, a few samples, and where everything went."""

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

from ebbtide.batch import Sample
from ebbtide.printable import printable, printable_lines
from ebbtide.progress import Progress, duration
from ebbtide.report.heartbeat import Heartbeat

# (label, key, format): the step line, left to right.
COLUMNS = (
    ("", "seconds", "{:.2f} s"),
    ("reward", "reward", "{:.3f}"),
    ("loss", "loss", "{:+.4f}"),
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


SPARE = ("lr", "mismatch", "entropy", "seconds_exposed", "kl", "tokens_per_second", "grad_norm", "left")
PACE = 50  # steps whose pace tells how long the rest will take: enough to have evaluations and checkpoints among them


class Lasting:
    """stdout while it can be written: neither a log on a full disk nor a pipe without a reader ends a run."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        try:
            return self._file.write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        """What Python still holds of it would fail again, at the latest when it exits."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._file.fileno())
        os.close(nowhere)
        with suppress(OSError):
            os.write(2, f"the output cannot be written ({error.strerror}): the run goes on without it\n".encode())


class Terminal:
    def __init__(self, steps: int, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        lasting: Any = Lasting(sys.stdout)
        self.console = console or Console(file=lasting, highlight=False, soft_wrap=True)
        self._steps, self._clock = steps, clock
        self._ended: deque[tuple[int, float]] = deque(maxlen=PACE + 1)  # the last steps, and when each was done
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

    def doing(self, what: str) -> AbstractContextManager[Progress]:
        """A bar while something runs, gone when it is done; where the output is no terminal, a line now and then."""
        return self._shown(what) if self.console.is_terminal else self._heartbeat.doing(what)

    @contextmanager
    def _shown(self, what: str) -> Iterator[Progress]:
        task = self._bar.add_task(what, total=None)
        try:
            yield lambda done, of: self._bar.update(task, completed=done, total=of)
        finally:
            self._bar.remove_task(task)

    def say(self, text: str, style: str = "") -> None:
        self._print(Text(printable_lines(text), style=style))

    def _print(self, what: RenderableType) -> None:
        self.console.print(what)
        self._heartbeat.spoke()

    def step_line(self, step: int, metrics: dict[str, float]) -> None:
        if step > 0:
            self._step(step, metrics)
        self.held_out(step, metrics)

    def held_out(self, step: int, metrics: dict[str, float]) -> None:
        """What an evaluation found, where there was one."""
        tried = {key.removeprefix("evaluate/"): value for key, value in metrics.items() if key.startswith("evaluate/")}
        if tried:
            shown = "  ".join(f"{name} {value:.3f}" for name, value in tried.items())
            self._print(Text.assemble((f"held out, after step {step}  ", "bold cyan"), shown))

    def _step(self, step: int, metrics: dict[str, float]) -> None:
        parts = self._figures(step, metrics)
        failed = sum(value for key, value in metrics.items() if key.startswith("score_failures/"))
        if failed:
            parts.append((f"  {failed:.0f} samples could not be scored", "red"))
        if metrics.get("updates_skipped"):
            parts.append((f"  {metrics['updates_skipped']:.0f} updates skipped", "red"))
        if metrics.get("samples_trained") == 0:
            why = "no completion matched `task.extract`" if metrics.get("reward/extracted") == 0 else "no sample carries a signal"
            parts.append((f"  no update: {why}", "yellow"))
        self._print(Text.assemble(*parts))

    def _figures(self, step: int, metrics: dict[str, float]) -> list[tuple[str, str]]:
        """The step's columns; on a terminal that is too narrow for all of them, those it can do without go first."""
        known: dict[str, float | str] = {**metrics, **self._left(step, metrics)}
        columns = [column for column in COLUMNS if column[1] in known]
        room = self.console.width if self.console.is_terminal else 10**6
        parts: list[tuple[str, str]] = []
        for spare in ("", *SPARE):
            columns = [column for column in columns if column[1] != spare]
            parts = [(f"step {step:>{len(str(self._steps))}}/{self._steps}", "bold")]
            for label, key, form in columns:
                value = (form.format(known[key]), "green" if key == "reward" else "")
                parts += [("  ", ""), (f"{label} " if label else "", "dim"), value]
            if sum(len(text) for text, _ in parts) <= room:
                break
        return parts

    def _left(self, step: int, metrics: dict[str, float]) -> dict[str, str]:
        """How long the rest will take at the pace of the last steps, with all that is between them. A first step is
        often slow: its own seconds count until there is another."""
        self._ended.append((step, self._clock()))
        (begun, since), (_, now) = self._ended[0], self._ended[-1]
        pace = (now - since) / (step - begun) if step > begun else metrics["seconds"]
        return {"left": duration(pace * (self._steps - step))} if step < self._steps else {}

    def table(self, rows: Sequence[Sequence[str]]) -> None:
        """A heading and its rows, a name and then figures; never cut to the width of the terminal."""
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for number, row in enumerate(rows):
            cells = [cell.rjust(width) if place else cell.ljust(width) for place, (cell, width) in enumerate(zip(row, widths, strict=True))]
            self.say("  " + "  ".join(cells), "" if number else "dim")

    def samples(self, samples: Sequence[Sample]) -> None:
        table = Table(box=None, padding=(0, 2), header_style="dim")
        for name in ("prompt", "completion", "reward", "advantage"):
            table.add_column(name, overflow="fold", justify="left" if name in ("prompt", "completion") else "right")
        for sample in samples:
            table.add_row(
                Text(printable(sample.prompt.problem.question, 120)),
                Text(printable(sample.completion.text, 120)) if sample.completion.text else Text("(empty)", style="dim"),
                f"{sample.scored.value:.2f}" + (f" ({sample.scored.failure})" if sample.scored.failure else ""),
                f"{sample.advantage:+.2f}",
            )
        self._print(table)
