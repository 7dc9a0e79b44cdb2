"""Linear layers of a fused block that have the same input, as one: their matrices, biases and adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from ebbtide.model.joined_weights import JoinedWeights
from ebbtide.policy.fused_adapters import FusedAdapters


class Projection:
    """The products of one input with some matrices, side by side."""

    def __init__(self, block: nn.Module, paths: Sequence[str]) -> None:
        """`paths`: of the layers in the block, in the order of their products."""
        present = {name for name, _ in block.named_parameters()}
        self._matrix = JoinedWeights([f"{path}.weight" for path in paths])
        self._bias = JoinedWeights([name for path in paths if (name := f"{path}.bias") in present])
        self._adapters = FusedAdapters(block, paths)

    @property
    def names(self) -> Sequence[str]:
        """Paths of its weights in the block, without those of adapters."""
        return [*self._matrix.names, *self._bias.names]

    @property
    def adapter_names(self) -> Sequence[str]:
        return self._adapters.names

    @property
    def joinable(self) -> Sequence[Sequence[str]]:
        """Names of weights that are to follow each other in memory."""
        return [self._matrix.names, self._bias.names, self._adapters.joinable]

    def keep_apart(self) -> None:
        """Multiplies matrices one by one with few rows, even where they follow each other in memory."""
        self._matrix.apart = True

    def __call__(self, x: Tensor, weights: dict[str, Tensor]) -> Tensor:
        """The products of x [T, K]: [T, N]."""
        return self._adapters.add(self._matrix.product(x, weights, self._bias), x, weights)

    def backward(
        self, grad: Tensor, weights: dict[str, Tensor], grads: dict[str, Tensor | None], *, wants: bool
    ) -> tuple[Tensor, Callable[[Tensor], None]]:
        """(the gradient of x, a function that is called with x and sets the gradients of the weights, of others than
        adapters only if it `wants` them)."""
        dx = grad @ self._matrix(weights)
        finish_adapters = self._adapters.backward(dx, grad, weights, grads)
        if wants and self._bias.names:
            grads.update(self._bias.split(grad.sum(0), weights))

        def finish(x: Tensor) -> None:
            finish_adapters(x)
            if wants:
                grads.update(self._matrix.split(grad.t() @ x, weights))

        return dx, finish
