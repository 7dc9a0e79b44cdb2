"""The sources of a step's rollouts: fresh ones, partial rollouts (`rollout.partial.extra_prompts`), whose groups may
continue in later steps, and those that `rollout.save_to` wrote and `rollout.replay` reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)

from ebbtide.config.root import Config
from ebbtide.errors import UserError
from ebbtide.memory.residency import Residency
from ebbtide.progress import Progress
from ebbtide.rollout.batch import make_requests, training_sampling_params
from ebbtide.rollout.engine import Completion, Engine, PreemptingEngine, Request
from ebbtide.rollout.paged.cache_costs import kept_blocks, kept_sequences
from ebbtide.rollout.paged.engine import PagedEngine
from ebbtide.rollout.paged.session import SampleState
from ebbtide.rollout.prompts import Prompt
from ebbtide.system.jsonl import append_lines, drop_lines_after
from ebbtide.tasks.sampler import Order

Groups = tuple[list[Prompt], list[list[Completion]]]
"""Prompts, and the completions of each."""


class RolloutSource(Protocol):
    """A source of rollouts."""

    def next(self, step: int, progress: Progress) -> Groups:
        """Returns the groups of a step."""
        ...

    def metrics(self) -> dict[str, float]:
        """Returns metrics of the last step, for metrics.jsonl."""
        ...

    def state(self) -> list[dict[str, Any]]:
        """Returns the unfinished groups, for a checkpoint."""
        ...

    def restore(self, state: Sequence[dict[str, Any]]) -> None:
        """Resumes the unfinished groups of a checkpoint."""
        ...


def _refuse_unfinished(groups: Sequence[dict[str, Any]]) -> None:
    """Refuses the unfinished groups of a checkpoint, for a source that has none."""
    if groups:
        raise UserError(
            f"the checkpoint has {len(groups)} unfinished groups of completions, which need partial rollouts, and"
            " this run has `rollout.partial.extra_prompts: 0`: resume with the value of the checkpoint's run"
        )


class FreshRollouts:
    """Fresh rollouts: every step has prompts of its own, and all of their completions end in it."""

    def __init__(self, config: Config, engine: Engine, sampler: Order[Prompt]) -> None:
        self._config, self._engine, self._sampler = config, engine, sampler

    def next(self, step: int, progress: Progress) -> Groups:
        return self.draw(self._config.rollout.prompts_per_step, (step,), progress)

    def draw(self, count: int, names: Sequence[object], progress: Progress) -> Groups:
        """Returns groups of the next `count` prompts, with seeds of their own by these names."""
        config = self._config
        prompts = self._sampler.draw(count)
        group_requests = make_requests(prompts, config.rollout.group_size, config.seed, *names)
        return prompts, self._engine.generate(group_requests, training_sampling_params(config.rollout), progress)

    def metrics(self) -> dict[str, float]:
        engine = self._engine
        return {"samples_preempted": float(engine.preempted)} if isinstance(engine, PreemptingEngine) else {}

    def state(self) -> list[dict[str, Any]]:
        return []

    def restore(self, state: Sequence[dict[str, Any]]) -> None:
        _refuse_unfinished(state)


@dataclass(frozen=True)
class _PartialGroup:
    """A prompt and its samples, which may be unfinished."""

    prompt: Prompt
    request: Request
    step: int
    """The step that started it."""
    samples: list[SampleState]

    @property
    def ended(self) -> bool:
        return all(sample.finish is not None for sample in self.samples)


class PartialRollouts:
    """Partial rollouts: a step ends when `prompts_per_step` groups are complete, and the unfinished ones continue in
    the next step, under the updated weights."""

    def __init__(
        self,
        config: Config,
        engine: PagedEngine,
        sampler: Order[Prompt],
        prompts: Sequence[Prompt],
        residency: Residency,
        rows: int,
    ) -> None:
        self._config, self._engine, self._sampler = config, engine, sampler
        rollout = config.rollout
        self._prompts, self._residency, self._sampling = prompts, residency, training_sampling_params(rollout)
        self._max_groups, self._rows = rollout.prompts_per_step + rollout.partial.extra_prompts, rows
        keep = rollout.partial.kv_cache == "keep"
        self._persistent = engine.persistent_session(
            self._max_groups, rollout.max_prompt_tokens, rollout.group_size, rollout.max_new_tokens, keep=keep
        )
        self._groups: list[_PartialGroup] = []
        self._ages: list[int] = []
        self._preempted = 0
        sizes = engine.cache_tensor_bytes(kept_blocks(rollout, engine.block_size), kept_sequences(rollout))
        self._holdings = list(sizes)
        for name in sizes:
            residency.register(name, partial(self._persistent.kept_of, name))
            if keep and residency.plan.is_ever_offloaded(name):
                residency.arena.reserve(sizes[name])

    def next(self, step: int, progress: Progress) -> Groups:
        config = self._config
        prompts = self._sampler.draw(max(0, self._max_groups - len(self._groups)))
        group_requests = make_requests(prompts, config.rollout.group_size, config.seed, step)
        for prompt, request in zip(prompts, group_requests, strict=True):
            samples = self._persistent.session.add(request, self._sampling)
            self._groups.append(_PartialGroup(prompt, request, step, samples))
        for name in self._holdings:
            self._residency.need(name)
        with self._persistent.resumed() as session:
            for name in self._holdings:
                self._residency.forget(name)
            before = session.preempted
            while (ended := sum(group.ended for group in self._groups)) < config.rollout.prompts_per_step:
                progress(ended, config.rollout.prompts_per_step)
                session.step()
            self._preempted = session.preempted - before
        done = [group for group in self._groups if group.ended][: config.rollout.prompts_per_step]
        self._groups = [group for group in self._groups if group not in done]
        self._ages = [step - group.step for group in done]
        return [group.prompt for group in done], [[sample.completion() for sample in group.samples] for group in done]

    def metrics(self) -> dict[str, float]:
        return {
            "samples_preempted": float(self._preempted),
            "unfinished_groups": float(len(self._groups)),
            "staleness": sum(self._ages) / len(self._ages),
            "staleness_max": float(max(self._ages)),
        }

    def state(self) -> list[dict[str, Any]]:
        indices = {id(prompt): index for index, prompt in enumerate(self._prompts)}
        return [
            {
                "prompt": indices[id(group.prompt)],
                "tokens": group.prompt.tokens,
                "step": group.step,
                "seeds": group.request.seeds,
                "samples": [[one.tokens, one.logprobs, one.plain_logprobs, one.finish] for one in group.samples],
            }
            for group in self._groups
        ]

    def restore(self, state: Sequence[dict[str, Any]]) -> None:
        session, rollout = self._persistent.session, self._config.rollout
        for saved in state:
            if len(saved["seeds"]) != rollout.group_size:
                raise UserError(
                    f"the checkpoint has unfinished groups of {len(saved['seeds'])} completions, and"
                    f" `rollout.group_size` is {rollout.group_size}: resume with `rollout.group_size:"
                    f" {len(saved['seeds'])}`"
                )
            if any(
                len(tokens) >= rollout.max_new_tokens and finish is None for tokens, _, _, finish in saved["samples"]
            ):
                raise UserError(
                    "the checkpoint has unfinished completions that are already as long as `rollout.max_new_tokens:"
                    f" {rollout.max_new_tokens}`: resume with the value of the checkpoint's run"
                )
            if any(token >= self._rows for tokens, *_ in saved["samples"] for token in tokens):
                raise UserError(
                    "the checkpoint has unfinished completions with tokens that the model does not have: resume from"
                    " another checkpoint"
                )
            index = saved["prompt"]
            if index >= len(self._prompts) or self._prompts[index].tokens != saved["tokens"]:
                raise UserError(
                    "the checkpoint has unfinished completions of prompts that this `task` does not have at the same"
                    " index: resume with the task of the checkpoint's run"
                )
            prompt = self._prompts[index]
            request = Request(prompt.tokens, saved["seeds"])
            samples = session.add(request, self._sampling)
            for sample, generated in zip(samples, saved["samples"], strict=True):
                session.restore_sample(sample, *generated)
            self._groups.append(_PartialGroup(prompt, request, saved["step"], samples))


class RecordedRollouts:
    """The rollouts of another source, which it also writes to a file (`rollout.save_to`)."""

    def __init__(self, source: RolloutSource, config: Config, prompts: Sequence[Prompt], path: str) -> None:
        self._source, self._path, self._started = source, Path(path).expanduser(), False
        self._temperature = config.rollout.temperature
        self._indices = {id(prompt): index for index, prompt in enumerate(prompts)}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch()
        except OSError as error:
            raise UserError(f"`rollout.save_to: {path}` cannot be written: {error.strerror}") from None

    def next(self, step: int, progress: Progress) -> Groups:
        prompts, groups = self._source.next(step, progress)
        if not self._started:  # lines of an earlier run are kept only up to where this one resumes
            self._started = True
            drop_lines_after(self._path, step - 1)
        lines = [
            {
                "step": step,
                "temperature": self._temperature,
                "place": self._indices[id(prompt)],
                "prompt": prompt.tokens,
                "completions": [asdict(one) for one in group],
            }
            for prompt, group in zip(prompts, groups, strict=True)
        ]
        append_lines(self._path, lines)
        return prompts, groups

    def metrics(self) -> dict[str, float]:
        return self._source.metrics()

    def state(self) -> list[dict[str, Any]]:
        return self._source.state()

    def restore(self, state: Sequence[dict[str, Any]]) -> None:
        self._source.restore(state)


class _SavedCompletion(BaseModel):
    """A completion as `rollout.save_to` writes it. It is validated, as a file may come from anywhere."""

    model_config = ConfigDict(strict=True)

    tokens: Annotated[list[NonNegativeInt], Field(min_length=1)]
    logprobs: list[FiniteFloat]
    plain_logprobs: list[FiniteFloat]
    finish: Literal["stop", "length"]
    text: str

    @model_validator(mode="after")
    def _one_for_each_token(self) -> _SavedCompletion:
        if not len(self.tokens) == len(self.logprobs) == len(self.plain_logprobs):
            raise ValueError("it does not have one log-prob for each token")
        return self


class _SavedGroup(BaseModel):
    """One line of the file: a prompt and its completions."""

    model_config = ConfigDict(strict=True)

    step: PositiveInt
    place: NonNegativeInt
    prompt: list[NonNegativeInt]
    completions: list[_SavedCompletion]


class ReplayedRollouts:
    """The rollouts of a file that `rollout.save_to` wrote (`rollout.replay`)."""

    def __init__(self, config: Config, prompts: Sequence[Prompt], path: str, rows: int) -> None:
        self._config, self._path, self._rows = config, path, rows
        self._steps: dict[int, list[tuple[Prompt, list[Completion]]]] = {}
        try:
            with Path(path).expanduser().open(encoding="utf-8") as file:
                for line in map(json.loads, file):
                    self._check_line(line)
                    prompt = prompts[line["place"]] if line["place"] < len(prompts) else None
                    if prompt is None or prompt.tokens != line["prompt"]:
                        raise UserError(
                            f"`rollout.replay: {path}` has a prompt that this `task`, `seed` and tokenizer do not have"
                            " at the same index: replay it with those of the run that wrote it"
                        )
                    self._steps.setdefault(line["step"], []).append(
                        (prompt, [Completion(**one) for one in line["completions"]])
                    )
        except OSError as error:
            raise UserError(f"`rollout.replay: {path}` cannot be read: {error.strerror}") from None
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"]))
            raise UserError(
                f"`rollout.replay: {path}` is not a file that `rollout.save_to` wrote: {where}: {problem['msg']}"
            ) from None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"`rollout.replay: {path}` is not a file that `rollout.save_to` wrote: {error}") from None

        for step in range(1, config.train.steps + 1):
            self._check(step)

    def _check_line(self, line: dict[str, Any]) -> None:
        """Checks a line against the config: training relies on its lengths, and on log-probs at its temperature."""
        rollout = self._config.rollout
        _SavedGroup.model_validate(line)
        if any(token >= self._rows for one in line["completions"] for token in one["tokens"]):
            raise ValueError("a token that the model does not have")
        longest = max((len(one["tokens"]) for one in line["completions"]), default=0)
        if (sampled_at := line.get("temperature", rollout.temperature)) != rollout.temperature:
            what, key = f"completions sampled at temperature {sampled_at}", "rollout.temperature"
        elif len(line["prompt"]) > rollout.max_prompt_tokens:
            what, key = f"a prompt of {len(line['prompt'])} tokens", "rollout.max_prompt_tokens"
        elif longest > rollout.max_new_tokens:
            what, key = f"a completion of {longest} tokens", "rollout.max_new_tokens"
        else:
            return
        value = getattr(rollout, key.removeprefix("rollout."))
        raise UserError(
            f"`rollout.replay: {self._path}` has {what}, and `{key}` is {value}: replay it with the value"
            " of the run that wrote it"
        )

    def _check(self, step: int) -> None:
        """Checks that the file has as many completions of a step as the config says."""
        groups, rollout = self._steps.get(step, []), self._config.rollout
        if len(groups) != rollout.prompts_per_step or any(len(group) != rollout.group_size for _, group in groups):
            sizes = f"{len(groups)} x {len(groups[0][1])}" if groups else "no"
            fix = (
                f"set train.steps={step - 1}"
                if step > 1
                else "change `rollout.prompts_per_step` or `rollout.group_size`, or replay another file"
            )
            raise UserError(
                f"`rollout.replay: {self._path}` has {sizes} completions of step {step}, and {rollout.prompts_per_step}"
                f" x {rollout.group_size} are wanted (it has steps"
                f" {', '.join(map(str, sorted(self._steps))) or 'none'}): {fix}"
            )

    def next(self, step: int, progress: Progress) -> Groups:
        prompts, groups = zip(*self._steps[step], strict=True)
        return list(prompts), list(groups)

    def metrics(self) -> dict[str, float]:
        return {}

    def state(self) -> list[dict[str, Any]]:
        return []

    def restore(self, state: Sequence[dict[str, Any]]) -> None:
        _refuse_unfinished(state)


def build_source(
    config: Config,
    engine: Engine,
    sampler: Order[Prompt],
    prompts: Sequence[Prompt],
    residency: Residency,
    *,
    rows: int,
    writes: bool = True,
) -> RolloutSource:
    """Builds the source that the config asks for. Token ids must be below `rows`, the rows of the embedding. Where
    several ranks have the same rollouts, only one `writes` them to `rollout.save_to`."""
    rollout = config.rollout
    if rollout.replay is not None:
        return ReplayedRollouts(config, prompts, rollout.replay, rows)
    source: RolloutSource = FreshRollouts(config, engine, sampler)
    if rollout.partial.extra_prompts:
        assert isinstance(engine, PagedEngine)  # the config checks this
        source = PartialRollouts(config, engine, sampler, prompts, residency, rows)
    return (
        source if rollout.save_to is None or not writes else RecordedRollouts(source, config, prompts, rollout.save_to)
    )
