"""The samples of one step: prompts, completions and scores, and which of them are trained on."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from statistics import fmean
from typing import TypeVar

import torch

from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.config.rollout import RolloutConfig
from ebbtide.config.root import Config
from ebbtide.policy.advantages import compute_known_advantages, turn_advantages, whiten
from ebbtide.policy.datum import Datum, trajectory
from ebbtide.policy.losses.kl import kl_estimate
from ebbtide.policy.losses.normalise import token_weights
from ebbtide.rollout.engine import Completion, Request, SamplingParams
from ebbtide.rollout.episodes import Episode, episode_data, episode_metrics
from ebbtide.rollout.prompts import Prompt
from ebbtide.tasks.score_message import ScoreResult
from ebbtide.tasks.task import Problem

Item = TypeVar("Item")
BY_TASK = ("reward", "reward_std", "completion_tokens", "finished", "samples")
"""The metrics that each task of `task.mix` has of its own."""


@dataclass(frozen=True)
class Sample:
    """One completion with its reward and advantage."""

    prompt: Prompt
    completion: Completion
    scored: ScoreResult | None
    """None: the task has no answers to score by."""
    advantage: float
    trained: bool
    """Whether it is part of the loss: groups whose advantages are all 0, and what `loss.mask_overlong` masks, may be
    left out."""
    episode: Episode | None = None
    """The episode that the completion is all sampled tokens of, where the task has an environment."""

    @property
    def is_unjudged(self) -> bool:
        """Whether a judge or a reward model could not score it: its weight in the loss is 0."""
        return self.scored is not None and self.scored.is_unjudged


@dataclass(frozen=True)
class Batch:
    """All samples of a step, and those that are trained on as data."""

    samples: list[Sample]
    data: list[Datum]
    groups: int
    zero_std_groups: int
    rewards: list[float]
    """The rewards of all samples that advantages are computed from."""
    overlong_penalty: float | None = None
    """What samples lose on average because they are almost too long."""

    def _signal_by_task(self) -> dict[str, float]:
        """The share of groups with advantages other than 0, of each task of a mix."""
        size = len(self.samples) // self.groups
        groups = [self.samples[first : first + size] for first in range(0, len(self.samples), size)]
        return {
            f"task/{name}/groups_with_signal": fmean(any(one.advantage for one in group) for group in some)
            for name, some in by_task(groups, lambda group: group[0].prompt.problem).items()
        }

    def metrics(self, pass_reward: float) -> dict[str, float]:
        """Returns the metrics of the step's rollouts, for metrics.jsonl."""
        return sample_metrics(self.samples, pass_reward) | {
            "zero_std_groups": self.zero_std_groups,
            "groups_with_signal": 1 - self.zero_std_groups / self.groups,
            "samples_trained": sum(sample.trained and not sample.is_unjudged for sample in self.samples),
            **self._signal_by_task(),
            **({} if self.overlong_penalty is None else {"overlong_penalty": self.overlong_penalty}),
        }


def by_task(samples: Sequence[Item], problem: Callable[[Item], Problem]) -> dict[str, list[Item]]:
    """The samples of each task of `task.mix`; nothing where there is no mix."""
    found: dict[str, list[Item]] = {}
    for sample in samples:
        if (name := problem(sample).task) is not None:
            found.setdefault(name, []).append(sample)
    return dict(sorted(found.items()))


def sample_metrics(samples: Sequence[Sample], pass_reward: float) -> dict[str, float]:
    """Returns the metrics of sampled and scored completions, of all and of each task of a mix."""
    figures = _sample_metrics(samples, pass_reward)
    for name, some in by_task(samples, lambda sample: sample.prompt.problem).items():
        own = _sample_metrics(some, pass_reward)
        figures |= {f"task/{name}/{key}": own[key] for key in BY_TASK if key in own}
    return figures


def _sample_metrics(samples: Sequence[Sample], pass_reward: float) -> dict[str, float]:
    lengths = [len(sample.completion.tokens) for sample in samples]
    by_outcome: dict[str, list[int]] = {"passed": [], "failed": []}
    rewards: list[float] = []
    count = len(samples)
    parts: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    for length, scored in zip(lengths, (sample.scored for sample in samples), strict=True):
        if scored is not None and not scored.is_unjudged:
            rewards.append(scored.value)
            by_outcome["passed" if scored.value >= pass_reward else "failed"].append(length)
            parts.update(scored.parts)
        failures.update([scored.failure] if scored is not None and scored.failure else [])
    reward = {}
    if rewards:
        reward = {"reward": sum(rewards) / len(rewards), "reward_std": torch.tensor(rewards).std(correction=0).item()}
    episodes = [sample.episode for sample in samples if sample.episode is not None]
    return {
        **reward,
        **{f"reward/{name}": total / len(rewards) for name, total in sorted(parts.items())},
        **{f"score_failures/{name}": float(number) for name, number in sorted(failures.items())},
        "completion_tokens": sum(lengths) / count,
        **{f"completion_tokens/{name}": fmean(found) for name, found in by_outcome.items() if found},
        "completion_tokens_max": max(lengths),
        "finished": sum(sample.completion.finish == "stop" for sample in samples) / count,
        "samples": count,
        **(episode_metrics(episodes) if episodes else {}),
    }


def sample_seed(*names: object) -> int:
    """Returns a seed for one sample from the run's seed and the sample's position, independent of every other
    sample."""
    digest = hashlib.blake2b("/".join(map(str, names)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # torch's seeds are signed


def sample_seeds(count: int, samples: int, *names: object) -> list[list[int]]:
    """Returns the seeds of all samples [count][samples]."""
    return [[sample_seed(*names, index, i) for i in range(samples)] for index in range(count)]


def make_requests(prompts: Sequence[Prompt], samples: int, *names: object) -> list[Request]:
    """Makes one request for each prompt, with the seeds of its samples."""
    seeds = sample_seeds(len(prompts), samples, *names)
    return [Request(prompt.tokens, own) for prompt, own in zip(prompts, seeds, strict=True)]


def training_sampling_params(rollout: RolloutConfig) -> SamplingParams:
    """Returns the sampling parameters of training rollouts."""
    return SamplingParams(
        rollout.max_new_tokens, rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p, tuple(rollout.stop)
    )


def assemble(
    config: GrpoConfig,
    prompts: Sequence[Prompt],  # [prompts]
    groups: Sequence[Sequence[Completion]],  # [prompts][samples]
    scored: Sequence[ScoreResult],  # [prompts * samples]
    episodes: Sequence[Episode] = (),  # [prompts * samples], where the task has an environment
) -> Batch:
    """Computes the advantages of all samples, and data with their loss weights for those that are trained on."""
    size = config.rollout.group_size
    completions = [completion for group in groups for completion in group]
    # An episode whose environment failed before its first turn has no tokens.
    counted = [
        bool(completion.tokens)
        and not score.is_unjudged
        and not (config.loss.mask_overlong and completion.finish == "length")
        for completion, score in zip(completions, scored, strict=True)
    ]
    shaped = _shape_rewards(config, scored, completions)
    tokens = [len(completion.tokens) * counts for completion, counts in zip(completions, counted, strict=True)]
    turns = _advantages(config, shaped, episodes, tokens)  # [prompts * samples][turns]
    owners = [prompt for prompt, group in zip(prompts, groups, strict=True) for _ in group]
    flat = [
        not any(value for turn in turns[first : first + size] for value in turn) for first in range(0, len(turns), size)
    ]
    drop = config.drops_zero_std_groups
    # A penalty in the reward needs the log-probs of all samples: those that do not count have weight 0.
    trained = [
        (counts or config.has_kl_in_reward) and not (drop and flat[place // size])
        for place, counts in enumerate(counted)
    ]
    played: Sequence[Episode | None] = episodes or [None] * len(completions)
    samples = [
        Sample(*parts)
        for parts in zip(owners, completions, scored, [found[0] for found in turns], trained, played, strict=True)
    ]
    lengths = [len(completion.tokens) for completion, counts in zip(completions, counted, strict=True) if counts]
    # Flat groups count in the average even where they are left out: leaving them out must not make the update larger.
    weights = iter(token_weights(lengths, config.loss.normalisation, config.rollout.max_new_tokens))
    data: list[Datum] = []
    for sample, counts, advantages in zip(samples, counted, turns, strict=True):
        weight = next(weights) * config.train.minibatches if counts else 0.0
        if sample.trained and sample.episode is not None:
            data += episode_data(sample.episode.branches, advantages, weight)
        elif sample.trained:
            done = sample.completion
            data.append(trajectory(sample.prompt.tokens, done.tokens, done.logprobs, sample.advantage, weight))
    lost = [one.value - less.value for one, less in zip(scored, shaped, strict=True)]
    overlong_penalty = fmean(lost) if config.advantage.overlong_buffer is not None else None
    return Batch(samples, data, len(prompts), sum(flat), [one.value for one in shaped], overlong_penalty)


def _shape_rewards(
    config: GrpoConfig, scored: Sequence[ScoreResult], completions: Sequence[Completion]
) -> Sequence[ScoreResult]:
    """The scores, less what completions lose that are almost too long."""
    buffer, longest = config.advantage.overlong_buffer, config.rollout.max_new_tokens
    if buffer is None:
        return scored
    shaped = []
    for one, completion in zip(scored, completions, strict=True):
        beyond = max(0, len(completion.tokens) - (longest - buffer.length))
        shaped.append(replace(one, value=one.value - buffer.penalty * min(1.0, beyond / buffer.length)))
    return shaped


def _advantages(
    config: GrpoConfig,
    scored: Sequence[ScoreResult],
    episodes: Sequence[Episode],
    tokens: Sequence[int],  # [prompts * samples]: those that carry loss
) -> list[list[float]]:  # [prompts * samples][turns]
    """The advantages of each sample's turns: a completion without an episode is one turn."""
    size, kind = config.rollout.group_size, config.advantage.kind
    if episodes and config.advantage.turns == "to_go":
        # An episode that failed before its first turn takes part in the comparison of first turns, with reward 0.
        rewards = [
            [] if score.is_unjudged else one.turn_rewards(score) or [score.value]
            for one, score in zip(episodes, scored, strict=True)
        ]
        groups = [rewards[first : first + size] for first in range(0, len(rewards), size)]
        found = [turns for group in turn_advantages(groups, kind) for turns in group]
        return [turns or [0.0] * max(1, len(one.turns)) for turns, one in zip(found, episodes, strict=True)]
    values = _sample_advantages(config, [one.value for one in scored], tokens, [not one.is_unjudged for one in scored])
    counts = [max(1, len(one.turns)) for one in episodes] or [1] * len(scored)
    return [[value] * count for value, count in zip(values, counts, strict=True)]


def _sample_advantages(
    config: GrpoConfig, rewards: Sequence[float], tokens: Sequence[int], known: Sequence[bool]
) -> list[float]:
    """The advantage of each sample [prompts * samples]; of those whose reward is not known, 0."""
    shape = (-1, config.rollout.group_size)
    counts = torch.tensor(tokens).view(shape) if config.advantage.whiten == "token" else None
    values = torch.tensor(rewards, dtype=torch.float64).view(shape)
    mask = torch.tensor(known).view(shape)
    found: list[float] = compute_known_advantages(values, mask, config.advantage.kind, counts).flatten().tolist()
    return found


def penalise_rewards(config: GrpoConfig, batch: Batch) -> Batch:
    """The batch with advantages of rewards from which a KL penalty is subtracted (`loss.kl.in_reward`). All samples of
    it are trained on, and their data have old and reference log-probs."""
    kl = config.loss.kl
    assert kl is not None
    known = [not sample.is_unjudged for sample in batch.samples]
    lost = []  # [samples][tokens]
    for datum in batch.data:
        recorded = datum.values.get("old_logprobs", datum.values.get("rollout_logprobs"))
        old, reference = (
            torch.as_tensor(values, dtype=torch.float64, device="cpu")
            for values in (recorded, datum.values["reference_logprobs"])
        )
        lost.append(kl.coefficient * kl_estimate(old, reference, kl.estimator))
    if config.advantage.kind == "reinforce_pp" and config.advantage.whiten == "token":
        # A token is worth the reward, less the penalties from it on.
        to_go = [reward - one.flip(0).cumsum(0).flip(0) for reward, one in zip(batch.rewards, lost, strict=True)]
        joined = torch.cat(to_go)
        counts = torch.cat([torch.full_like(one, float(judged)) for one, judged in zip(to_go, known, strict=True)])
        whitened = torch.split(whiten(joined, counts), [len(one) for one in to_go])
        advantages = [(one * judged).tolist() for one, judged in zip(whitened, known, strict=True)]
    else:
        rewards = [reward - one.sum().item() for reward, one in zip(batch.rewards, lost, strict=True)]
        values = _sample_advantages(config, rewards, [len(one) for one in lost], known)
        advantages = [[value] * len(one) for value, one in zip(values, lost, strict=True)]
    for datum, found in zip(batch.data, advantages, strict=True):
        datum.values["advantages"] = found
    samples = [replace(sample, advantage=found[0]) for sample, found in zip(batch.samples, advantages, strict=True)]
    return replace(batch, samples=samples)


def minibatches(config: Config, data: Sequence[Datum], step: int) -> Iterator[list[Datum]]:
    """Yields the data of each update of a step: `epochs` passes, each shuffled and cut into `minibatches` of
    almost equal size."""
    for epoch in range(config.train.epochs):
        order = list(range(len(data)))
        if config.train.minibatches > 1:
            generator = torch.Generator().manual_seed(sample_seed(config.seed, "minibatches", step, epoch))
            order = torch.randperm(len(order), generator=generator).tolist()
        for part in torch.tensor(order).tensor_split(config.train.minibatches):
            if len(part):
                yield [data[index] for index in part.tolist()]


def average_metrics(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Merges the metrics of a step's updates: means, but the largest `mismatch_max`, the last learning rate, and sums
    of counts. Skipped updates are left out of the means; where all were skipped, values that are not finite are."""
    if not updates:
        return {}
    applied = [update for update in updates if not update["updates_skipped"]]
    values = {
        name: [update[name] for update in applied or updates if applied or isfinite(update[name])]
        for name in updates[0]
    }
    figures = {name: max(found) if name == "mismatch_max" else fmean(found) for name, found in values.items() if found}
    figures["lr"] = updates[-1]["lr"]
    figures["updates_skipped"] = sum(update["updates_skipped"] for update in updates)
    figures["updates"] = len(updates)
    return figures
