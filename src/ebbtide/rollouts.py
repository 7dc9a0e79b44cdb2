"""What a step trains on: prompts from the sampler, completions from the engine. With `rollout.ahead`, groups are begun ahead of need and outlast the step that began them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeInt, PositiveInt, ValidationError, model_validator

from ebbtide.batch import requests, training_sampling
from ebbtide.config.tree import Config
from ebbtide.errors import UserError
from ebbtide.memory.residency import Residency
from ebbtide.progress import Progress
from ebbtide.rollout.engine import Completion, Engine, Preempting, Request
from ebbtide.rollout.paged.engine import PagedEngine, Told
from ebbtide.rollout.paged.schedule import most_blocks
from ebbtide.rollout.prompts import Prompt
from ebbtide.steplog import add, forget_after
from ebbtide.tasks.sampler import Sampler

Groups = tuple[list[Prompt], list[list[Completion]]]
"""Prompts, and the completions of each."""


class Rollouts:
    """Every step with prompts of its own, which all end in it."""

    def __init__(self, config: Config, engine: Engine, sampler: Sampler[Prompt]) -> None:
        self._config, self._engine, self._sampler = config, engine, sampler

    def next(self, step: int, progress: Progress) -> Groups:
        config = self._config
        asked = self._sampler.take(config.rollout.prompts)
        wanted = requests(asked, config.rollout.samples, config.seed, step)
        return asked, self._engine.generate(wanted, training_sampling(config.rollout), progress)

    def figures(self) -> dict[str, float]:
        """For metrics.jsonl."""
        return {"samples_preempted": float(self._engine.preempted)} if isinstance(self._engine, Preempting) else {}

    def state(self) -> list[dict[str, Any]]:
        """What is under way, for a checkpoint."""
        return []

    def restore(self, state: Sequence[dict[str, Any]]) -> None:
        """Takes up what was under way."""
        if state:
            raise UserError(
                f"the checkpoint has {len(state)} groups of completions under way, and with `rollout.ahead: 0` none go on: resume with the value it was made with"
            )


@dataclass(frozen=True)
class _Group:
    prompt: Prompt
    request: Request
    step: int
    """In which it was begun."""
    told: list[Told]

    @property
    def ended(self) -> bool:
        return all(one.finish is not None for one in self.told)


class LastingRollouts(Rollouts):
    """A step ends when enough of the groups under way have ended; the others go on in the next one."""

    def __init__(
        self,
        config: Config,
        engine: PagedEngine,
        sampler: Sampler[Prompt],
        prompts: Sequence[Prompt],
        residency: Residency,
        rows: int,
    ) -> None:
        super().__init__(config, engine, sampler)
        rollout = config.rollout
        self._prompts, self._residency, self._sampling = prompts, residency, training_sampling(rollout)
        self._most, self._rows = rollout.prompts + rollout.ahead, rows
        keep = rollout.cache == "kept"
        self._lasting = engine.lasting_session(self._most, rollout.max_prompt_tokens, rollout.samples, rollout.max_new_tokens, keep=keep)
        self._groups: list[_Group] = []
        self._ages: list[int] = []
        self._preempted = 0
        residency.hold("kv_cache", lambda: self._lasting.kept)
        if keep and residency.plan.ever_away("kv_cache"):  # what is kept is of groups that have not ended: no more than were begun ahead
            blocks = most_blocks(rollout.ahead, rollout.max_prompt_tokens, rollout.samples, rollout.max_new_tokens, engine.block)
            residency.arena.reserve(engine.sizes(blocks))

    def next(self, step: int, progress: Progress) -> Groups:
        config = self._config
        asked = self._sampler.take(max(0, self._most - len(self._groups)))
        for prompt, request in zip(asked, requests(asked, config.rollout.samples, config.seed, step), strict=True):
            self._groups.append(_Group(prompt, request, step, self._lasting.session.add(request, self._sampling)))
        self._residency.need("kv_cache")
        with self._lasting.awake() as session:
            self._residency.dropped("kv_cache")
            before = session.preempted
            while (ended := sum(group.ended for group in self._groups)) < config.rollout.prompts:
                progress(ended, config.rollout.prompts)
                session.step()
            self._preempted = session.preempted - before
        done = [group for group in self._groups if group.ended][: config.rollout.prompts]
        self._groups = [group for group in self._groups if group not in done]
        self._ages = [step - group.step for group in done]
        return [group.prompt for group in done], [[one.completion() for one in group.told] for group in done]

    def figures(self) -> dict[str, float]:
        return {
            "samples_preempted": float(self._preempted),
            "groups_under_way": float(len(self._groups)),
            "group_age": sum(self._ages) / len(self._ages),
            "group_age_max": float(max(self._ages)),
        }

    def state(self) -> list[dict[str, Any]]:
        places = {id(prompt): place for place, prompt in enumerate(self._prompts)}
        return [
            {
                "prompt": places[id(group.prompt)],
                "tokens": group.prompt.tokens,
                "step": group.step,
                "seeds": group.request.seeds,
                "samples": [[one.tokens, one.logprobs, one.plain_logprobs, one.finish] for one in group.told],
            }
            for group in self._groups
        ]

    def restore(self, state: Sequence[dict[str, Any]]) -> None:
        session, rollout = self._lasting.session, self._config.rollout
        for saved in state:
            if len(saved["seeds"]) != rollout.samples:
                raise UserError(
                    f"the checkpoint has groups of {len(saved['seeds'])} completions under way, and `rollout.samples` is {rollout.samples}: resume with the value it was made with"
                )
            if any(len(tokens) >= rollout.max_new_tokens and finish is None for tokens, _, _, finish in saved["samples"]):
                raise UserError(
                    f"the checkpoint has completions under way that are longer than `rollout.max_new_tokens: {rollout.max_new_tokens}`: resume with the value it was made with"
                )
            if any(token >= self._rows for tokens, *_ in saved["samples"] for token in tokens):
                raise UserError("the checkpoint has completions under way with tokens that the model does not have: choose another one")
            place = saved["prompt"]
            if place >= len(self._prompts) or self._prompts[place].tokens != saved["tokens"]:
                raise UserError(
                    "the checkpoint has completions under way for prompts that this `task` does not have in their places: resume with the task it was made with"
                )
            prompt = self._prompts[place]
            request = Request(prompt.tokens, saved["seeds"])
            told = session.add(request, self._sampling)
            for one, so_far in zip(told, saved["samples"], strict=True):
                session.put_back(one, *so_far)
            self._groups.append(_Group(prompt, request, saved["step"], told))


class SavedRollouts(Rollouts):
    """Those of another, written to a file as well."""

    def __init__(self, of: Rollouts, config: Config, prompts: Sequence[Prompt], path: str) -> None:
        self._of, self._path, self._begun = of, Path(path).expanduser(), False
        self._temperature = config.rollout.temperature
        self._places = {id(prompt): place for place, prompt in enumerate(prompts)}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch()
        except OSError as error:
            raise UserError(f"`rollout.save_to: {path}` cannot be written: {error.strerror}") from None

    def next(self, step: int, progress: Progress) -> Groups:
        prompts, groups = self._of.next(step, progress)
        if not self._begun:  # what an earlier run left stays only where this one goes on from it
            self._begun = True
            forget_after(self._path, step - 1)
        lines = [
            {
                "step": step,
                "temperature": self._temperature,
                "place": self._places[id(prompt)],
                "prompt": prompt.tokens,
                "completions": [asdict(one) for one in group],
            }
            for prompt, group in zip(prompts, groups, strict=True)
        ]
        add(self._path, lines)
        return prompts, groups

    def figures(self) -> dict[str, float]:
        return self._of.figures()

    def state(self) -> list[dict[str, Any]]:
        return self._of.state()

    def restore(self, state: Sequence[dict[str, Any]]) -> None:
        self._of.restore(state)


class _SavedCompletion(BaseModel):
    """As `rollout.save_to` writes it; a file may come from anywhere."""

    model_config = ConfigDict(strict=True)

    tokens: Annotated[list[NonNegativeInt], Field(min_length=1)]
    logprobs: list[FiniteFloat]
    plain_logprobs: list[FiniteFloat]
    finish: Literal["stop", "length"]
    text: str

    @model_validator(mode="after")
    def _one_for_each_token(self) -> _SavedCompletion:
        if not len(self.tokens) == len(self.logprobs) == len(self.plain_logprobs):
            raise ValueError("it has not one log-prob for each token")
        return self


class _SavedGroup(BaseModel):
    """A line."""

    model_config = ConfigDict(strict=True)

    step: PositiveInt
    place: NonNegativeInt
    prompt: list[NonNegativeInt]
    completions: list[_SavedCompletion]


class ReplayedRollouts(Rollouts):
    """Those that a file has."""

    def __init__(self, config: Config, prompts: Sequence[Prompt], path: str, rows: int) -> None:
        self._config, self._path, self._rows = config, path, rows
        self._steps: dict[int, list[tuple[Prompt, list[Completion]]]] = {}
        try:
            with Path(path).expanduser().open(encoding="utf-8") as file:
                for line in map(json.loads, file):
                    self._check_line(line)
                    found = prompts[line["place"]] if line["place"] < len(prompts) else None
                    if found is None or found.tokens != line["prompt"]:
                        raise UserError(
                            f"`rollout.replay: {path}` has a prompt that this `task`, `seed` and tokenizer do not have in its place: replay it with those it was made with"
                        )
                    self._steps.setdefault(line["step"], []).append((found, [Completion(**one) for one in line["completions"]]))
        except OSError as error:
            raise UserError(f"`rollout.replay: {path}` cannot be read: {error.strerror}") from None
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"]))
            raise UserError(f"`rollout.replay: {path}` is not a file that `rollout.save_to` wrote: {where}: {problem['msg']}") from None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"`rollout.replay: {path}` is not a file that `rollout.save_to` wrote: {error}") from None

        for step in range(1, config.train.steps + 1):
            self._check(step)

    def _check_line(self, line: dict[str, Any]) -> None:
        """Against the config: training relies on its lengths, and takes log-probs at its temperature."""
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
        raise UserError(f"`rollout.replay: {self._path}` has {what}, and `{key}` is {value}: replay it with the value it was made with")

    def _check(self, step: int) -> None:
        groups, rollout = self._steps.get(step, []), self._config.rollout
        if len(groups) != rollout.prompts or any(len(group) != rollout.samples for _, group in groups):
            sizes = f"{len(groups)} x {len(groups[0][1])}" if groups else "no"
            fix = f"set train.steps={step - 1}" if step > 1 else "change `rollout.prompts` or `rollout.samples`, or replay another file"
            raise UserError(
                f"`rollout.replay: {self._path}` has {sizes} completions of step {step}, and {rollout.prompts} x {rollout.samples} are wanted "
                f"(it has steps {', '.join(map(str, sorted(self._steps))) or 'none'}): {fix}"
            )

    def next(self, step: int, progress: Progress) -> Groups:
        prompts, groups = zip(*self._steps[step], strict=True)
        return list(prompts), list(groups)

    def figures(self) -> dict[str, float]:
        return {}


def build_rollouts(
    config: Config,
    engine: Engine,
    sampler: Sampler[Prompt],
    prompts: Sequence[Prompt],
    residency: Residency,
    *,
    rows: int,
    writes: bool = True,
) -> Rollouts:
    """Token ids are below `rows`. Of several ranks that have the same ones, one writes."""
    rollout = config.rollout
    if rollout.replay is not None:
        return ReplayedRollouts(config, prompts, rollout.replay, rows)
    made = Rollouts(config, engine, sampler)
    if rollout.ahead:
        assert isinstance(engine, PagedEngine)  # the config sees to it
        made = LastingRollouts(config, engine, sampler, prompts, residency, rows)
    return made if rollout.save_to is None or not writes else SavedRollouts(made, config, prompts, rollout.save_to)
