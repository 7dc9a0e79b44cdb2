"""The metrics of an update, from what each of its micro-batches reports on each rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ebbtide.parallel.comm import Comm
from ebbtide.policy.losses import Ratio

Figures = dict[str, Tensor | Ratio]
"""What a micro-batch reports, by name: sums over its targets, and ratios."""


def summarize(seen: Sequence[Figures], targets: int, ranks: Comm) -> dict[str, float]:
    """Metrics from the sums of all micro-batches and ranks: means per target, ratios, the whole loss, and the maximum
    of names that end in `_max`. One transfer from the device is made for all."""
    columns = [column for name, figure in seen[0].items() for column in _columns(name, figure)]
    table = torch.stack(  # [micro-batches, columns]
        [torch.stack([part.float() for figure in figures.values() for part in _parts(figure)]) for figures in seen]
    )
    total, most = torch.stack([table.sum(0), table.max(0).values]).tolist()
    sums = dict(zip(columns, ranks.all_sum(total), strict=True))
    largest = dict(zip(columns, ranks.all_max(most), strict=True))
    summary = {}
    for name, figure in seen[0].items():
        if isinstance(figure, Ratio):
            summary[name] = sums[name] / count if (count := sums[f"{name}/count"]) else 0.0
        elif name.endswith("_max"):
            summary[name] = largest[name]
        else:
            summary[name] = sums[name] if name == "loss" else sums[name] / targets
    return summary


def zeros(figures: Figures) -> Figures:
    """The figures of a micro-batch that does not count."""
    return {
        name: Ratio(*map(torch.zeros_like, _parts(figure))) if isinstance(figure, Ratio) else torch.zeros_like(figure)
        for name, figure in figures.items()
    }


def _columns(name: str, figure: Tensor | Ratio) -> list[str]:
    return [name, f"{name}/count"] if isinstance(figure, Ratio) else [name]


def _parts(figure: Tensor | Ratio) -> list[Tensor]:
    return [figure.total, figure.count] if isinstance(figure, Ratio) else [figure]
