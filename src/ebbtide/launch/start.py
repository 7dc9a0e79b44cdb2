"""Starts a run: checks what can be checked without torch, then becomes its only rank or launches all of them."""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import replace
from typing import Protocol

from ebbtide.checkpoint.initial import with_runs_as_models
from ebbtide.checkpoint.resume import find_checkpoint
from ebbtide.config.model_path import check_exists, check_paths
from ebbtide.config.task import TaskConfig, reward_key
from ebbtide.errors import RunStopped, UserError
from ebbtide.launch.job import Job, exit_now
from ebbtide.launch.local import launch_locally, ranks_to_start
from ebbtide.launch.ray import launch_on_ray
from ebbtide.planner.holdings import plan_holdings
from ebbtide.rollout.serve.preflight import check_installed
from ebbtide.system.allocator import use_expandable_segments
from ebbtide.system.signals import STOPPED
from ebbtide.tasks.build import build_task
from ebbtide.tasks.judgement import read_api_key


class Say(Protocol):
    def __call__(self, text: str, style: str = "") -> None: ...


def start_run(job: Job, say: Say) -> int:
    """Runs a job to its end and returns the exit code."""
    sys.path.append(os.getcwd())  # a user's own `task.python.object` is imported from here
    if os.environ.get("RANK", "0") == "0":  # the other ranks of `torchrun` get what is found from the first
        job = _checked(job, say)
        say("starting (torch and transformers take a few seconds to load)", "dim")
    config = job.config
    if config.rollout.engine != "vllm":  # vLLM's own allocator does not work with expandable segments
        use_expandable_segments()
    if (count := ranks_to_start(config)) > 0:
        launch_ranks = launch_on_ray if config.parallel and config.parallel.ray else launch_locally
        return launch_ranks(job, count, say)
    from ebbtide.launch.run_rank import run_rank

    try:
        run_rank(job)
    except RunStopped:
        return STOPPED
    except Exception as error:
        if isinstance(error, UserError) or os.environ.get("WORLD_SIZE", "1") == "1":
            raise
        traceback.print_exc()
        exit_now()
    return 0


def _checked(job: Job, say: Say) -> Job:
    """The job with the checkpoints that it starts from. Errors that need no torch to be found are raised now, not ten
    seconds later."""
    config = with_runs_as_models(job.config, say)
    plan_holdings(config)
    for model in (config.model, *config.frozen_models.values()):
        check_paths(model)
    if config.task is not None:
        build_task(config.task, config.seed, evaluated=config.evaluate is not None)
        _check_rewards(config.task)
    if config.rollout.serve_port is not None:
        check_installed()
    return replace(job, config=config, resumed=find_checkpoint(config, say))


def _check_rewards(task: TaskConfig) -> None:
    """Checks that reward models and the API keys of judges are there."""
    for place, reward in task.rewards_with("reward_model").items():
        if reward.reward_model is not None:
            check_exists(reward.reward_model.path, f"{reward_key(*place)}.reward_model.path")
    for place, reward in task.rewards_with("judge").items():
        if reward.judge is not None:
            read_api_key(reward.judge, f"{reward_key(*place)}.judge")
