"""Sequence packing: packs sequences of any length into micro-batches of a token budget, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ebbtide.policy.datum import Datum


@dataclass(frozen=True)
class MicroBatch:
    """S packed sequences of T tokens in all, and the P targets that are predicted from them."""

    members: list[int]  # [S]: indices of the packed data
    token_ids: Tensor  # [1, T]
    positions: Tensor  # [1, T]: 0 at the start of each sequence
    starts: Tensor  # [S + 1], int32: where each sequence starts, and T
    longest: int
    predict: Tensor  # [P]: the positions in T whose hidden states predict a target
    targets: Tensor  # [P]: those tokens
    sequence: Tensor  # [P]: the sequence (0 .. S-1) of each
    lengths: list[int]  # [S]: targets of each sequence; they add up to P


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


def together(data: Sequence[Datum]) -> list[list[int]]:
    """The indices of data that have to be in one micro-batch: those of a group, and every other one alone."""
    units: dict[tuple[bool, int], list[int]] = {}
    for index, datum in enumerate(data):
        key = (False, index) if datum.group is None else (True, datum.group)
        units.setdefault(key, []).append(index)
    return list(units.values())


def pack(data: Sequence[Datum], budget: int, device: torch.device) -> list[MicroBatch]:
    """All data in micro-batches of at most `budget` tokens."""
    units = together(data)
    bins = plan_packing([sum(data[index].length for index in unit) for unit in units], budget)
    return [_micro_batch(data, [index for unit in chosen for index in units[unit]], device) for chosen in bins]


def _micro_batch(data: Sequence[Datum], members: list[int], device: torch.device) -> MicroBatch:
    token_ids: list[int] = []
    positions: list[int] = []
    starts = [0]
    predict: list[int] = []
    targets: list[int] = []
    sequence: list[int] = []
    for place, index in enumerate(members):
        datum, begin = data[index], starts[-1]
        token_ids += datum.tokens[: datum.length]
        positions += range(datum.length)
        # The hidden state of each token predicts the next one.
        if isinstance(datum.targets, range):  # the usual case, in a tenth of the time
            predict += range(begin + datum.targets.start - 1, begin + datum.targets.stop - 1)
            targets += datum.tokens[datum.targets.start : datum.targets.stop]
        else:
            predict += [begin + target - 1 for target in datum.targets]
            targets += [datum.tokens[target] for target in datum.targets]
        sequence += [place] * len(datum.targets)
        starts.append(begin + datum.length)

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
        lengths=[len(data[index].targets) for index in members],
    )
