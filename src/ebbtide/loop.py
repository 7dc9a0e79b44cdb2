"""The RL loop, every phase by name: generate, score, logprob, train, step, evaluate.

It holds no memory logic and no display: the meter measures each phase, the report shows and writes what happened.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import replace

import numpy
import torch

from ebbtide.batch import assemble, averaged, minibatches
from ebbtide.checkpoint.keep import Keeper
from ebbtide.checkpoint.ranks import Ranks
from ebbtide.checkpoint.state import HELD, State
from ebbtide.cluster.whole import SharedScoring, share_out
from ebbtide.cluster.world import World
from ebbtide.config.tree import Checkpoint, Config, Rehearsal
from ebbtide.errors import UserError
from ebbtide.evaluate import due, evaluate, owed
from ebbtide.footprint import check_room_for_weights, fit_to_host
from ebbtide.memory.host import bind_near, pci_address, quiet_collector
from ebbtide.memory.limit import limited
from ebbtide.memory.plan import build_plan
from ebbtide.memory.residency import Residency
from ebbtide.memory.shards import local
from ebbtide.optim.adamw import AdamW
from ebbtide.optim.schedule import learning_rate
from ebbtide.planning import plan_run
from ebbtide.policy.model import load_model, pick_device
from ebbtide.policy.policy import Policy
from ebbtide.policy.reference import freeze_reference
from ebbtide.progress import GivenUp, GivingWay
from ebbtide.report.report import Report
from ebbtide.rollout.build import build_engine
from ebbtide.rollout.prompts import about_quotes, digest, encode
from ebbtide.rollout.serve.beside import served
from ebbtide.rollouts import build_rollouts
from ebbtide.tasks.build import build_task
from ebbtide.tasks.sampler import Sampler
from ebbtide.unmatched import Unmatched
from ebbtide.updates import Rehearsing, Training, Updates


def seed_everything(seed: int, deterministic: bool) -> None:
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first product runs
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a check for bugs that writes every new tensor once more


def train(config: Config, report: Report, rehearsal: Rehearsal | None = None, world: World | None = None) -> Policy:
    """One whole run: what it learnt is in the policy that comes back, what happened is in the report. A rehearsal does all but the updates."""
    world = world or World()
    seed_everything(config.seed, config.deterministic)
    device = pick_device(config.device)
    near = bind_near(pci_address(device)) if device.type == "cuda" else None
    plan, notes = plan_run(config, device, rehearsal, world)
    if plan is not None:
        config = plan.config
    report.planned(config, plan)
    places = build_plan(config.memory, config.optimizer, config.gathering(world.held))
    with limited(device, config.memory.budget_gib), Residency(places, device) as residency:
        if plan is not None:
            residency.foresees(plan.view)
        residency.history_to(report.folder.history)
        return _run(config, report, residency, world, rehearsal, [*([near] if near else []), *notes])


def _run(config: Config, report: Report, residency: Residency, world: World, rehearsal: Rehearsal | None, notes: list[str]) -> Policy:
    check_room_for_weights(config, residency.device)
    config, needs, told = fit_to_host(config, residency.plan, optimizer=rehearsal != "none", share=world.held, processes=world.here)
    notes += [*world.about, *told]
    meter = residency.meter
    with report.working("making problems"):
        problems = build_task(config.task, config.seed, evaluated=config.evaluate is not None).problems()
    with report.working("loading the model"), residency.starting():
        loaded = load_model(config, world.loads_on(residency.device))
        policy = Policy(loaded, config, world)
        whole = share_out(policy, world, residency.device, residency.plan.place("generate", "weights"))
        with whole.there() as model:
            policy.verify(model)
        engine = whole.engine(  # before the optimizer takes its memory: the engine is tried, as the policy is
            lambda model: build_engine(replace(loaded, model=model), config, residency.make_room),
            lambda: optimizer.steps if optimizer is not None else {},
        )
        residency.hold("weights", [local(parameter) for parameter in policy.model.parameters()])
        optimizer = AdamW(policy.model.named_parameters(), config.optimizer, residency, world.total) if rehearsal != "none" else None
        reference = freeze_reference(policy.model, residency) if config.loss.kl is not None else None
        if optimizer is not None:
            notes += optimizer.about
        if optimizer is not None and rehearsal is None:
            notes += policy.place_activations(residency, needs, world.here)
            optimizer.discard()  # gradients of what was tried
    with report.working("pinning host memory"):
        residency.pin(copied=HELD if config.checkpoint is not None and config.checkpoint.async_save else ())
    with report.working("encoding prompts") as progress:
        prompts = encode(problems.train, policy.tokenizer, policy.rows, config, progress)
        held_out = problems.held_out[: config.evaluate.most_problems] if config.evaluate else []
        tests = encode(held_out, policy.tokenizer, policy.rows, config, progress)
        if config.evaluate and not tests:
            raise UserError("`evaluate` needs held-out problems and the task has none: give it some, or set `evaluate: null`")
    notes += about_quotes([*prompts, *tests])
    report.begin(policy.model, policy.tokenizer, residency, notes, prompts=len(prompts), tests=len(tests))

    sampler = Sampler(prompts, config.seed)
    rollouts = build_rollouts(config, engine, sampler, prompts, residency, rows=policy.rows, writes=world.first)
    state: State | None = None
    trainer: Updates = Rehearsing(policy, residency)
    begun = 0
    if optimizer is not None and rehearsal is None:
        state = State(
            config, policy.model, optimizer, sampler, residency, Ranks(config.run.distributed_timeout_minutes), rollouts, digest(prompts)
        )
        trainer = Training(policy, optimizer)
    if state is not None and report.resumed is not None:
        with report.working("reading the checkpoint"):
            kept = config.checkpoint or Checkpoint()
            begun = state.load(report.resumed.path, load_rng=kept.load_rng, parallel=kept.fully_parallel_load)
        for note in state.notes:
            report.terminal.say(note, "bold yellow")
    unmatched = Unmatched(config)
    updates_per_step = config.train.epochs * config.train.minibatches

    keeper = Keeper(config, report.folder.path, state, report.terminal.say, agreed=world.any)
    serving = served(engine, loaded, config, report.terminal.say)
    with SharedScoring(config.task, config.seed, world) as scoring, keeper, quiet_collector(), serving:

        def examined(step: int) -> dict[str, float]:
            """An evaluation's figures; none where the run is to stop: no save waits for what a resumed run can do."""
            if world.any(keeper.in_haste):
                return {}
            last = step == config.train.steps
            try:
                with residency.phase("evaluate"), report.phase("evaluate") as progress:
                    return evaluate(config, engine, scoring, tests, GivingWay(progress, lambda: keeper.in_haste), last=last)
            except GivenUp:
                return {}

        lacking = config.evaluate is not None if report.resumed is None else owed(config, report.resumed)
        if lacking:
            if not (evaluation := examined(begun)):
                raise KeyboardInterrupt
            report.evaluated(begun, evaluation | meter.take())

        for step in range(begun + 1, config.train.steps + 1):
            started = time.perf_counter()

            with residency.phase("generate"), report.phase("generate") as progress:
                asked, groups = rollouts.next(step, progress)

            with residency.phase("score"), report.phase("score") as progress:
                scored = scoring.score(
                    [(prompt.problem, done.text) for prompt, group in zip(asked, groups, strict=True) for done in group], progress
                )
            batch = assemble(config, asked, groups, scored)

            with residency.phase("logprob"), report.phase("logprob") as progress:
                if config.needs_old_logprobs:
                    policy.fill("old_logprobs", batch.trajectories, progress)
                if reference is not None:
                    residency.need("reference")
                    policy.fill("reference_logprobs", batch.trajectories, progress, weights=reference)

            updates: list[dict[str, float]] = []
            for number, minibatch in enumerate(minibatches(config, batch.trajectories, step)):
                with residency.phase("train"), report.phase("train") as progress:
                    figures = trainer.accumulate(minibatch, progress)
                with residency.phase("step"), report.phase("step"):
                    done, of = (step - 1) * updates_per_step + number, config.train.steps * updates_per_step
                    figures |= trainer.step(learning_rate(config.optimizer, done, of))
                    report.skipped(trainer.skipped)
                updates.append(figures)

            took = time.perf_counter() - started
            metrics = batch.figures(config.pass_reward) | rollouts.figures() | averaged(updates) | {"seconds": took}
            evaluation = examined(step) if due(config, step) else {}
            metrics |= evaluation
            report.step(step, metrics | meter.take(), batch.samples)
            if warning := unmatched.after_step(batch.samples):
                report.terminal.say(f"  {warning}", "bold yellow")
            if keeper.step_done(step):
                with residency.phase("save"), report.phase("save"):
                    keeper.save(step, metrics)
            complete = step == config.train.steps and (config.evaluate is None or bool(evaluation))
            if keeper.stopping and not complete:
                raise KeyboardInterrupt
    return policy
