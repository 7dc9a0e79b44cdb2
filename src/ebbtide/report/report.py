"""Everything a run shows and writes, behind the few calls that the loop makes."""

from __future__ import annotations

import logging
import shlex
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch import nn
from transformers import PreTrainedTokenizerBase as Tokenizer

from ebbtide.batch import Sample
from ebbtide.checkpoint.store import Saved, add_metrics
from ebbtide.config import changed
from ebbtide.config.tree import Config
from ebbtide.errors import UserError
from ebbtide.evaluate import due
from ebbtide.memory.meter import GIB, Meter
from ebbtide.memory.residency import Residency
from ebbtide.planning import RunPlan
from ebbtide.printable import printable
from ebbtide.progress import Progress
from ebbtide.report.folder import RunFolder
from ebbtide.report.log import LogFile
from ebbtide.report.page.build import installed, write
from ebbtide.report.pieces import Pieces
from ebbtide.report.sinks import Sinks
from ebbtide.report.terminal import Terminal
from ebbtide.report.versions import start

MOST_REASONS = 5  # a scorer can fail in a new way for every sample


class Report:
    """Use as a context manager: it opens the run folder, and closes everything however the run ends."""

    def __init__(
        self,
        config: Config,
        source: str,
        terminal: Terminal | None = None,
        resumed: Saved | None = None,
        overrides: Sequence[str] = (),
    ) -> None:
        """`overrides`: of the run that a rehearsal is of."""
        self._config, self._source, self.resumed, self._overrides = config, source, resumed, overrides
        self.terminal = terminal or Terminal(config.train.steps)
        self.folder = RunFolder(config, resumed)
        self._loggers = [logging.getLogger(name) for name in ("ebbtide", "torch.distributed")]
        self._log = LogFile(self.folder.path / "log.txt", self.terminal.say)
        self._sinks = Sinks(self.terminal.say)
        self._meter: Meter | None = None
        self._plan: RunPlan | None = None
        self._samples: Sequence[Sample] = ()
        self._pieces: Pieces | None = None
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._seen: Counter[str] = Counter()
        self._told: set[str] = set()
        self.steps_done = resumed.step if resumed is not None else 0
        self._lacks = False
        """The last step's evaluation was due, and the run did not wait for it."""

    def __enter__(self) -> Report:
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
        self.folder.close(discard=kind is not None and issubclass(kind, UserError | KeyboardInterrupt) and self._may_go)

    @property
    def _may_go(self) -> bool:
        """Nothing in the folder would be missed."""
        return not self.began and self.resumed is None and not self.folder.history.exists()

    def leave(self) -> str:
        """Ends in the middle of anything but a step; the last words."""
        self.terminal.stop()
        self.folder.close(discard=self._may_go)
        return "stopped" if self.began else "stopped before the first step: nothing was written"

    def working(self, what: str) -> AbstractContextManager[Progress]:
        """Something before the first step that may take seconds."""
        return self.terminal.doing(what)

    def phase(self, name: str) -> AbstractContextManager[Progress]:
        """A phase of the step under way."""
        return self.terminal.doing(f"step {min(self.steps_done + 1, self._config.train.steps)}/{self._config.train.steps}  {name}")

    def begin(
        self, model: nn.Module, tokenizer: Tokenizer, residency: Residency, notes: Sequence[str], *, prompts: int, tests: int
    ) -> None:
        self._meter, self._pieces = residency.meter, Pieces(tokenizer)
        self.folder.write_start(start(self.steps_done, residency.device))
        self._sinks.open(self._config, self.folder.path)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        first = next(model.parameters())
        rollout = self._config.rollout
        self.terminal.say(
            f"{self._source}: {type(model).__name__}, {parameters:,} parameters in {str(first.dtype).removeprefix('torch.')} on {first.device}",
            "bold",
        )
        self.terminal.say(
            f"{prompts:,} problems, {tests} held-out ones to evaluate on, {rollout.prompts} x {rollout.samples} samples a step, {self._config.loss.kind} for {self._config.train.steps} steps; writing to {self.folder.path}"
        )

        if self.resumed is not None:
            self.terminal.say(f"going on after step {self.resumed.step}, from {self.resumed.path}")
        if self.folder.aside:
            self.terminal.say(
                f"later checkpoints are kept aside, and yours to remove: {', '.join(str(path) for path in self.folder.aside)}"
            )
        for note in notes:
            self.terminal.say(note)
        if residency.plan.moves or residency.plan.gathers or any(size.host for size in residency.holdings().values()):
            self.terminal.say(f"\nwhat lives where in each phase, with {residency.host_bytes / GIB:.2f} GiB of host memory taken:")
            self.terminal.table(residency.plan.rows(residency.holdings()))

    def planned(self, config: Config, plan: RunPlan | None) -> None:
        """What the run will do and is foreseen to take: the config as it will run, and the plan beside it."""
        self._config, self._plan = config, plan
        self.folder.write_config(config)
        if plan is not None:
            self.folder.write_plan(plan.as_json())

    def step(self, step: int, metrics: dict[str, float], samples: Sequence[Sample]) -> None:
        if samples:
            tokens = sum(len(sample.prompt.tokens) + len(sample.completion.tokens) for sample in samples)
            metrics = {**metrics, "tokens": tokens, "tokens_per_second": tokens / metrics["seconds"]}
            mfu = self._plan.mfu(samples, metrics.get("seconds/train", 0.0)) if self._plan is not None else None
            metrics |= {"mfu": mfu} if mfu is not None else {}
        self.folder.write_metrics({"step": step, **metrics})
        if self._config.report.rollouts:
            self.folder.write_rollouts(self._lines(step, samples))
        self._sinks.log(step, metrics)
        self.terminal.step_line(step, metrics)
        self._first, self._last = metrics | self._first, self._last | metrics
        self._samples = samples or self._samples
        self._seen.update(metrics.keys())
        self._say_failures(samples)
        self.steps_done = step
        self._lacks = due(self._config, step) and not any(key.startswith("evaluate/") for key in metrics)
        if self._lacks:
            self.terminal.say("  its evaluation is left to the run that goes on from its checkpoint")
        every = self._config.report.samples_every
        if samples and (step == self._config.train.steps or (every and step % every == 0)):
            self.terminal.samples(_spread(samples, 3))

    def evaluated(self, step: int, figures: dict[str, float]) -> None:
        """Before the first step; or of the step that the run goes on from, whose evaluation its stop did not wait for.

        Then the step's line, and its checkpoint, are as if it had.
        """
        if self.resumed is None:
            return self.step(step, figures, [])
        self.folder.complete_metrics(step, figures)
        add_metrics(self.resumed, {key: value for key, value in figures.items() if key.startswith("evaluate/")})
        self._sinks.log(step, figures)
        self.terminal.held_out(step, figures)
        self._first, self._last = figures | self._first, self._last | figures
        self._seen.update(figures.keys())

    def skipped(self, parameter: str | None) -> None:
        """An update that was not made, and the first parameter whose gradient was not finite."""
        if parameter is not None:
            self.terminal.say(f"  update skipped: the gradient is not finite, first in {parameter}", "red")

    @property
    def began(self) -> bool:
        """Something was written."""
        return bool(self._last)

    def _lines(self, step: int, samples: Sequence[Sample]) -> list[dict[str, object]]:
        """What rollouts.jsonl says of each sample, and of its tokens while there is room for them."""
        group, room, lines = self._config.rollout.samples, self._config.report.token_logprobs, []
        for number, sample in enumerate(samples):
            line, done = _line(step, number // group, number % group, sample), sample.completion
            room -= len(done.tokens)
            if room >= 0 and self._pieces is not None:
                line["token_chars"] = self._pieces.lengths(done.tokens, done.text)
                line["logprobs"] = [round(value, 4) for value in done.logprobs]
            lines.append(line)
        return lines

    def _say_failures(self, samples: Sequence[Sample]) -> None:
        """Why samples could not be scored: each reason once a run."""
        for message in dict.fromkeys(sample.scored.message for sample in samples if sample.scored.failure):
            if message not in self._told and len(self._told) < MOST_REASONS:
                self._told.add(message)
                self.terminal.say(f"  not scored: {printable(message, 300)}", "red")

    def end(self, outcome: str, *, rehearsed: bool = False) -> None:
        """The last words: what changed, where everything is, what to try next."""
        say = self.terminal.say
        say(f"\n{outcome}", "bold")
        for name in ("reward", *(key for key in self._last if key.startswith("evaluate/"))):
            if name in self._last:
                before = f"{self._first[name]:.3f} -> " if self._seen[name] > 1 else ""
                say(f"  {name.replace('evaluate/', 'held-out ')}: {before}{self._last[name]:.3f}")
        if self._meter is not None and self._meter.run:
            say("\nthe phases of the whole run, GiB at each one's peak:")
            self.terminal.table(self._meter.table())
        self._against_plan()
        if installed():
            try:
                write([self.folder.path], self.folder.path / "report.html")
            except UserError as error:  # the run itself is done, and its files are there
                say(str(error), "red")
        say(f"\nwritten to {self.folder.path}:")
        for entry in sorted(self.folder.path.iterdir()):
            if not entry.name.startswith("."):
                say(f"  {entry.name}{'/' if entry.is_dir() else ''}")
        if self._config.rollout.save_to is not None:
            say(f"and every completion to {self._config.rollout.save_to}")
        say("\nnext:")
        commands = self._after_rehearsal() if rehearsed else self._after_run()
        width = max(len(command) for command, meaning in commands if meaning)
        for command, meaning in commands:
            say(f"  {command:<{width}}   {meaning}".rstrip())

    def _after_rehearsal(self) -> list[tuple[str, str]]:
        """(command, what it does)."""
        train, rollout, cluster = ["ebbtide", "train", self._source], self._config.rollout, self._config.cluster
        commands = [(shlex.join([*train, *self._overrides]), "the run itself")]
        if rollout.save_to is not None and self.steps_done:
            changes: dict[str, object] = {"rollout.ahead": 0} if rollout.ahead else {}  # what a replay does not go with
            changes |= {"rollout.serve_port": "null"} if rollout.serve_port is not None else {}
            changes |= {"cluster.rollout_gpus": 0} if cluster is not None and cluster.rollout_gpus else {}
            changes |= {"rollout.replay": rollout.save_to, "train.steps": self.steps_done}
            commands.append((shlex.join([*train, *changed(self._overrides, changes)]), "train on these completions"))
        return commands

    def _after_run(self) -> list[tuple[str, str]]:
        folder, rollout = self.folder.path, self._config.rollout
        commands = []
        if rollout.replay is None:  # whose prompts come with its seed
            taken = " rollout.save_to=null" if rollout.save_to is not None else ""
            commands.append((f"ebbtide train {folder / 'config.yaml'} seed={self._config.seed + 1}{taken}", "the same with another seed"))
        if (self.steps_done < self._config.train.steps or self._lacks) and (folder / "checkpoints").exists():
            commands.append((f"ebbtide train {folder / 'config.yaml'} resume={folder}", "go on from the checkpoint"))
        commands.append((f"ebbtide config {folder / 'config.yaml'}", "every setting, with its meaning"))
        if installed():
            commands.append((f"ebbtide report {folder} --serve", "curves, memory and completions as a page"))
        else:
            commands.append(("pip install 'ebbtide[report]'", "then every run writes itself as a page, report.html"))
        if (folder / "checkpoints").exists():
            commands.append((f"ebbtide export {folder} OUT", "the weights as a Hugging Face folder"))
        if (folder / "tensorboard").exists():
            commands.append((f"tensorboard --logdir {folder}", ""))
        return commands

    def _against_plan(self) -> None:
        """The last step, predicted and measured. On a CPU the peak is that of the whole process, and no plan says anything of that."""
        if self._plan is None or self._meter is None or not self._meter.on_gpu:
            return
        table, far_off = self._plan.against(self._samples, self._last)
        if table:
            self.terminal.say("\nthe last step, predicted for the lengths it had, and measured:")
            self.terminal.table(table)
        for said in far_off:
            self.terminal.say(f"  {said}")


def _line(step: int, group: int, number: int, sample: Sample) -> dict[str, object]:
    return {
        "step": step,
        "group": group,
        "sample": number,
        "prompt": sample.prompt.text,
        "answer": sample.prompt.problem.answer,
        "completion": sample.completion.text,
        "reward": sample.scored.value,
        "parts": sample.scored.parts,
        "advantage": sample.advantage,
        "finish": sample.completion.finish,
        "tokens": len(sample.completion.tokens),
        "failure": sample.scored.failure,
        "failure_message": sample.scored.message,
    }


def _spread(samples: Sequence[Sample], count: int) -> list[Sample]:
    """A few samples from the worst reward to the best."""
    ordered = sorted(samples, key=lambda sample: sample.scored.value)
    return [ordered[i * (len(ordered) - 1) // max(1, count - 1)] for i in range(min(count, len(ordered)))]
