"""Sequence packing: packs sequences of any length into micro-batches of a token budget, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor


@dataclass
class Trajectory:
    """One sampled completion on its way to the trainer."""

    prompt: list[int]
    completion: list[int]
    rollout_logprobs: list[float]
    """The sampler's log-prob of each completion token."""
    advantage: float = 0.0
    weight: float = 0.0
    """Weight of each of its tokens in the loss; set for a whole step at once, so that losses of micro-batches are
    summed."""
    old_logprobs: Tensor | None = field(default=None, repr=False)
    """[completion], fp32: the trainer's log-probs before the first update on this batch; None if the batch has only
    one update."""
    reference_logprobs: Tensor | None = field(default=None, repr=False)
    """[completion], fp32: the reference policy's log-probs."""

    @property
    def tokens(self) -> int:
        """Tokens that go through the model: all but the last, which predicts nothing."""
        return len(self.prompt) + len(self.completion) - 1


@dataclass(frozen=True)
class MicroBatch:
    """S packed sequences of T tokens in all, and the P completion tokens that are predicted from them."""

    members: list[int]  # [S]: indices of the packed trajectories
    token_ids: Tensor  # [1, T]
    positions: Tensor  # [1, T]: 0 at the start of each sequence
    starts: Tensor  # [S + 1], int32: where each sequence starts, and T
    longest: int
    predict: Tensor  # [P]: the positions in T whose hidden states predict a completion token
    targets: Tensor  # [P]: those tokens
    sequence: Tensor  # [P]: the sequence (0 .. S-1) of each
    lengths: list[int]  # [S]: completion tokens of each sequence; they add up to P


def plan_packing(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """The indices of each micro-batch, by first-fit decreasing: deterministic, and no sequence is split."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if lengths[index] > budget:
            raise ValueError(f"a sequence of {lengths[index]} tokens does not fit into a micro-batch of {budget}")
        place = next((b for b, free in enumerate(room) if free >= lengths[index]), None)
        if place is None:
            bins.append([])
            room.append(budget)
            place = len(bins) - 1
        bins[place].append(index)
        room[place] -= lengths[index]
    return [sorted(members) for members in bins]


def pack(trajectories: Sequence[Trajectory], budget: int, device: torch.device) -> list[MicroBatch]:
    """All trajectories in micro-batches of at most `budget` tokens."""
    bins = plan_packing([trajectory.tokens for trajectory in trajectories], budget)
    return [_micro_batch(trajectories, members, device) for members in bins]


def _micro_batch(trajectories: Sequence[Trajectory], members: list[int], device: torch.device) -> MicroBatch:
    token_ids: list[int] = []
    positions: list[int] = []
    starts = [0]
    predict: list[int] = []
    targets: list[int] = []
    sequence: list[int] = []
    for place, index in enumerate(members):
        trajectory = trajectories[index]
        begin, prompt, completion = starts[-1], len(trajectory.prompt), len(trajectory.completion)
        token_ids += trajectory.prompt + trajectory.completion[:-1]
        positions += range(trajectory.tokens)
        # The hidden state of the prompt's last token predicts the completion's first.
        predict += range(begin + prompt - 1, begin + prompt - 1 + completion)
        targets += trajectory.completion
        sequence += [place] * completion
        starts.append(begin + trajectory.tokens)

    def put(values: list[int], dtype: torch.dtype = torch.long) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

    return MicroBatch(
        members=members,
        token_ids=put(token_ids)[None],
        positions=put(positions)[None],
        starts=put(starts, torch.int32),
        longest=max(b - a for a, b in pairwise(starts)),
        predict=put(predict),
        targets=put(targets),
        sequence=put(sequence),
        lengths=[len(trajectories[index].completion) for index in members],
    )
