"""The environment of `task` on a worker: episodes of problems, played on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import Self

from ebbtide.errors import UserError
from ebbtide.progress import Progress
from ebbtide.rollout.chat_turns import ChatTurns
from ebbtide.rollout.encoder import Encoder
from ebbtide.rollout.engine import Engine, SamplingParams
from ebbtide.rollout.episode_runner import EpisodeRunner
from ebbtide.rollout.episodes import Episode
from ebbtide.rollout.prompts import Prompt
from ebbtide.rollout.weights.gathered import PartitionedEngine
from ebbtide.tasks.environment_pool import EnvironmentPool
from ebbtide.tasks.policy_handle import PolicyFacts
from ebbtide.tasks.task import Problem
from ebbtide.tasks.tool_calls import detect
from ebbtide.worker import Worker


class PlayedEpisodes:
    """Plays episodes. It is a context, in which processes run environments: on each rank those of its own share."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._stack = worker, ExitStack()

    def __enter__(self) -> Self:
        config, policy = self._worker.config, self._worker.policy
        assert config.task is not None
        environment = config.task.environment
        assert environment is not None
        with ExitStack() as stack:
            folder = stack.enter_context(TemporaryDirectory(prefix="ebbtide-tokenizer-"))
            policy.tokenizer.save_pretrained(folder)
            length = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
            facts = PolicyFacts(folder, length, list(policy.end_tokens))
            pool = stack.enter_context(EnvironmentPool(environment, facts))
            described = pool.describe()
            self.gives_reward = described.gives_reward
            if not described.gives_reward and not config.task.has_scorer:
                raise UserError(
                    f"`task.environment.object: {environment.object}` gives no reward, and the task has no answers to"
                    " score by: give it a method `get_reward()`, or set `task.file`, `task.gym` or `task.python`"
                )
            keys = "extract", "reasoning_parser", "rewards"
            given = {f"task.{key}": getattr(config.task, key) for key in keys}
            for name, one in (config.task.mix or {}).items():
                given |= {f"task.mix.{name}.{key}": getattr(one, key) for key in keys}
            for key, value in given.items():
                if described.gives_reward and value is not None:
                    raise UserError(
                        f"`{key}` is for the task's scorer, and `task.environment.object: {environment.object}`"
                        f" gives the reward itself: remove `{key}`"
                    )
            turns = ChatTurns(Encoder.configured(policy.tokenizer, config.model, described.tools))
            template = policy.tokenizer.chat_template if config.model.chat_template else None
            self.runner = EpisodeRunner(
                environment,
                config.rollout,
                pool,
                turns,
                tool_format=environment.tool_format or detect(template if isinstance(template, str) else ""),
                rows=policy.vocabulary_rows,
                drives=described.drives,
                # The bits of a CPU's products, and those of a GPU that is not exact, depend on the batch.
                lockstep=self._worker.residency.device.type == "cpu"
                or (config.deterministic and not config.rollout.exact),
            )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)  # type: ignore[arg-type]

    def play(
        self,
        prompts: Sequence[Prompt],
        seeds: Sequence[Sequence[int]],  # [prompts][samples]
        sampling: SamplingParams,
        progress: Progress,
    ) -> list[Episode]:
        """An episode for each seed [prompts * samples]."""
        work = [(prompt.problem, own) for prompt, own in zip(prompts, seeds, strict=True)]

        def play_share(engine: Engine, share: Sequence[tuple[Problem, Sequence[int]]]) -> list[list[Episode]]:
            problems, own = [problem for problem, _ in share], [seeds for _, seeds in share]
            return self.runner.run(engine, problems, own, sampling, progress)

        engine = self._worker.engine
        if isinstance(engine, PartitionedEngine):
            groups = engine.map_partitioned(work, [len(own) for own in seeds], play_share)
        else:
            groups = play_share(engine, work)
        return [episode for group in groups for episode in group]

    @property
    def figures(self) -> dict[str, float]:
        """Metrics of the last episodes; of several ranks, those of this one."""
        return self.runner.figures
