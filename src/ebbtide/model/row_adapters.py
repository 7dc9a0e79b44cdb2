"""Several adapters (LoRA) of one model at once: each row of a pass has one of them, or none.

All adapters' A of a layer are one matrix, joined along the rank, and so are their B. A row's product with A is
multiplied with its adapter's scale in the columns of that adapter, and with 0 in those of the others: what a row gets
does not depend on what other rows have. An adapter that a layer lacks has no columns there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ebbtide.model.lora import LoraLinear, adapted_layers, remove_adapter
from ebbtide.model.quantized_layers import layer_product

Columns = tuple[tuple[int, int], ...]
"""(the number of an adapter, its rank) of each adapter in a layer, or in several whose products lie side by side."""


class Adapter(NamedTuple):
    """An adapter of one layer."""

    first: Tensor  # [rank, in]
    second: Tensor  # [out, rank]
    scale: float


class RowAdapters:
    """Which adapter each row of the present pass has. All layers of a model share it."""

    def __init__(self, scales: Sequence[float] = ()) -> None:
        """`scales`: of the adapters 1, 2 and so on; 0 is none."""
        self._scales = scales
        self._tables: dict[Columns, Tensor] = {}  # [adapters + 1, columns]: the masks of a row with each
        self._rows: Tensor | None = None
        self._masks: dict[Columns, Tensor] = {}

    @property
    def count(self) -> int:
        return len(self._scales)

    @contextmanager
    def chosen(self, rows: Tensor | None) -> Iterator[None]:
        """Inside this context a pass over T rows has the adapters of `rows` [T], or of [1] for all of them; None: it
        has none. It is read on its device, so that a CUDA graph reads what it has when the graph is replayed."""
        before = self._rows, self._masks
        self._rows, self._masks = rows, {}
        try:
            yield
        finally:
            self._rows, self._masks = before

    def chosen_of(self, places: Tensor) -> AbstractContextManager[None]:
        """Inside this context a layer runs on some rows of the present pass alone, those at `places` [S, n]."""
        return self.chosen(None if self._rows is None else self._rows[places])

    @property
    def are_chosen(self) -> bool:
        return self._rows is not None

    def mask(self, columns: Columns) -> Tensor:
        """[T, columns] or [S, n, columns] in float32: the scale of a row's adapter in its columns, 0 in the others. It
        is made once in a pass, as most blocks have the same columns."""
        assert self._rows is not None
        if columns not in self._masks:
            if columns not in self._tables:  # before a capture: a step runs once without a graph
                self._tables[columns] = self._table(columns).to(self._rows.device)
            masks = self._tables[columns].index_select(0, self._rows.flatten())
            self._masks[columns] = masks.unflatten(0, self._rows.shape)
        return self._masks[columns]

    def _table(self, columns: Columns) -> Tensor:
        table = torch.zeros((self.count + 1, sum(rank for _, rank in columns)))
        start = 0
        for number, rank in columns:
            table[number, start : start + rank] = self._scales[number - 1]
            start += rank
        return table


class RowLoraLinear(LoraLinear):
    """A linear layer with several adapters, whose A and B are joined along the rank."""

    rows: RowAdapters
    columns: Columns

    def forward(self, x: Tensor) -> Tensor:
        found = layer_product(self, x)
        if not self.rows.are_chosen:
            return found
        low = functional.linear(x, self.lora_A).mul_(self.rows.mask(self.columns))
        return found.add_(functional.linear(low, self.lora_B))


def take_adapters(model: nn.Module) -> dict[str, Adapter]:
    """Removes the adapters of a model: name of a layer -> what it had."""
    found = {}
    for name, layer in adapted_layers(model).items():
        found[name] = Adapter(layer.lora_A.detach(), layer.lora_B.detach(), layer.scale)
        remove_adapter(layer)
    return found


def join_adapters(model: nn.Module, adapters: Sequence[dict[str, Adapter]]) -> None:
    """Gives a model several adapters, numbered from 1, each of them by name of layer."""
    rows = RowAdapters([next(iter(one.values())).scale for one in adapters])
    for name in {name: None for one in adapters for name in one}:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        parts = [(number, one.pop(name)) for number, one in enumerate(adapters, 1) if name in one]
        layer.__class__ = RowLoraLinear
        assert isinstance(layer, RowLoraLinear)
        layer.lora_A = nn.Parameter(torch.cat([part.first for _, part in parts]), requires_grad=False)
        layer.lora_B = nn.Parameter(torch.cat([part.second for _, part in parts], 1), requires_grad=False)
        layer.rows, layer.columns = rows, tuple((number, len(part.first)) for number, part in parts)
        layer.scale, layer.is_on = 1.0, True


def row_adapters(model: nn.Module) -> RowAdapters:
    """Which adapter each row has, in a model that has several; in any other, that there are none."""
    layers = (layer.rows for layer in model.modules() if isinstance(layer, RowLoraLinear))
    return next(layers, RowAdapters())


def row_adapter_bytes(model: nn.Module, rows: int) -> int:
    """Bytes that a pass over so many rows needs for several adapters: at most one block's products with A, and the
    masks of them."""
    layers = {name: one for name, one in adapted_layers(model).items() if isinstance(one, RowLoraLinear)}
    ranks = {name.rpartition(".")[2]: len(one.lora_A) for name, one in layers.items()}
    itemsize = max((one.lora_A.itemsize for one in layers.values()), default=0)
    return rows * sum(ranks.values()) * (itemsize + torch.float32.itemsize)
