"""The RL loop, every phase by name: generate, score, logprob, train, step, evaluate.

It holds no memory logic and no display: the meter measures each phase, the report shows and writes what happened.
"""

from __future__ import annotations

import random
import time

import numpy
import torch

from ebbtide.batch import assemble, averaged, minibatches, requests, training_sampling
from ebbtide.config.tree import Config
from ebbtide.errors import UserError
from ebbtide.evaluate import evaluate
from ebbtide.memory.meter import Meter
from ebbtide.optim.adamw import AdamW
from ebbtide.optim.schedule import learning_rate
from ebbtide.policy.model import load_model
from ebbtide.policy.policy import Policy
from ebbtide.report.report import Report
from ebbtide.rollout.huggingface import HuggingFaceEngine
from ebbtide.rollout.prompts import encode
from ebbtide.tasks.build import build_task
from ebbtide.tasks.sampler import Sampler
from ebbtide.tasks.scoring import ScoringPool


def train(config: Config, report: Report) -> Policy:
    """One whole run: what it learnt is in the policy that comes back, what happened is in the report."""
    random.seed(config.seed)
    numpy.random.seed(config.seed)
    torch.manual_seed(config.seed)

    with report.working("making problems"):
        problems = build_task(config.task, config.seed).problems()
    with report.working("loading the model"):
        loaded = load_model(config)
        policy = Policy(loaded, config)
        policy.verify()
        reference = policy.frozen_copy() if config.loss.kl is not None else None
        optimizer = AdamW(policy.model.named_parameters(), config.optimizer)
        engine = HuggingFaceEngine(loaded, config.rollout.batch)
    with report.working("encoding prompts") as progress:
        prompts = encode(problems.train, policy.tokenizer, config, progress)
        held_out = problems.held_out[: config.evaluate.problems] if config.evaluate else []
        tests = encode(held_out, policy.tokenizer, config, progress)
        if config.evaluate and not tests:
            raise UserError("`evaluate` needs held-out problems and the task has none: give it some, or set `evaluate: null`")
    report.begin(policy.model, prompts=len(prompts), tests=len(tests))

    sampler, meter = Sampler(prompts, config.seed), Meter(policy.device)
    updates_per_step = config.train.epochs * config.train.minibatches

    with ScoringPool(config.task, config.seed) as scoring:

        def examined() -> dict[str, float]:
            with meter.phase("evaluate"), report.phase("evaluate") as progress:
                return evaluate(config, engine, scoring, tests, progress)

        if config.evaluate:
            report.step(0, examined() | meter.take(), [])

        for step in range(1, config.train.steps + 1):
            started = time.perf_counter()
            asked = sampler.take(config.rollout.prompts)

            with meter.phase("generate"), report.phase("generate") as progress:
                wanted = requests(asked, config.rollout.samples, config.seed, step)
                groups = engine.generate(wanted, training_sampling(config.rollout), progress)

            with meter.phase("score"), report.phase("score") as progress:
                scored = scoring.score(
                    [(prompt.problem, done.text) for prompt, group in zip(asked, groups, strict=True) for done in group], progress
                )
            batch = assemble(config, asked, groups, scored)

            with meter.phase("logprob"), report.phase("logprob") as progress:
                if not config.on_policy:
                    policy.fill("old_logprobs", batch.trajectories, progress)
                if reference is not None:
                    reference.fill("reference_logprobs", batch.trajectories, progress)

            updates: list[dict[str, float]] = []
            for number, minibatch in enumerate(minibatches(config, batch.trajectories, step)):
                with meter.phase("train"), report.phase("train") as progress:
                    figures = policy.accumulate(minibatch, progress)
                with meter.phase("step"), report.phase("step"):
                    done, of = (step - 1) * updates_per_step + number, config.train.steps * updates_per_step
                    figures |= optimizer.step(learning_rate(config.optimizer, done, of))
                updates.append(figures)

            metrics = batch.figures() | averaged(updates)
            if config.evaluate and (step % config.evaluate.every == 0 or step == config.train.steps):
                metrics |= examined()
            report.step(step, metrics | meter.take() | {"seconds": time.perf_counter() - started}, batch.samples)
    return policy
