"""One step's samples: what was asked, said and scored; and what of it goes to the trainer."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean

import torch

from ebbtide.config.tree import Config, Rollout
from ebbtide.policy.advantages import advantages
from ebbtide.policy.losses.normalise import token_weights
from ebbtide.policy.pack import Trajectory
from ebbtide.rollout.engine import Completion, Request, Sampling
from ebbtide.rollout.prompts import Prompt
from ebbtide.tasks.answer import Scored


@dataclass(frozen=True)
class Sample:
    """One completion with its reward and advantage."""

    prompt: Prompt
    completion: Completion
    scored: Scored
    advantage: float
    trained: bool
    """Whether the loss saw it: groups without a signal, and what `loss.mask_overlong` masks, may be left out."""


@dataclass(frozen=True)
class Batch:
    """All samples of a step, and those of them that carry a signal, as trajectories."""

    samples: list[Sample]
    trajectories: list[Trajectory]
    groups: int
    flat_groups: int

    def figures(self, pass_reward: float) -> dict[str, float]:
        """What the step's rollouts look like, for metrics.jsonl."""
        rewards = [sample.scored.value for sample in self.samples]
        lengths = [len(sample.completion.tokens) for sample in self.samples]
        by_outcome: dict[str, list[int]] = {"passed": [], "failed": []}
        for length, reward in zip(lengths, rewards, strict=True):
            by_outcome["passed" if reward >= pass_reward else "failed"].append(length)
        count = len(self.samples)
        parts: Counter[str] = Counter()
        failures: Counter[str] = Counter()
        for sample in self.samples:
            parts.update(sample.scored.parts)
            failures.update([sample.scored.failure] if sample.scored.failure else [])
        return {
            "reward": sum(rewards) / count,
            "reward_std": torch.tensor(rewards).std(correction=0).item(),
            **{f"reward/{name}": total / count for name, total in sorted(parts.items())},
            **{f"score_failures/{name}": float(number) for name, number in sorted(failures.items())},
            "flat_groups": self.flat_groups,
            "groups_with_signal": 1 - self.flat_groups / self.groups,
            "completion_tokens": sum(lengths) / count,
            **{f"completion_tokens/{name}": fmean(found) for name, found in by_outcome.items() if found},
            "completion_tokens_max": max(lengths),
            "finished": sum(sample.completion.finish == "stop" for sample in self.samples) / count,
            "samples": count,
            "samples_trained": len(self.trajectories),
        }


def sample_seed(*names: object) -> int:
    """A seed for one sample, from the run's seed and the sample's place: independent of every other sample's."""
    digest = hashlib.blake2b("/".join(map(str, names)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # torch's seeds are signed


def requests(prompts: Sequence[Prompt], samples: int, *names: object) -> list[Request]:
    return [Request(prompt.tokens, [sample_seed(*names, place, i) for i in range(samples)]) for place, prompt in enumerate(prompts)]


def training_sampling(rollout: Rollout) -> Sampling:
    return Sampling(rollout.max_new_tokens, rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p, tuple(rollout.stop))


def assemble(
    config: Config,
    prompts: Sequence[Prompt],  # [prompts]
    groups: Sequence[Sequence[Completion]],  # [prompts][samples]
    scored: Sequence[Scored],  # [prompts * samples]
) -> Batch:
    """Advantages for all samples; trajectories, with their weights in the loss, for those that are trained on."""
    shape = len(prompts), config.rollout.samples
    rewards = torch.tensor([score.value for score in scored], dtype=torch.float64).view(shape)
    values = advantages(rewards, config.advantage.kind)  # [prompts, samples]
    completions = [completion for group in groups for completion in group]
    owners = [prompt for prompt, group in zip(prompts, groups, strict=True) for _ in group]
    flat = (values == 0).all(1)  # [prompts]
    counted = [not (config.loss.mask_overlong and completion.finish == "length") for completion in completions]
    dropped = flat.repeat_interleave(config.rollout.samples).tolist() if config.advantage.drop_flat_groups else [False] * len(completions)
    trained = [counts and not drop for counts, drop in zip(counted, dropped, strict=True)]
    samples = [Sample(*parts) for parts in zip(owners, completions, scored, values.flatten().tolist(), trained, strict=True)]
    lengths = [len(completion.tokens) for completion, counts in zip(completions, counted, strict=True) if counts]
    # Flat groups are part of the average even where they are left out: leaving them out must not lengthen the step.
    weights = iter(token_weights(lengths, config.loss.normalisation, config.rollout.max_new_tokens))
    trajectories = []
    for sample, counts in zip(samples, counted, strict=True):
        weight = next(weights) * config.train.minibatches if counts else 0.0
        if sample.trained:
            done = sample.completion
            trajectories.append(Trajectory(sample.prompt.tokens, done.tokens, done.logprobs, sample.advantage, weight))
    return Batch(samples, trajectories, len(prompts), int(flat.sum()))


def minibatches(config: Config, trajectories: Sequence[Trajectory], step: int) -> Iterator[list[Trajectory]]:
    """The step's updates: `epochs` passes, each shuffled and cut into `minibatches` of almost equal size."""
    for epoch in range(config.train.epochs):
        order = list(range(len(trajectories)))
        if config.train.minibatches > 1:
            generator = torch.Generator().manual_seed(sample_seed(config.seed, "minibatches", step, epoch))
            order = torch.randperm(len(order), generator=generator).tolist()
        for part in torch.tensor(order).tensor_split(config.train.minibatches):
            if len(part):
                yield [trajectories[index] for index in part.tolist()]


def averaged(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """The figures of a step's updates as one: means, but the largest mismatch, the last learning rate, and counts added up. An update that was skipped is no part of them; where all were, what is not finite is left out."""
    if not updates:
        return {}
    taken = [update for update in updates if not update["updates_skipped"]]
    values = {name: [update[name] for update in taken or updates if taken or isfinite(update[name])] for name in updates[0]}
    figures = {name: max(found) if name == "mismatch_max" else fmean(found) for name, found in values.items() if found}
    figures["lr"] = updates[-1]["lr"]
    figures["updates_skipped"] = sum(update["updates_skipped"] for update in updates)
    figures["updates"] = len(updates)
    return figures
