"""The problems of `task` on a worker: completions of those to train on, and evaluation on those that are held out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple, Self

from ebbtide.algorithms.episodes import PlayedEpisodes
from ebbtide.algorithms.evaluate import evaluate
from ebbtide.config.task import CurriculumConfig, TaskConfig, TaskSourceConfig
from ebbtide.errors import UserError
from ebbtide.progress import Progress
from ebbtide.rollout.batch import Sample, make_requests, sample_seeds, training_sampling_params
from ebbtide.rollout.engine import Completion, SamplingParams
from ebbtide.rollout.episodes import Episode
from ebbtide.rollout.partitioned_scoring import PartitionedScoring
from ebbtide.rollout.prompts import Prompt, control_text_notes, encode_prompts, prompts_digest
from ebbtide.rollout.reasoning import Parsed, ReasoningParser, reasoning_metrics
from ebbtide.rollout.serve.train_server import serve_during_training
from ebbtide.rollout.sources import FreshRollouts, build_source
from ebbtide.tasks.curriculum import Curricula, LevelSampler
from ebbtide.tasks.judges import Judges
from ebbtide.tasks.sampler import MixedSampler, Order, Sampler
from ebbtide.tasks.score_message import ScoreResult
from ebbtide.tasks.scoring import ScoringPool
from ebbtide.tasks.task import Problem, Problems
from ebbtide.worker import Worker


class HeldOutTask:
    """The held-out problems of `task`. It is a context, in which processes score completions."""

    def __init__(self, worker: Worker, problems: Sequence[Problem]) -> None:
        self._worker, self._config = worker, worker.config
        settings = self._config.evaluate
        self._held_out = self._encode(problems[: settings.max_problems]) if settings is not None else []
        if settings is not None and not self._held_out:
            raise UserError(
                "`evaluate` needs held-out problems and the task has none: add some, or set `evaluate: null`"
            )
        self._stack = ExitStack()
        format, tokenizer = self._task.reasoning_parser, worker.policy.tokenizer
        self._parser = None if format is None else ReasoningParser(format, tokenizer, "task.reasoning_parser")
        self._parsed: list[Parsed] = []  # the last completions that were scored
        self._scoring: PartitionedScoring | None = None

    def _encode(self, problems: Sequence[Problem]) -> list[Prompt]:
        policy = self._worker.policy
        if self._task.environment is not None:  # it writes the prompt of every episode
            return [Prompt(problem, problem.question, []) for problem in problems]
        with self._worker.report.working("encoding prompts") as progress:
            return encode_prompts(problems, policy.tokenizer, policy.vocabulary_rows, self._config, progress)

    @property
    def _task(self) -> TaskConfig:
        assert self._config.task is not None
        return self._config.task

    def __enter__(self) -> Self:
        task = self._task
        self._episodes = self._stack.enter_context(PlayedEpisodes(self._worker)) if task.environment else None
        if task.has_scorer and not (self._episodes is not None and self._episodes.gives_reward):
            judges = Judges(task, self._worker.comm.size) if task.rewards_with("judge") else None
            if judges is not None:
                self._stack.enter_context(judges)
            pool = self._stack.enter_context(ScoringPool(task, self._config.seed))
            models = self._worker.reward_models
            verb = models.score if models is not None else None
            self._scoring = PartitionedScoring(pool, self._worker.comm, task, judges, verb)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)  # type: ignore[arg-type]

    def evaluate(self, step: int, progress: Progress) -> dict[str, float]:
        last = step == self._config.train.steps
        found = evaluate(self._config, self._attempt, self._held_out, progress, last=last)
        return found | {f"evaluate/{name}": value for name, value in self._judge_metrics().items()}

    def _judge_metrics(self) -> dict[str, float]:
        """Of the requests to judges since the last call."""
        return self._scoring.drain() if self._scoring is not None else {}

    def _attempt(
        self, prompts: Sequence[Prompt], samples: int, sampling: SamplingParams, progress: Progress
    ) -> tuple[list[Completion], list[ScoreResult]]:
        """Completions of held-out problems and their scores, with the same seeds every time."""
        names = self._config.seed, "evaluate"
        if self._episodes is not None:
            episodes = self._episodes.play(prompts, sample_seeds(len(prompts), samples, *names), sampling, progress)
            return [episode.completion() for episode in episodes], self._score_episodes(episodes, progress)
        groups = self._worker.engine.generate(make_requests(prompts, samples, *names), sampling, progress)
        return [one for group in groups for one in group], self._score(prompts, groups, progress)

    def _score(
        self, prompts: Sequence[Prompt], groups: Sequence[Sequence[Completion]], progress: Progress
    ) -> list[ScoreResult]:
        pairs = [(prompt, one) for prompt, group in zip(prompts, groups, strict=True) for one in group]
        answers = self._answers([(prompt.tokens, one) for prompt, one in pairs])
        assert self._scoring is not None  # the config has a scorer
        return self._scoring.score(
            [(prompt.problem, text) for (prompt, _), text in zip(pairs, answers, strict=True)], progress
        )

    def _answers(self, completions: Sequence[tuple[Sequence[int], Completion]]) -> list[str]:
        """What is scored of completions after these prompts."""
        if self._parser is None:
            return [one.text for _, one in completions]
        stop = self._config.rollout.stop
        self._parsed = [self._parser.parse(prompt, one, stop) for prompt, one in completions]
        return [one.answer for one in self._parsed]

    def _score_episodes(self, episodes: Sequence[Episode], progress: Progress) -> list[ScoreResult]:
        """The scores of episodes: the environment's, or, if it gives none, the task's for the last turn."""
        left = [one for one in episodes if one.scored is None]
        answers = self._answers([one.last_turn for one in left])
        work = [(one.prompt.problem, text) for one, text in zip(left, answers, strict=True)]
        found = iter(self._scoring.score(work, progress) if left and self._scoring is not None else [])
        return [one.scored if one.scored is not None else next(found) for one in episodes]


class Rollouts(NamedTuple):
    """The scored completions of a step."""

    prompts: Sequence[Prompt]
    groups: Sequence[Sequence[Completion]]  # [prompts][samples]
    scored: Sequence[ScoreResult]  # [prompts * samples]
    episodes: Sequence[Episode] = ()  # [prompts * samples], where the task has an environment


class TaskRollouts(HeldOutTask):
    """All problems of `task`: completions of those to train on are sampled and scored, step by step."""

    def __init__(self, worker: Worker, problems: Problems) -> None:
        self._worker, self._config = worker, worker.config
        prompts, rollout = self._encode(problems.train), worker.config.rollout
        super().__init__(worker, problems.held_out)
        for text in control_text_notes([*prompts, *self._held_out]):
            worker.report.note(text)
        self.about = (
            f"{len(prompts):,} problems, {len(self._held_out)} held-out ones for evaluation,"
            f" {rollout.prompts_per_step} x {rollout.group_size} samples per step"
        )
        self._curricula = Curricula(self._make_curricula(prompts))
        self._order = order = self._make_order(prompts)
        self._source = build_source(
            self._config,
            worker.engine,
            order,
            prompts,
            worker.residency,
            rows=worker.policy.vocabulary_rows,
            writes=worker.comm.is_main,
        )
        worker.track(order, prompts_digest(prompts), self._source)
        if worker.state is not None:
            worker.state.curricula = self._curricula

    def _make_curricula(self, prompts: Sequence[Prompt]) -> dict[str, LevelSampler[Prompt]]:
        tasks: dict[str, TaskSourceConfig] = dict(self._task.mix) if self._task.mix is not None else {"": self._task}
        found = {name: one.gym.curriculum for name, one in tasks.items() if one.gym is not None and one.gym.curriculum}
        if found and "score" not in self._config.cycle:
            raise UserError(
                "`task.gym.curriculum` raises levels by rewards, and this run scores nothing: set it to `null`"
            )
        return {name: self._level_sampler(name, one, prompts) for name, one in found.items()}

    def _level_sampler(self, name: str, config: CurriculumConfig, prompts: Sequence[Prompt]) -> LevelSampler[Prompt]:
        levels = {
            level: [one for one in prompts if (one.problem.task or "") == name and one.problem.level == level]
            for level in range(config.start, config.top + 1)
        }
        if empty := [level for level, some in levels.items() if not some]:
            raise UserError(
                f"no problem of level {empty[0]} of `task.gym.curriculum` is left: all of its prompts have more than"
                f" `rollout.max_prompt_tokens` = {self._config.rollout.max_prompt_tokens} tokens. Raise the limit, or"
                " lower `task.gym.curriculum.top`"
            )
        return LevelSampler(levels, config, self._config.seed)

    def _make_order(self, prompts: Sequence[Prompt]) -> Order[Prompt]:
        mix, seed, leveled = self._task.mix, self._config.seed, self._curricula.samplers
        if mix is None:
            return leveled.get("") or Sampler(prompts, seed)
        by_task: dict[str, Sequence[Prompt] | Order[Prompt]] = {
            name: leveled.get(name) or [prompt for prompt in prompts if prompt.problem.task == name] for name in mix
        }
        if empty := next((name for name, some in by_task.items() if not some), None):
            raise UserError(
                f"no problem of `task.mix.{empty}` is left: all of its prompts have more than"
                f" `rollout.max_prompt_tokens` = {self._config.rollout.max_prompt_tokens} tokens. Raise the limit"
            )
        return MixedSampler(list(by_task.values()), [one.weight for one in mix.values()], seed)

    def __enter__(self) -> Self:
        super().__enter__()
        worker = self._worker
        self._stack.enter_context(serve_during_training(worker.engine, worker.loaded, self._config, worker.report.note))
        return self

    def next(self, step: int) -> Rollouts:
        """The completions of a step, in the phases generate and score."""
        if self._episodes is not None:
            return self._play(self._episodes, self._config.rollout.prompts_per_step, step)
        prompts, groups = self._generate(step)
        with self._worker.phase("score") as progress:
            return self._scored(Rollouts(prompts, groups, self._score(prompts, groups, progress)))

    def _scored(self, rollouts: Rollouts) -> Rollouts:
        """Tells the curricula of the rewards."""
        size = self._config.rollout.group_size
        for place, prompt in enumerate(rollouts.prompts):
            rewards = [one.value for one in rollouts.scored[place * size : (place + 1) * size]]
            self._curricula.reward(prompt.problem.task, prompt.problem.level, sum(rewards) / len(rewards))
        return rollouts

    def more(self, count: int, *names: object) -> Rollouts:
        """Completions of the next `count` prompts, with seeds of their own by these names, in the same phases. Only
        fresh rollouts have them."""
        if self._episodes is not None:
            return self._play(self._episodes, count, *names)
        assert isinstance(self._source, FreshRollouts)  # the config checks this
        with self._worker.phase("generate") as progress:
            prompts, groups = self._source.draw(count, names, progress)
        with self._worker.phase("score") as progress:
            return self._scored(Rollouts(prompts, groups, self._score(prompts, groups, progress)))

    def _play(self, played: PlayedEpisodes, count: int, *names: object) -> Rollouts:
        """The episodes of a step. Each of them ends in it."""
        rollout = self._config.rollout
        with self._worker.phase("generate") as progress:
            prompts = self._order.draw(count)
            seeds = sample_seeds(len(prompts), rollout.group_size, self._config.seed, *names)
            episodes = played.play(prompts, seeds, training_sampling_params(rollout), progress)
        with self._worker.phase("score") as progress:
            scored = self._score_episodes(episodes, progress)
        groups = [episodes[first : first + rollout.group_size] for first in range(0, len(episodes), rollout.group_size)]
        shown = [next((one.prompt for one in group if one.prompt.tokens), group[0].prompt) for group in groups]
        return self._scored(
            Rollouts(shown, [[one.completion() for one in group] for group in groups], scored, episodes)
        )

    def _generate(self, step: int) -> tuple[Sequence[Prompt], Sequence[Sequence[Completion]]]:
        with self._worker.phase("generate") as progress:
            return self._source.next(step, progress)

    def samples(self, step: int) -> list[Sample]:
        """The completions of a step, for algorithms that have no use for rewards but to show them: where the task has
        no answers, there are none."""
        scored: Sequence[ScoreResult | None]
        if "score" in self._config.cycle:
            prompts, groups, scored, _ = self.next(step)
        else:
            prompts, groups = self._generate(step)
            scored = [None for group in groups for _ in group]
        owners = [prompt for prompt, group in zip(prompts, groups, strict=True) for _ in group]
        completions = [completion for group in groups for completion in group]
        return [Sample(*parts, 0.0, True) for parts in zip(owners, completions, scored, strict=True)]

    def metrics(self) -> dict[str, float]:
        figures = self._source.metrics() if self._episodes is None else self._episodes.figures
        found = {**self._judge_metrics(), **reasoning_metrics(self._parsed), **self._curricula.metrics()}
        return {**figures, **found}
