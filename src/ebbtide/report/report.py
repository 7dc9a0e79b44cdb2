"""Everything that a run shows and writes, behind the few calls that the loop makes."""

from __future__ import annotations

import logging
import shlex
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Self

from torch import nn
from transformers import PreTrainedTokenizerBase as Tokenizer

from ebbtide.checkpoint.store import Checkpoint, add_metrics
from ebbtide.config import replace_overrides
from ebbtide.config.root import Config
from ebbtide.errors import UserError
from ebbtide.memory.meter import Meter
from ebbtide.memory.residency import Residency
from ebbtide.planner.run_plan import RunPlan
from ebbtide.progress import Progress
from ebbtide.report.episode_turns import turn_lines
from ebbtide.report.folder import RunFolder
from ebbtide.report.log import LogFile
from ebbtide.report.page.build import plotly_is_installed, write_page
from ebbtide.report.sinks import Sinks
from ebbtide.report.terminal import Terminal
from ebbtide.report.token_spans import TokenSpans
from ebbtide.report.versions import describe_start
from ebbtide.rollout.batch import Sample
from ebbtide.system.printable import printable
from ebbtide.system.units import gib

MOST_REASONS = 5  # scoring errors shown per run; a scorer can fail in a new way for every sample


class Report:
    """The report of a run, a `RankReport` of rank 0. It is a context manager that closes everything however the run
    ends."""

    def __init__(
        self,
        config: Config,
        source: str,
        terminal: Terminal | None = None,
        resumed: Checkpoint | None = None,
        overrides: Sequence[str] = (),
    ) -> None:
        """`overrides`: for a rehearsal, the settings on the command line of the run that it rehearses."""
        self._config, self._source, self.resumed, self._overrides = config, source, resumed, overrides
        self.terminal = terminal or Terminal(config.train.steps)
        self.folder = RunFolder(config, resumed)
        self._loggers = [logging.getLogger(name) for name in ("ebbtide", "torch.distributed")]
        self._log = LogFile(self.folder.path / "log.txt", self.terminal.say)
        self._sinks = Sinks(self.terminal.say)
        self._meter: Meter | None = None
        self._plan: RunPlan | None = None
        self._samples: Sequence[Sample] = ()
        self._lengths: Sequence[tuple[int, int]] = ()
        self._token_spans: TokenSpans | None = None
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._seen: Counter[str] = Counter()
        self._shown_failures: set[str] = set()
        self.steps_done = resumed.step if resumed is not None else 0
        self._early_notes: list[str] | None = []
        """Notes from before the run is introduced (`begin`), which are shown with it; None from then on."""
        self._eval_missing = False
        """Whether the evaluation that was due at the last step was skipped, as the run has to stop."""

    def __enter__(self) -> Self:
        self.terminal.start()
        for logger in self._loggers:
            logger.addHandler(self._log)
            logger.setLevel(self._config.run.logging_level.upper())
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.terminal.stop()
        self._sinks.close()
        for logger in self._loggers:
            logger.removeHandler(self._log)
            logger.setLevel(logging.NOTSET)
        self._log.close()
        self.folder.close(
            discard=kind is not None and issubclass(kind, UserError | KeyboardInterrupt) and self._discardable
        )

    @property
    def _discardable(self) -> bool:
        """Whether the folder holds nothing that a user would miss."""
        return not self.has_begun and self.resumed is None and not self.folder.history.exists()

    def close_before_first_step(self) -> str:
        """Closes the report for a stop before the first step, from a signal handler. Returns the message to print."""
        self.terminal.stop()
        self.folder.close(discard=self._discardable)
        return "stopped" if self.has_begun else "stopped before the first step: nothing was written"

    def working(self, what: str) -> AbstractContextManager[Progress]:
        """Shows progress of work before the first step that may take seconds."""
        return self.terminal.show_progress(what)

    def phase(self, name: str) -> AbstractContextManager[Progress]:
        """Shows progress of a phase of the current step."""
        return self.terminal.show_progress(
            f"step {min(self.steps_done + 1, self._config.train.steps)}/{self._config.train.steps}  {name}"
        )

    def note(self, text: str) -> None:
        """Shows something that a user should know. Before `begin`, it waits for the lines that say what the run is."""
        if self._early_notes is None:
            self.terminal.say(text)
        else:
            self._early_notes.append(text)

    def warn(self, text: str) -> None:
        """Shows at once what a user should not overlook."""
        self.terminal.say(text, "bold yellow")

    def begin(self, model: nn.Module, tokenizer: Tokenizer, residency: Residency, about: str) -> None:
        """Opens the sinks and prints what the run is, the notes so far, and the plan of its holdings."""
        self._meter, self._token_spans = residency.meter, TokenSpans(tokenizer)
        self.folder.write_versions(describe_start(self.steps_done, residency.device))
        self._sinks.open(self._config, self.folder.path)
        # It imports transformers, as the model has already.
        from ebbtide.model.quantized_layers import count_parameters

        parameters = count_parameters(model)
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        some = f" ({trained:,} of them trained)" if trained < parameters else ""
        first, settings = next(model.parameters()), self._config.model
        kind = next(one.dtype for one in model.parameters() if one.is_floating_point())
        ends = ", embedding and head in float8" if settings.base_embeddings else ""
        base = f", its frozen blocks in {settings.base}{ends}," if settings.base is not None else ""
        self.terminal.say(
            f"{self._source}: {type(model).__name__}, {parameters:,} parameters{some} in"
            f" {str(kind).removeprefix('torch.')}{base} on {first.device}",
            "bold",
        )
        self.terminal.say(f"{about} for {self._config.train.steps} steps; writing to {self.folder.path}")

        if self.resumed is not None:
            self.terminal.say(f"resuming after step {self.resumed.step}, from {self.resumed.path}")
        if self.folder.set_aside_checkpoints:
            self.terminal.say(
                "later checkpoints were renamed and are yours to remove:"
                f" {', '.join(str(path) for path in self.folder.set_aside_checkpoints)}"
            )
        notes, self._early_notes = self._early_notes or [], None
        for text in notes:
            self.note(text)
        if (
            residency.plan.moves_anything
            or residency.plan.gathers_weights
            or any(size.host for size in residency.holdings().values())
        ):
            self.terminal.say(
                f"\nwhat is where in each phase ({gib(residency.host_bytes):.2f} GiB of host memory are used):"
            )
            self.terminal.table(residency.plan.table_rows(residency.holdings()))

    def set_plan(self, config: Config, plan: RunPlan | None) -> None:
        """Writes the config as it will run, with everything decided, and, if there is one, the plan with its
        predictions."""
        self._config, self._plan = config, plan
        self.folder.write_config(config)
        if plan is not None:
            self.folder.write_plan(plan.as_json())

    def step(
        self, step: int, metrics: dict[str, float], samples: Sequence[Sample], lengths: Sequence[tuple[int, int]] = ()
    ) -> None:
        """Writes and shows a step that is done. `lengths`: (tokens without loss, tokens with loss) of each sequence
        that was trained on."""
        if samples:
            tokens = sum(len(sample.prompt.tokens) + len(sample.completion.tokens) for sample in samples)
            metrics = {**metrics, "tokens": tokens}
        if "tokens" in metrics and metrics.get("seconds"):
            metrics = {**metrics, "tokens_per_second": metrics["tokens"] / metrics["seconds"]}
        if self._plan is not None and (mfu := self._plan.mfu(lengths, metrics.get("seconds/train", 0.0))) is not None:
            metrics = {**metrics, "mfu": mfu}
        self.folder.write_metrics({"step": step, **metrics})
        if self._config.report.rollouts:
            self.folder.write_rollouts(self._lines(step, samples))
        self._sinks.log(step, metrics)
        self.terminal.step_line(step, metrics)
        self._first, self._last = metrics | self._first, self._last | metrics
        if lengths or samples:
            self._samples, self._lengths = samples, lengths
        self._seen.update(metrics.keys())
        self._say_failures(samples)
        self.steps_done = step
        self._eval_missing = self._config.is_eval_due(step) and not any(key.startswith("evaluate/") for key in metrics)
        if self._eval_missing:
            self.terminal.say("  its evaluation is left to the run that resumes from its checkpoint")
        every = self._config.report.samples_every
        if samples and (step == self._config.train.steps or (every and step % every == 0)):
            self.terminal.samples(_spread(samples, 3))

    def note_evaluation(self, step: int, figures: dict[str, float]) -> None:
        """Writes and shows the evaluation before the first step, or, after resuming, the one that the stopped run
        skipped: that one is added to the metrics of its step and of its checkpoint."""
        if self.resumed is None:
            return self.step(step, figures, [])
        self.folder.complete_metrics(step, figures)
        add_metrics(self.resumed, {key: value for key, value in figures.items() if key.startswith("evaluate/")})
        self._sinks.log(step, figures)
        self.terminal.eval_line(step, figures)
        self._first, self._last = figures | self._first, self._last | figures
        self._seen.update(figures.keys())

    def note_skipped_update(self, parameter: str | None) -> None:
        """Shows a skipped update. `parameter` is the first whose gradient was not finite; None if none was skipped."""
        if parameter is not None:
            self.terminal.say(f"  update skipped: the gradient is not finite, first in {parameter}", "red")

    @property
    def path(self) -> Path:
        """The run folder."""
        return self.folder.path

    @property
    def has_begun(self) -> bool:
        """Whether metrics have been written."""
        return bool(self._last)

    def _lines(self, step: int, samples: Sequence[Sample]) -> list[dict[str, object]]:
        """The lines of rollouts.jsonl, with log-probs per token for the first `report.token_logprobs` tokens."""
        group, room, lines = self._config.rollout.group_size, self._config.report.token_logprobs, []
        for number, sample in enumerate(samples):
            line, completion = _line(step, number // group, number % group, sample), sample.completion
            room -= len(completion.tokens)
            spans = self._token_spans if room >= 0 else None
            if sample.episode is not None:
                line["turns"] = turn_lines(sample.episode, sample.scored, spans)
            elif spans is not None:
                line["token_chars"] = spans.lengths(completion.tokens, completion.text)
                line["logprobs"] = [round(value, 4) for value in completion.logprobs]
            lines.append(line)
        return lines

    def _say_failures(self, samples: Sequence[Sample]) -> None:
        """Shows why samples could not be scored, each reason once per run."""
        failed = [sample.scored for sample in samples if sample.scored is not None and sample.scored.failure]
        for message in dict.fromkeys(one.message for one in failed):
            if message not in self._shown_failures and len(self._shown_failures) < MOST_REASONS:
                self._shown_failures.add(message)
                self.terminal.say(f"  not scored: {printable(message, 300)}", "red")

    def summarize_run(self, outcome: str, *, rehearsed: bool = False) -> None:
        """Ends the progress display and prints the summary: what changed, the phases, where everything is, and what to
        run next."""
        self.terminal.stop()
        say = self.terminal.say
        say(f"\n{outcome}", "bold")
        for name in ("reward", *(key for key in self._last if key.startswith("evaluate/"))):
            if name in self._last and not name.startswith("evaluate/judge/"):
                before = f"{self._first[name]:.3f} -> " if self._seen[name] > 1 else ""
                say(f"  {name.replace('evaluate/', 'held-out ')}: {before}{self._last[name]:.3f}")
        if self._meter is not None and self._meter.run_rows:
            say("\nphases of the whole run, with the GiB at the peak of each:")
            self.terminal.table(self._meter.table_rows())
        self._compare_with_plan()
        if plotly_is_installed():
            try:
                write_page([self.folder.path], self.folder.path / "report.html")
            except UserError as error:  # the run is done and its other files are written
                say(str(error), "red")
        say(f"\nwritten to {self.folder.path}:")
        for entry in sorted(self.folder.path.iterdir()):
            if not entry.name.startswith("."):
                say(f"  {entry.name}{'/' if entry.is_dir() else ''}")
        if self._config.rollout.save_to is not None:
            say(f"every completion is in {self._config.rollout.save_to}")
        say("\nnext:")
        commands = self._after_rehearsal() if rehearsed else self._after_run()
        width = max(len(command) for command, meaning in commands if meaning)
        for command, meaning in commands:
            say(f"  {command:<{width}}   {meaning}".rstrip())

    def _after_rehearsal(self) -> list[tuple[str, str]]:
        """The next commands, as (command, what it does)."""
        train, rollout, parallel = ["ebbtide", "train", self._source], self._config.rollout, self._config.parallel
        commands = [(shlex.join([*train, *self._overrides]), "the run itself")]
        if rollout.save_to is not None and self.steps_done:
            # The settings that exclude a replay are switched off.
            changes: dict[str, object] = {}
            changes |= {"rollout.partial.extra_prompts": 0} if rollout.partial.extra_prompts else {}
            changes |= {"rollout.serve_port": "null"} if rollout.serve_port is not None else {}
            changes |= {"parallel.rollout_gpus": 0} if parallel is not None and parallel.rollout_gpus else {}
            changes |= {"rollout.replay": rollout.save_to, "train.steps": self.steps_done}
            commands.append(
                (shlex.join([*train, *replace_overrides(self._overrides, changes)]), "train on these completions")
            )
        return commands

    def _after_run(self) -> list[tuple[str, str]]:
        """The next commands, as (command, what it does)."""
        folder, rollout = self.folder.path, self._config.rollout
        commands = []
        if rollout.replay is None:  # a replay has the prompts of its own seed
            save_to = " rollout.save_to=null" if rollout.save_to is not None else ""
            commands.append(
                (
                    f"ebbtide train {folder / 'config.yaml'} seed={self._config.seed + 1}{save_to}",
                    "the same with another seed",
                )
            )
        if (self.steps_done < self._config.train.steps or self._eval_missing) and (folder / "checkpoints").exists():
            commands.append((f"ebbtide train {folder / 'config.yaml'} resume={folder}", "resume from the checkpoint"))
        commands.append((f"ebbtide config {folder / 'config.yaml'}", "every setting, with its meaning"))
        if plotly_is_installed():
            commands.append((f"ebbtide report {folder} --serve", "curves, memory and completions as a page"))
        else:
            commands.append(("pip install 'ebbtide[report]'", "to get every run as a page, report.html"))
        if (folder / "checkpoints").exists():
            lora = self._config.model.lora is not None
            what = "the adapters, in PEFT's format" if lora else "the weights as a Hugging Face folder"
            commands.append((f"ebbtide export {folder} OUT", what))
        if (folder / "tensorboard").exists():
            commands.append((f"tensorboard --logdir {folder}", ""))
        return commands

    def _compare_with_plan(self) -> None:
        """Prints the last step, predicted and measured. Does nothing on a CPU: the peak there is that of the whole
        process, which no plan predicts."""
        if self._plan is None or self._meter is None or not self._meter.on_gpu:
            return
        table, far_off = self._plan.compare(self._samples, self._lengths, self._last)
        if table:
            self.terminal.say("\nthe last step, predicted for the lengths it had, and measured:")
            self.terminal.table(table)
        for warning in far_off:
            self.terminal.say(f"  {warning}")


def _line(step: int, group: int, number: int, sample: Sample) -> dict[str, object]:
    scored = sample.scored
    return {
        "step": step,
        "group": group,
        "sample": number,
        **({"task": sample.prompt.problem.task} if sample.prompt.problem.task is not None else {}),
        "prompt": sample.prompt.text,
        "answer": sample.prompt.problem.answer,
        "completion": sample.completion.text,
        "reward": scored.value if scored is not None else None,
        "parts": scored.parts if scored is not None else {},
        "advantage": sample.advantage,
        "finish": sample.completion.finish,
        "tokens": len(sample.completion.tokens),
        "failure": scored.failure if scored is not None else None,
        "failure_message": scored.message if scored is not None else "",
    }


def _spread(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Picks a few samples, from the worst reward to the best."""
    ordered = sorted(samples, key=lambda sample: sample.scored.value if sample.scored is not None else 0.0)
    return [ordered[i * (len(ordered) - 1) // max(1, count - 1)] for i in range(min(count, len(ordered)))]
