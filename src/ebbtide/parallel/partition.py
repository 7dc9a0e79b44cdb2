"""Partitions work among ranks so that all have about as much."""

from __future__ import annotations

from collections.abc import Sequence


def balance(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """The indices of each rank's pieces: the longest goes first, each to the rank with the least load so far. Every
    rank that knows the sizes gets the same answer."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [(0, 0)] * ranks  # (size, number of pieces), so that pieces of size 0 are spread too
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        rank = load.index(min(load))
        shares[rank].append(index)
        load[rank] = load[rank][0] + sizes[index], load[rank][1] + 1
    return [sorted(share) for share in shares]
