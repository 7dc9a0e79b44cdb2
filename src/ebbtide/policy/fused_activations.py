"""Keeps, offloads or drops what fused blocks save, by name (`memory.activations`): the counterpart of activations.py,
whose hooks do the same for transformers' own blocks."""

from __future__ import annotations

from collections import Counter

from torch import Tensor

from ebbtide.config.memory import ActivationName
from ebbtide.memory.activations import ActivationOffloader, OffloadedTensor
from ebbtide.policy.block_activations import ActivationChoice
from ebbtide.policy.fuse import FusedBlocks


class FusedActivations:
    """Carries out a choice inside `with activations:`, around the forwards and backwards of a training step."""

    def __init__(
        self,
        blocks: FusedBlocks,
        choice: ActivationChoice,
        offloader: ActivationOffloader | None,
        *,
        keep_last: int = 1,
        minimum: int = 2**16,
    ) -> None:
        self._blocks, self._offloader, self._minimum = blocks, offloader, minimum
        count = len(blocks.blocks)
        # The backward starts with the last blocks: what they offload would be needed again at once.
        self._choices = [choice.of_block(number, offloads=number < count - keep_last) for number in range(count)]
        self.counted: Counter[ActivationName] | None = None
        """If set, the bytes of each name are counted and nothing is offloaded."""

    def __enter__(self) -> FusedActivations:
        self._blocks.activations = self
        return self

    def __exit__(self, *_: object) -> None:
        self._blocks.activations = None
        if self._offloader is not None:
            self._offloader.reset()

    def begin(self, number: int) -> _BlockActivations:
        """Begins the forward of a block, and returns where it saves."""
        choice, offloader = self._choices[number], None if self.counted is not None else self._offloader
        if offloader is not None:
            offloader.enter(number)
        return _BlockActivations(choice, offloader, self._minimum, self.counted)


class _BlockActivations:
    """What one forward of one block saves."""

    def __init__(
        self,
        choice: ActivationChoice,
        offloader: ActivationOffloader | None,
        minimum: int,
        counted: Counter[ActivationName] | None,
    ) -> None:
        self._choice, self._offloader, self._minimum, self._counted = choice, offloader, minimum, counted
        self._saved: dict[ActivationName, tuple[Tensor | OffloadedTensor, ...]] = {}

    def put(self, name: ActivationName, *tensors: Tensor) -> None:
        if name in self._choice.recompute:
            return
        if self._counted is not None:
            self._counted[name] += sum(tensor.nbytes for tensor in tensors)
        offloads = name in self._choice.offload
        self._saved[name] = tuple(self._offload(tensor) for tensor in tensors) if offloads else tensors

    def _offload(self, tensor: Tensor) -> Tensor | OffloadedTensor:
        if self._offloader is None or tensor.nbytes < self._minimum:
            return tensor
        return self._offloader.offload(tensor) or tensor

    def take(self, name: ActivationName) -> tuple[Tensor, ...] | None:
        found = self._saved.pop(name, None)
        return None if found is None else tuple(self._fetch(one) for one in found)

    def _fetch(self, saved: Tensor | OffloadedTensor) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        assert self._offloader is not None
        return self._offloader.fetch(saved)
