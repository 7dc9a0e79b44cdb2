"""Work shared out among ranks so that all have about as much."""

from __future__ import annotations

from collections.abc import Sequence

from ebbtide.rollout.engine import Request, Sampling


def deal(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Which pieces each rank has: the longest first, each to the one that has least so far. The same on every rank that knows the sizes."""
    hands: list[list[int]] = [[] for _ in range(ranks)]
    held = [(0, 0)] * ranks  # size, then pieces: pieces of no size are dealt out too
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        rank = held.index(min(held))
        hands[rank].append(index)
        held[rank] = held[rank][0] + sizes[index], held[rank][1] + 1
    return [sorted(hand) for hand in hands]


def sizes(requests: Sequence[Request], sampling: Sampling) -> list[int]:
    """Tokens of each, at most."""
    return [len(request.seeds) * (len(request.prompt) + sampling.max_new_tokens) for request in requests]
