"""Host copies of holdings, which a save reads while the loop continues to train."""

from __future__ import annotations

import torch
from torch import Tensor

from ebbtide.memory.mover import Move
from ebbtide.memory.plan import HoldingName
from ebbtide.system.torch_internals import storage_id


class HostCopies:
    """Host copies of what was on the device at one moment: `copies(tensor)` is a tensor's host copy, or the tensor
    itself if it lives on the host."""

    def __init__(self) -> None:
        self._bytes: dict[int, Tensor] = {}
        self.needs_lease: list[HoldingName] = []
        """Holdings that are partly read in place on the host: the reader needs a lease on them."""
        self.moves: list[Move | None] = []
        """The copies that are under way."""

    def put(self, device: Tensor, host: Tensor) -> None:
        """Adds the copy of a whole storage: its bytes on the device, and on the host."""
        self._bytes[storage_id(device)] = host

    def __call__(self, tensor: Tensor) -> Tensor:
        host = self._bytes.get(storage_id(tensor))
        if host is None:
            return tensor
        start = int(host.storage_offset()) // tensor.element_size() + int(tensor.storage_offset())
        return torch.empty(0, dtype=tensor.dtype).set_(host.untyped_storage(), start, tensor.size(), tensor.stride())
