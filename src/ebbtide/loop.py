"""The RL loop, every phase by name: generate, score, logprob, train, step, evaluate, save.

The loop has no memory logic and no display code: the residency moves holdings, the meter measures each phase, and the
report shows and writes what happened.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import numpy
import torch
from torch import Tensor

from ebbtide.checkpoint.checkpointer import Checkpointer
from ebbtide.checkpoint.state import SAVED_HOLDINGS, RunState
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.config.checkpoint import CheckpointConfig
from ebbtide.config.train import Rehearsal
from ebbtide.errors import LoopStopped, UserError
from ebbtide.evaluate import evaluate, is_eval_due, is_eval_missing
from ebbtide.memory.device_budget import enforce_budget
from ebbtide.memory.host import bind_to_numa_node, frozen_gc, pci_address
from ebbtide.memory.plan import Phase
from ebbtide.memory.residency import Residency
from ebbtide.model.load import LoadedModel, load_model, pick_device
from ebbtide.optim.adamw import AdamW
from ebbtide.optim.schedule import learning_rate
from ebbtide.parallel.comm import Comm
from ebbtide.parallel.dtensor import local
from ebbtide.parallel.group import Group
from ebbtide.planner.holdings import plan_holdings
from ebbtide.planner.host_memory import check_weights_fit, fit_to_host
from ebbtide.planner.run_plan import plan_run
from ebbtide.policy.policy import Policy
from ebbtide.policy.reference import freeze_reference
from ebbtide.progress import AbandonableProgress, Progress, WorkAbandoned
from ebbtide.report.folder import HISTORY
from ebbtide.report.protocol import RankReport
from ebbtide.rollout.batch import Batch, assemble, average_metrics, minibatches
from ebbtide.rollout.build import build_engine
from ebbtide.rollout.engine import Engine
from ebbtide.rollout.partitioned_scoring import PartitionedScoring
from ebbtide.rollout.prompts import Prompt, control_text_notes, encode_prompts, prompts_digest
from ebbtide.rollout.serve.train_server import serve_during_training
from ebbtide.rollout.sources import RolloutSource, build_source
from ebbtide.rollout.unmatched import UnmatchedGuard
from ebbtide.rollout.weights.build import shard_policy
from ebbtide.rollout.weights.channel import RolloutChannel
from ebbtide.tasks.build import build_task
from ebbtide.tasks.sampler import Sampler
from ebbtide.tasks.scoring import ScoringPool
from ebbtide.updates import RehearsalUpdates, TrainUpdates, Updates


def seed_everything(seed: int, deterministic: bool) -> None:
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at the first matmul
    torch.use_deterministic_algorithms(deterministic)
    # This debugging aid of torch's would write every new tensor once more.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def train(
    config: GrpoConfig,
    report: RankReport,
    rehearsal: Rehearsal | None = None,
    comm: Comm | None = None,
    channel: RolloutChannel | None = None,
) -> Policy:
    """Runs one whole run and returns the trained policy; the report has what happened. A rehearsal (dry run) does
    everything except the updates."""
    comm = comm or Comm()
    seed_everything(config.seed, config.deterministic)
    device = pick_device(config.device)
    if device.type == "cuda" and (binding := bind_to_numa_node(pci_address(device))):
        report.note(binding)
    plan = plan_run(config, device, rehearsal, comm, report.note)
    if plan is not None:
        config = plan.config
    if comm.size > 1:
        report.note(comm.describe())
    if channel is not None:
        report.note(channel.describe())
    placement = plan_holdings(config, comm.shards)
    check_weights_fit(config, device)
    config, host_needs = fit_to_host(
        config,
        placement,
        report.note,
        optimizer=rehearsal != "none",
        share=comm.shards,
        processes=comm.local_size,
    )
    report.set_plan(config, plan)  # writes config.yaml: nothing in it changes from here on
    with enforce_budget(device, config.memory.budget_gib), Residency(placement, device) as residency:
        if plan is not None:
            residency.on_oom(plan.oom_advice)
        residency.record_history(report.path / HISTORY)
        return _run(config, report, residency, comm, channel, rehearsal, host_needs)


def _run(
    config: GrpoConfig,
    report: RankReport,
    residency: Residency,
    comm: Comm,
    channel: RolloutChannel | None,
    rehearsal: Rehearsal | None,
    host_needs: dict[str, int],
) -> Policy:
    """Builds everything that the steps use, and does the steps."""
    with report.working("making problems"):
        problems = build_task(config.task, config.seed, evaluated=config.evaluate is not None).problems()
    with report.working("loading the model"), residency.startup():
        model = _build_model(config, report, residency, comm, channel, rehearsal, host_needs)
    policy, optimizer = model.policy, model.optimizer
    with report.working("pinning host memory"):
        residency.pin(copied=SAVED_HOLDINGS if config.checkpoint is not None and config.checkpoint.async_save else ())
    with report.working("encoding prompts") as progress:
        train_prompts = encode_prompts(problems.train, policy.tokenizer, policy.vocabulary_rows, config, progress)
        eval_problems = problems.held_out[: config.evaluate.max_problems] if config.evaluate else []
        eval_prompts = encode_prompts(eval_problems, policy.tokenizer, policy.vocabulary_rows, config, progress)
        if config.evaluate and not eval_prompts:
            raise UserError(
                "`evaluate` needs held-out problems and the task has none: add some, or set `evaluate: null`"
            )
    for text in control_text_notes([*train_prompts, *eval_prompts]):
        report.note(text)
    report.begin(policy.model, policy.tokenizer, residency, prompts=len(train_prompts), tests=len(eval_prompts))

    sampler = Sampler(train_prompts, config.seed)
    rollouts = build_source(
        config, model.engine, sampler, train_prompts, residency, rows=policy.vocabulary_rows, writes=comm.is_main
    )
    state: RunState | None = None
    updates: Updates = RehearsalUpdates(policy, residency)
    start_step = 0
    if optimizer is not None and rehearsal is None:
        state = RunState(
            config,
            policy.model,
            optimizer,
            sampler,
            residency,
            Group(timedelta(minutes=config.run.distributed_timeout_minutes)),
            rollouts,
            prompts_digest(train_prompts),
        )
        updates = TrainUpdates(policy, optimizer)
    if state is not None and report.resumed is not None:
        with report.working("reading the checkpoint"):
            settings = config.checkpoint or CheckpointConfig()
            start_step = state.load(
                report.resumed.path,
                load_rng=settings.load_rng,
                parallel=settings.fully_parallel_load,
                warn=report.warn,
            )

    checkpointer = Checkpointer(config, report.path, state, report.note, comm=comm)
    serving = serve_during_training(model.engine, model.loaded, config, report.note)
    with ScoringPool(config.task, config.seed) as pool, checkpointer, frozen_gc(), serving:
        _Loop(
            config=config,
            report=report,
            residency=residency,
            comm=comm,
            policy=policy,
            reference=model.reference,
            engine=model.engine,
            eval_prompts=eval_prompts,
            rollouts=rollouts,
            scoring=PartitionedScoring(pool, comm),
            updates=updates,
            checkpointer=checkpointer,
        ).run(start_step)
    return policy


@dataclass(frozen=True)
class _Model:
    """The model of a run, and what generates with it and trains it."""

    loaded: LoadedModel
    policy: Policy
    engine: Engine
    optimizer: AdamW | None
    reference: Mapping[str, Tensor] | None
    """The frozen weights of the KL term, by parameter."""


def _build_model(
    config: GrpoConfig,
    report: RankReport,
    residency: Residency,
    comm: Comm,
    channel: RolloutChannel | None,
    rehearsal: Rehearsal | None,
    host_needs: dict[str, int],
) -> _Model:
    loaded = load_model(config, comm.load_device(residency.device))
    policy = Policy(loaded, config, comm)
    rollout_weights = shard_policy(policy, comm, channel, residency.device, residency.plan.place("generate", "weights"))
    with rollout_weights.materialized() as model:
        policy.verify(model)
    engine = rollout_weights.engine(  # built and verified before the optimizer takes its memory
        lambda model: build_engine(replace(loaded, model=model), config, residency.make_room),
        lambda: optimizer.steps if optimizer is not None else {},
    )
    residency.register("weights", [local(parameter) for parameter in policy.model.parameters()])
    optimizer = (
        AdamW(policy.model.named_parameters(), config.optimizer, residency, comm, report.note)
        if rehearsal != "none"
        else None
    )
    reference = freeze_reference(policy.model, residency) if config.loss.kl is not None else None
    if optimizer is not None and rehearsal is None:
        policy.place_activations(residency, host_needs, comm.local_size, report.note)
        optimizer.discard_grads()  # the gradients of the trial passes
    return _Model(loaded, policy, engine, optimizer, reference)


class _Loop:
    """The steps of a run, with everything that they use."""

    def __init__(
        self,
        *,
        config: GrpoConfig,
        report: RankReport,
        residency: Residency,
        comm: Comm,
        policy: Policy,
        reference: Mapping[str, Tensor] | None,
        engine: Engine,
        eval_prompts: Sequence[Prompt],
        rollouts: RolloutSource,
        scoring: PartitionedScoring,
        updates: Updates,
        checkpointer: Checkpointer,
    ) -> None:
        self._config, self._report, self._residency, self._comm = config, report, residency, comm
        self._policy, self._reference, self._engine, self._eval_prompts = policy, reference, engine, eval_prompts
        self._rollouts, self._scoring, self._updates, self._checkpointer = rollouts, scoring, updates, checkpointer
        self._unmatched = UnmatchedGuard(config)

    def run(self, start_step: int) -> None:
        """Does all steps after `start_step`. Raises LoopStopped if the run has to stop before the last one."""
        config, report = self._config, self._report
        eval_first = config.evaluate is not None if report.resumed is None else is_eval_missing(config, report.resumed)
        if eval_first:
            if not (evaluation := self._evaluate(start_step)):
                raise LoopStopped
            report.note_evaluation(start_step, evaluation | self._residency.meter.drain())

        for step in range(start_step + 1, config.train.steps + 1):
            batch, metrics = self._train_step(step)
            evaluation = self._evaluate(step) if is_eval_due(config, step) else {}
            metrics |= evaluation
            report.step(step, metrics | self._residency.meter.drain(), batch.samples)
            if warning := self._unmatched.after_step(batch.samples):
                report.warn(f"  {warning}")
            if self._checkpointer.step_done(step):
                with self._phase("save"):
                    self._checkpointer.save(step, metrics)
            complete = step == config.train.steps and (config.evaluate is None or bool(evaluation))
            if self._checkpointer.stopping and not complete:
                raise LoopStopped

    def _train_step(self, step: int) -> tuple[Batch, dict[str, float]]:
        """Does one step; returns its samples and its metrics."""
        config, policy = self._config, self._policy
        started = time.perf_counter()

        with self._phase("generate") as progress:
            prompts, groups = self._rollouts.next(step, progress)

        with self._phase("score") as progress:
            completions = [
                (prompt.problem, completion.text)
                for prompt, group in zip(prompts, groups, strict=True)
                for completion in group
            ]
            scored = self._scoring.score(completions, progress)
        batch = assemble(config, prompts, groups, scored)

        with self._phase("logprob") as progress:
            if config.needs_old_logprobs:
                policy.compute_logprobs("old_logprobs", batch.trajectories, progress)
            if self._reference is not None:
                self._residency.need("reference")
                policy.compute_logprobs("reference_logprobs", batch.trajectories, progress, weights=self._reference)

        updates: list[dict[str, float]] = []
        updates_per_step = config.train.epochs * config.train.minibatches
        for number, minibatch in enumerate(minibatches(config, batch.trajectories, step)):
            with self._phase("train") as progress:
                figures = self._updates.accumulate(minibatch, progress)
            with self._phase("step"):
                done, total = (step - 1) * updates_per_step + number, config.train.steps * updates_per_step
                figures |= self._updates.step(learning_rate(config.optimizer, done, total))
                self._report.note_skipped_update(self._updates.skipped)
            updates.append(figures)

        seconds = time.perf_counter() - started
        return batch, (
            batch.metrics(config.pass_reward)
            | self._rollouts.metrics()
            | average_metrics(updates)
            | {"seconds": seconds}
        )

    def _evaluate(self, step: int) -> dict[str, float]:
        """Evaluates and returns the metrics. Returns none if the run has to stop: no save waits for an evaluation that
        the resumed run can do."""
        config, checkpointer = self._config, self._checkpointer
        if self._comm.any(checkpointer.must_stop):
            return {}
        try:
            with self._phase("evaluate") as progress:
                return evaluate(
                    config,
                    self._engine,
                    self._scoring,
                    self._eval_prompts,
                    AbandonableProgress(progress, lambda: checkpointer.must_stop),
                    last=step == config.train.steps,
                )
        except WorkAbandoned:
            return {}

    @contextmanager
    def _phase(self, name: Phase) -> Iterator[Progress]:
        """Enters a phase: the residency moves holdings for it, the meter measures it, and the report shows its
        progress."""
        with self._residency.phase(name), self._report.phase(name) as progress:
            yield progress
