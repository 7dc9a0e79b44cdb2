"""What a person sees: progress while something runs, one line per step, a few samples, and where everything went."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ebbtide.batch import Sample
from ebbtide.printable import printable, printable_lines

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
)


SPARE = ("lr", "mismatch", "entropy", "seconds_exposed", "kl", "tokens_per_second", "grad_norm")


class Terminal:
    def __init__(self, steps: int, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._steps = steps
        self._bar = Progress(
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

    def stop(self) -> None:
        self._bar.stop()

    @contextmanager
    def doing(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """A line with a bar while something runs; gone when it is done."""
        task = self._bar.add_task(what, total=None)
        try:
            yield lambda done, of: self._bar.update(task, completed=done, total=of)
        finally:
            self._bar.remove_task(task)

    def say(self, text: str, style: str = "") -> None:
        self.console.print(Text(printable_lines(text), style=style))

    def step_line(self, step: int, metrics: dict[str, float]) -> None:
        parts = self._figures(step, metrics)
        failed = sum(value for key, value in metrics.items() if key.startswith("score_failures/"))
        if failed:
            parts.append((f"  {failed:.0f} samples could not be scored", "red"))
        if metrics.get("updates_skipped"):
            parts.append((f"  {metrics['updates_skipped']:.0f} updates skipped", "red"))
        if metrics.get("samples_trained") == 0:
            why = "no completion matched `task.extract`" if metrics.get("reward/extracted") == 0 else "no sample carries a signal"
            parts.append((f"  no update: {why}", "yellow"))
        if step > 0:
            self.console.print(Text.assemble(*parts))
        tried = {key.removeprefix("evaluate/"): value for key, value in metrics.items() if key.startswith("evaluate/")}
        if tried:
            shown = "  ".join(f"{name} {value:.3f}" for name, value in tried.items())
            self.console.print(Text.assemble((f"held out, after step {step}  ", "bold cyan"), shown))

    def _figures(self, step: int, metrics: dict[str, float]) -> list[tuple[str, str]]:
        """The step's columns; on a terminal that is too narrow for all of them, those it can do without go first."""
        columns = [column for column in COLUMNS if column[1] in metrics]
        room = self.console.width if self.console.is_terminal else 10**6
        parts: list[tuple[str, str]] = []
        for spare in ("", *SPARE):
            columns = [column for column in columns if column[1] != spare]
            parts = [(f"step {step:>{len(str(self._steps))}}/{self._steps}", "bold")]
            for label, key, form in columns:
                value = (form.format(metrics[key]), "green" if key == "reward" else "")
                parts += [("  ", ""), (f"{label} " if label else "", "dim"), value]
            if sum(len(text) for text, _ in parts) <= room:
                break
        return parts

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
                Text(printable(sample.prompt.text, 60)),
                Text(printable(sample.completion.text, 120)) if sample.completion.text else Text("(empty)", style="dim"),
                f"{sample.scored.value:.2f}" + (f" ({sample.scored.failure})" if sample.scored.failure else ""),
                f"{sample.advantage:+.2f}",
            )
        self.console.print(table)
